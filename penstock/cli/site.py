"""Where a run takes place: this machine, or with `--address` a Ray cluster."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.events import Observer


def add_address(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--address",
        metavar="ADDRESS",
        help="run on a Ray cluster: auto (this machine's), HOST:PORT, or local (a Ray that lives as long as the run)",
    )
    command.add_argument(
        "--trusted-network",
        action="store_true",
        help="the cluster has several nodes and no token, and whoever can reach it may",
    )


def check_address(options: argparse.Namespace, config: Any) -> None:
    """Before anything is loaded. Raises ConfigError when actors are asked for and there is no Ray to have them."""
    from penstock.resources import actor_problems

    if options.address is None:
        if problems := list(actor_problems(config)):
            raise ConfigError(problems)
    elif importlib.util.find_spec("ray") is None:
        raise ConfigError("--address needs Ray; install it with: pip install 'penstock[ray]'")


@contextlib.contextmanager
def open_site(options: argparse.Namespace, observer: Observer) -> Iterator[Any]:
    """The `Site` of the run; None is this machine. Closed, nothing of the run is left in the cluster."""
    if options.address is None:
        yield None
        return
    from penstock.cluster.session import connect
    from penstock.cluster.site import RaySite

    with connect(options.address, trusted_network=options.trusted_network) as session:
        yield RaySite(session, observer=observer)
