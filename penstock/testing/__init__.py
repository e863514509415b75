"""For tests of runs, ours and yours: a virtual clock, scripted engine and judger, faults, a checker of histories.

clock.py       run_virtual: asyncio in virtual time, under seeded schedules; a hang is an error
engine.py      ScriptedEngine: lengths, speed and faults from a script
judger.py      ScriptedJudger: scores, delays and faults from a script
history.py     RecordingStorage and check_history: lost, skipped, doubled, stale, or fine
world.py       ScriptedWorld: a manager with scripted parts, in a few lines
simulation.py  whole runs drawn from a seed
crashes.py     the same with crashes after chosen writes of the ledger, and restarts
faults.py      a disk that is full, broken or read-only, or a kill, at a chosen operation
refeed.py      refeed: every recorded answer asked again by itself
ledger_history.py  check_ledger: the checker over the ledger and the trajectories of a run directory
"""

from penstock.testing.clock import Hang, VirtualClockLoop, run_virtual
from penstock.testing.engine import EngineFaults, EngineScript, ScriptedEngine
from penstock.testing.faults import DiskFailure, Faults, FaultyDisk, FaultyFiles
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
from penstock.testing.ledger_history import LedgerHistory, check_ledger, read_batches, read_history
from penstock.testing.refeed import RecordedAnswer, Refed, RefeedMismatch, recorded_answers, refeed
from penstock.testing.script import Distribution, constant, long_tail, uniform
from penstock.testing.tokenizer import CharTokenizer
from penstock.testing.world import ScriptedTask, ScriptedWorld

__all__ = [
    "Batch",
    "BrokenHistory",
    "CharTokenizer",
    "DiskFailure",
    "Distribution",
    "EngineFaults",
    "EngineScript",
    "Event",
    "Faults",
    "FaultyDisk",
    "FaultyFiles",
    "Findings",
    "Hang",
    "History",
    "JudgerScript",
    "LedgerHistory",
    "RecordedAnswer",
    "RecordingStorage",
    "Refed",
    "RefeedMismatch",
    "Restart",
    "ScriptedEngine",
    "ScriptedJudger",
    "ScriptedTask",
    "ScriptedWorld",
    "VirtualClockLoop",
    "check_history",
    "check_ledger",
    "constant",
    "long_tail",
    "read_batches",
    "read_history",
    "recorded_answers",
    "refeed",
    "run_virtual",
    "uniform",
]
