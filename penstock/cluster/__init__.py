"""The same run on a Ray cluster. Only this package imports Ray, and nothing outside it knows that there is one.

    session.py     connecting to a cluster, or starting one on this machine; nothing of a run is left in it
    resources.py   CPUResourceManager: what all parts take together, checked before anything starts
    launcher.py    CPUActorLauncher: actors with their CPUs and memory, in placement groups; watched while they live
    host.py        the program of an actor: hosts any object that a `Description` describes
    peer.py        calls in lists, whatever carries them
    line.py        this process's calls to one actor
    member.py      one actor, as everybody else sees it
    routers.py     several actors as one: least in flight, another try elsewhere
    backcalls.py   from an actor to what lives in the driver
    proxies.py     the ports, over any of these
    wire.py        groups and errors on their way
    placement.py   RayPlacement: the `Placement` port
    door.py        in the actor of the rollout controller: engines that live in other actors
    engines.py     the engines' actors, seen from the driver
    ranks.py       train ranks in actors
    site.py        RaySite: where the parts of a run live

Names are loaded when first used, so that what needs no Ray brings none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.cluster.launcher import CPUActorLauncher
    from penstock.cluster.placement import RayPlacement
    from penstock.cluster.resources import CPUResourceManager
    from penstock.cluster.session import Session, connect
    from penstock.cluster.site import RaySite

_HOMES = {
    "CPUActorLauncher": "penstock.cluster.launcher",
    "CPUResourceManager": "penstock.cluster.resources",
    "RayPlacement": "penstock.cluster.placement",
    "RaySite": "penstock.cluster.site",
    "Session": "penstock.cluster.session",
    "connect": "penstock.cluster.session",
}

__all__ = ["CPUActorLauncher", "CPUResourceManager", "RayPlacement", "RaySite", "Session", "connect"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
