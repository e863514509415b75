"""What every judger's configuration offers, and the one place that builds them."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.config import Config
from penstock.ports import Description, Judger, Local, Placement


class JudgerConfig(Config, abc.ABC):
    """Base of judger configurations."""

    @property
    def data_sources(self) -> frozenset[str] | None:
        """The data sources it serves; None for any. Rows of another source are found when the dataset is scanned."""
        return None

    @property
    def asks_engine(self) -> bool:
        """Whether it asks the engines of the run that it judges; places are kept for it there then."""
        return False

    @abc.abstractmethod
    def build(self, placement: Placement = Local()) -> Judger:  # noqa: B008 - it has no state
        """A judger of its own. What training and evaluation share is built by a `JudgerSet`."""


class JudgerSet:
    """Builds each configured judger once, however many tasks, train or eval, ask for it. Equal configurations are one.

    The trainer owns it and closes it; the judgers it handed out are not closed one by one. It is a `Placement`, so that
    a composed judger's branches are shared too.
    """

    def __init__(
        self,
        placement: Placement | None = None,
        *,
        output: str | None = None,
        ports: Mapping[str, Any] | None = None,
    ) -> None:
        """`output` is the file to which what reward functions print is added; None: standard error. `ports` are what
        judgers may ask for: the engines of the run (`RunEngine`), its tokenizer."""
        self.output = output
        self._placement = placement or Local()
        self.ports = dict(ports or {})
        self._built: list[tuple[JudgerConfig, Judger]] = []

    def get(self, config: JudgerConfig) -> Judger:
        for known, judger in self._built:
            if type(known) is type(config) and known == config:
                return judger
        judger = config.build(self)
        self._built.append((config, judger))
        return judger

    def place(self, description: Description, ports: Mapping[str, Any]) -> Any:
        return self._placement.place(description, {**self.ports, **ports})

    async def metrics(self) -> dict[str, float]:
        """Of all judgers together."""
        return added_up([await judger.metrics() for _, judger in self._built])

    async def close(self) -> None:
        """Close every judger; a second call finds nothing to do."""
        built, self._built = self._built, []
        for _, judger in built:
            await judger.close()


def output_of(placement: Placement) -> str | None:
    """Where what a reward function prints goes: a judger that no set builds writes to standard error."""
    return placement.output if isinstance(placement, JudgerSet) else None


def added_up(told: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of several judgers as one's; of latencies the longest."""
    total: dict[str, float] = {}
    for metrics in told:
        for name, value in metrics.items():
            total[name] = max(total.get(name, 0.0), value) if "latency" in name else total.get(name, 0.0) + value
    return total


def build_part(config: JudgerConfig, placement: Placement) -> Judger:
    """A judger inside another one: shared when the placement shares."""
    return placement.get(config) if isinstance(placement, JudgerSet) else config.build(placement)
