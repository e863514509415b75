"""CPUResourceManager: what all parts of a run take together, against what the cluster has.

Checked before anything starts: a placement group without room would stay partial for ever. Workers with accelerators
are placed first; what agent loops, judgers and the like may take is what the nodes have besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from penstock.config import nearest
from penstock.errors import ConfigError
from penstock.resources import Demand

SLACK = 1e-6
"""Ray counts CPUs in ten-thousandths."""


class NodeResources(msgspec.Struct, frozen=True, kw_only=True):
    """What one node has to give."""

    name: str
    """Its address."""
    resources: dict[str, float]
    """What is free now, as Ray counts it: CPU, memory, GPU, ..."""
    total: dict[str, float] = {}

    def free(self, kind: str) -> float:
        return self.resources.get(kind, 0.0)


class CPUResourceManager:
    """Add every demand, then `check`."""

    def __init__(self, nodes: Iterable[NodeResources]) -> None:
        self._nodes = list(nodes)
        self._demands: list[Demand] = []

    def add(self, demand: Demand) -> None:
        if demand.num_workers:
            self._demands.append(demand)

    @property
    def demands(self) -> list[Demand]:
        """In the order in which they are placed: those with accelerators, then the large ones."""
        return sorted(self._demands, key=lambda d: (d.accelerator is None, -d.num_cpus, -d.memory, d.name))

    def check(self) -> None:
        """Raises ConfigError with every shortage, and the node that is closest to having room."""
        if found := list(self.problems()):
            raise ConfigError(found)

    def problems(self) -> Iterator[str]:
        if not self._nodes:
            yield "the cluster has no node"
            return
        for demand in self.demands:
            yield from self._unknown(demand)
        single = [problem for demand in self.demands for problem in self._too_large(demand)]
        yield from single
        if not single:
            yield from self._too_much()

    def _unknown(self, demand: Demand) -> Iterator[str]:
        if demand.accelerator is None or any(node.total.get(demand.accelerator) for node in self._nodes):
            return
        known = {kind for node in self._nodes for kind in node.total if _is_accelerator(kind)}
        hint = nearest(demand.accelerator, sorted(known)) if known else " The cluster has no accelerators."
        yield f"{demand.name}: no node has a {demand.accelerator!r}.{hint}"

    def _too_large(self, demand: Demand) -> Iterator[str]:
        """One worker that fits on no node, whatever else there is."""
        wants = _bundle(demand)
        if any(_fits(wants, node.resources) for node in self._nodes):
            return
        for kind, amount in wants.items():
            largest = max(self._nodes, key=lambda node: node.free(kind))
            if largest.free(kind) + SLACK < amount:
                yield (
                    f"{demand.name}: a worker needs {_amount(kind, amount)}; the largest node, {largest.name}, has "
                    f"{_amount(kind, largest.free(kind))} free of {_amount(kind, largest.total.get(kind, 0.0))}"
                )
                return
        closest = min(self._nodes, key=lambda node: len(_missing(wants, node.resources)))
        yield (
            f"{demand.name}: no node has {_all(wants)} free at once; the closest, {closest.name}, lacks "
            f"{_all(_missing(wants, closest.resources))}"
        )

    def _too_much(self) -> Iterator[str]:
        """All of them together, each worker on the node with most room."""
        left = {node.name: dict(node.resources) for node in self._nodes}
        for demand in self.demands:
            wants, used = _bundle(demand), set[str]()
            for placed in range(demand.num_workers):
                node = _choose(left, wants, used, demand)
                if node is None:
                    yield self._shortage(demand, placed, left, used)
                    return
                used.add(node)
                for kind, amount in wants.items():
                    left[node][kind] = left[node].get(kind, 0.0) - amount

    def _shortage(self, demand: Demand, placed: int, left: dict[str, dict[str, float]], used: set[str]) -> str:
        wants = _bundle(demand)
        closest = min(left, key=lambda node: len(_missing(wants, left[node])))
        missing = _missing(wants, left[closest])
        before = f"after {placed} of its {demand.num_workers} workers and all before it, "
        asked = ", ".join(f"{d.name} {d.num_workers} x {_all(_bundle(d))}" for d in self.demands)
        if not missing:
            strict = f"its strategy is {demand.strategy}, and the cluster has {len(left)} nodes"
            return f"{demand.name}: {before}no node is left for the next: {strict}. Asked for: {asked}"
        return (
            f"{demand.name}: {before}the next needs {_all(wants)}, and the node with most room, {closest}, lacks "
            f"{_all(missing)}. Asked for: {asked}"
        )


def _bundle(demand: Demand) -> dict[str, float]:
    bundle = {"CPU": demand.num_cpus, "memory": float(demand.memory)}
    if demand.accelerator is not None:
        bundle[demand.accelerator] = demand.accelerators
    return bundle


bundle_of = _bundle
"""What Ray is asked for, for one worker."""


def _choose(left: dict[str, dict[str, float]], wants: dict[str, float], used: set[str], demand: Demand) -> str | None:
    rooms = [node for node, free in left.items() if _fits(wants, free)]
    if demand.strategy == "STRICT_SPREAD":
        rooms = [node for node in rooms if node not in used]
    elif demand.strategy == "STRICT_PACK" and used:
        rooms = [node for node in rooms if node in used]
    spread = demand.strategy in ("SPREAD", "STRICT_SPREAD")
    # Spread over nodes that have none yet, else onto the emptiest; packed onto what is used already, else the fullest.
    key = (
        (lambda node: (node in used, -left[node].get("CPU", 0.0)))
        if spread
        else (lambda node: (node not in used, left[node].get("CPU", 0.0)))
    )
    return min(rooms, key=key, default=None)


def _fits(wants: dict[str, float], free: dict[str, float]) -> bool:
    return not _missing(wants, free)


def _missing(wants: dict[str, float], free: dict[str, float]) -> dict[str, float]:
    return {
        kind: amount - free.get(kind, 0.0) for kind, amount in wants.items() if free.get(kind, 0.0) + SLACK < amount
    }


def _is_accelerator(kind: str) -> bool:
    return kind not in ("CPU", "memory", "object_store_memory") and not kind.startswith(("node:", "accelerator_type:"))


def _amount(kind: str, amount: float) -> str:
    return f"{amount / (1 << 30):.2f} GiB of memory" if kind == "memory" else f"{amount:g} {kind}"


def _all(amounts: dict[str, float]) -> str:
    return " and ".join(_amount(kind, amount) for kind, amount in amounts.items())
