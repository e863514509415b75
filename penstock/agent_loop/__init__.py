"""A group of prompts in, the group played and judged."""

from penstock.agent_loop.base import AgentLoop, AgentLoopConfig, Answer, check_completion, rollout_seed
from penstock.agent_loop.single_turn import SingleTurnAgentLoop, SingleTurnAgentLoopConfig

__all__ = [
    "AgentLoop",
    "AgentLoopConfig",
    "Answer",
    "SingleTurnAgentLoop",
    "SingleTurnAgentLoopConfig",
    "check_completion",
    "rollout_seed",
]
