"""One prompt, one answer."""

from __future__ import annotations

from penstock.agent_loop.base import AgentLoop, AgentLoopConfig
from penstock.rollout import RolloutState


class SingleTurnAgentLoop(AgentLoop):
    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        await self.generate(rollout)
        return rollout


class SingleTurnAgentLoopConfig(AgentLoopConfig):
    loop: type[AgentLoop] | str = SingleTurnAgentLoop
