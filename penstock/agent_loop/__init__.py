"""A group of prompts in, the group played and judged.

base.py         AgentLoop: what a user subclasses; plays a group
transcript.py   Transcript: the record of one rollout while it is played
judging.py      what becomes of an answer that is whole
deadline.py     deadlines that do not wait for a user's code to agree
config.py       AgentLoopConfig
single_turn.py  one prompt, one answer
"""

from penstock.agent_loop.base import AgentLoop
from penstock.agent_loop.config import AgentLoopConfig
from penstock.agent_loop.single_turn import SingleTurnAgentLoop, SingleTurnAgentLoopConfig
from penstock.agent_loop.transcript import Answer, Transcript, rollout_seed

__all__ = [
    "AgentLoop",
    "AgentLoopConfig",
    "Answer",
    "SingleTurnAgentLoop",
    "SingleTurnAgentLoopConfig",
    "Transcript",
    "rollout_seed",
]
