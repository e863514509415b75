"""What every judger's configuration offers, and the one place that builds them."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

from penstock.config import Config
from penstock.ports import Description, Judger, Local, Placement


class JudgerConfig(Config, abc.ABC):
    """Base of judger configurations."""

    @property
    def data_sources(self) -> frozenset[str] | None:
        """The data sources it serves; None for any. Rows of another source are found when the dataset is scanned."""
        return None

    @abc.abstractmethod
    def build(self, placement: Placement = Local()) -> Judger:  # noqa: B008 - it has no state
        """A judger of its own. What training and evaluation share is built by a `JudgerSet`."""


class JudgerSet:
    """Builds each configured judger once, however many tasks, train or eval, ask for it. Equal configurations are one.

    The trainer owns it and closes it; the judgers it handed out are not closed one by one. It is a `Placement`, so that
    a composed judger's branches are shared too.
    """

    def __init__(self, placement: Placement | None = None) -> None:
        self._placement = placement or Local()
        self._built: list[tuple[JudgerConfig, Judger]] = []

    def get(self, config: JudgerConfig) -> Judger:
        for known, judger in self._built:
            if type(known) is type(config) and known == config:
                return judger
        judger = config.build(self)
        self._built.append((config, judger))
        return judger

    def place(self, description: Description, ports: Mapping[str, Any]) -> Any:
        return self._placement.place(description, ports)

    async def metrics(self) -> dict[str, float]:
        """Of all judgers together."""
        total: dict[str, float] = {}
        for _, judger in self._built:
            for name, value in (await judger.metrics()).items():
                total[name] = max(total.get(name, 0.0), value) if "latency" in name else total.get(name, 0.0) + value
        return total

    async def close(self) -> None:
        """Close every judger; a second call finds nothing to do."""
        built, self._built = self._built, []
        for _, judger in built:
            await judger.close()


def build_part(config: JudgerConfig, placement: Placement) -> Judger:
    """A judger inside another one: shared when the placement shares."""
    return placement.get(config) if isinstance(placement, JudgerSet) else config.build(placement)
