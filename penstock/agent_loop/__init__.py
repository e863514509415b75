"""A group of prompts in, the group played and judged.

base.py         AgentLoop: what a user subclasses; plays a group
transcript.py   Transcript: one rollout while it is played
record.py       Record: what it has on record, read back and written
judging.py      what becomes of an answer that is whole
deadline.py     deadlines that do not wait for a user's code to agree
config.py       AgentLoopConfig
single_turn.py  one prompt, one answer
tool_loop.py    ToolAgentLoop: answers, calls of tools, answers again
env_loop.py     EnvAgentLoop: the model and an environment take turns
env.py          environments: on the event loop, or in worker processes; gym_env.py and openenv.py are some
tools.py        functions as tools: schema, deadline, what the model is told
endpoint.py     EndpointAgentLoop: an agent outside, through the session endpoint
verifiers_loop.py  VerifiersAgentLoop: a taskset of verifiers, through the session endpoint
session/        the session endpoint
asking.py       what a transcript asks of an engine
calculator.py   a calculator as a tool
parsers.py      calls out of what a model wrote
rendering.py    what is appended to recorded ids when a conversation goes on
verl_loop.py    VerlAgentLoop: an agent loop written for verl
verl_tools.py   tools written for verl; verl_names.py stands in for what they import
"""

from penstock.agent_loop.asking import rollout_seed
from penstock.agent_loop.base import AgentLoop
from penstock.agent_loop.calculator import calculator
from penstock.agent_loop.config import AgentLoopConfig
from penstock.agent_loop.endpoint import EndpointAgentLoop, EndpointAgentLoopConfig
from penstock.agent_loop.env import Env
from penstock.agent_loop.env_loop import EnvAgentLoop, EnvAgentLoopConfig
from penstock.agent_loop.single_turn import SingleTurnAgentLoop, SingleTurnAgentLoopConfig
from penstock.agent_loop.tool_loop import ToolAgentLoop, ToolAgentLoopConfig
from penstock.agent_loop.transcript import Answer, Transcript
from penstock.agent_loop.verifiers_loop import VerifiersAgentLoop, VerifiersAgentLoopConfig
from penstock.agent_loop.verl_loop import VerlAgentLoop, VerlAgentLoopConfig

__all__ = [
    "AgentLoop",
    "AgentLoopConfig",
    "Answer",
    "EndpointAgentLoop",
    "EndpointAgentLoopConfig",
    "Env",
    "EnvAgentLoop",
    "EnvAgentLoopConfig",
    "SingleTurnAgentLoop",
    "SingleTurnAgentLoopConfig",
    "ToolAgentLoop",
    "ToolAgentLoopConfig",
    "Transcript",
    "VerifiersAgentLoop",
    "VerifiersAgentLoopConfig",
    "VerlAgentLoop",
    "VerlAgentLoopConfig",
    "calculator",
    "rollout_seed",
]
