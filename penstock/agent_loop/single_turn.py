"""One prompt, one answer."""

from __future__ import annotations

from penstock.agent_loop.base import AgentLoop
from penstock.agent_loop.config import AgentLoopConfig
from penstock.rollout import RolloutState


class SingleTurnAgentLoop(AgentLoop):
    """Prompt, answer, judge."""

    durable_turns = False  # Its only turn is stored with the group at once.

    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        await self.generate(rollout)
        return rollout


class SingleTurnAgentLoopConfig(AgentLoopConfig):
    """Asks once and takes the answer."""

    loop: type[AgentLoop] | str = SingleTurnAgentLoop
