"""RLColocateTrainer: engine and trainer take turns on the same devices."""

from __future__ import annotations

from penstock.trainer.base import RLTrainer
from penstock.trainer.loops import Devices, LoopPorts, colocated_loop


class RLColocateTrainer(RLTrainer):
    async def _loop(self, ports: LoopPorts, begin: int) -> int:
        return await colocated_loop(self._schedule, ports, begin=begin)

    def _devices(self) -> Devices:
        return self.parts.engine
