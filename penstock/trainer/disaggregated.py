"""RLDisaggregatedTrainer: a producer in the background and the trainer in front of it, coupled by the buffer alone."""

from __future__ import annotations

from penstock.trainer.base import RLTrainer
from penstock.trainer.loops import LoopPorts, disaggregated_loop


class RLDisaggregatedTrainer(RLTrainer):
    async def _loop(self, ports: LoopPorts, begin: int) -> int:
        return await disaggregated_loop(self._schedule, ports, begin=begin)
