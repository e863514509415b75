"""For tests of runs, ours and yours: a virtual clock, scripted engine and judger, a checker of histories.

clock.py       run_virtual: asyncio in virtual time, under seeded schedules; a hang is an error
engine.py      ScriptedEngine: lengths, speed and faults from a script
judger.py      ScriptedJudger: scores, delays and faults from a script
history.py     RecordingStorage and check_history: lost, skipped, doubled, stale, or fine
world.py       ScriptedWorld: a manager with scripted parts, in a few lines
simulation.py  whole runs drawn from a seed
"""

from penstock.testing.clock import Hang, VirtualClockLoop, run_virtual
from penstock.testing.engine import EngineFaults, EngineScript, ScriptedEngine
from penstock.testing.history import (
    Batch,
    BrokenHistory,
    Event,
    Findings,
    History,
    RecordingStorage,
    Restart,
    check_history,
)
from penstock.testing.judger import JudgerScript, ScriptedJudger
from penstock.testing.script import Distribution, constant, long_tail, uniform
from penstock.testing.tokenizer import CharTokenizer
from penstock.testing.world import ScriptedTask, ScriptedWorld

__all__ = [
    "Batch",
    "BrokenHistory",
    "CharTokenizer",
    "Distribution",
    "EngineFaults",
    "EngineScript",
    "Event",
    "Findings",
    "Hang",
    "History",
    "JudgerScript",
    "RecordingStorage",
    "Restart",
    "ScriptedEngine",
    "ScriptedJudger",
    "ScriptedTask",
    "ScriptedWorld",
    "VirtualClockLoop",
    "check_history",
    "constant",
    "long_tail",
    "run_virtual",
    "uniform",
]
