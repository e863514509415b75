"""A run of a recipe in a child of this process, which is killed at a chosen instant.

Importing torch and transformers takes seconds, so it happens once, in the parent: it starts no thread and computes
nothing, and every victim is a fork of it.
"""

from __future__ import annotations

import os

# Before anything is imported: a pool of threads does not survive a fork.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import json
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.cli.config_file import load_config
from penstock.errors import RefusedError, RunError
from penstock.testing.faults import DiskFailure, Faults, FaultyDisk, FaultyFiles

TAG = "PENSTOCK_CRASH_VICTIM"
"""In the environment of everything that a victim starts, so that orphans can be found."""
HANGS_AFTER_S = 120.0
ORPHANS_GONE_WITHIN_S = 15.0


class Trainer(msgspec.Struct, frozen=True):
    """A recipe, made small."""

    name: str
    recipe: str
    settings: tuple[str, ...] = ("evaluator=null",)
    deterministic: bool = False

    @property
    def all_settings(self) -> list[str]:
        common = ["train_batch_size=4", "cpu_threads=1", f"total_steps={STEPS}", "checkpoint_interval=3"]
        return [*common, f"eval_interval={EVAL_INTERVAL}", *self.settings]

    @property
    def evaluated(self) -> bool:
        return "evaluator=null" not in self.settings


STEPS = 12
EVAL_INTERVAL = 6
IN_PROCESS = "engines.engine.process=false"
SYNC = Trainer("tiny", "tiny", deterministic=True)
SYNC_EVALUATED = Trainer("tiny, evaluated", "tiny", (), deterministic=True)
ASYNC = Trainer("tiny-async", "tiny-async", ("evaluator=null", IN_PROCESS))
ASYNC_EVALUATED = Trainer("tiny-async, evaluated", "tiny-async", (IN_PROCESS,))
PROCESS = Trainer(
    "tiny-async, engine process",
    "tiny-async",
    ("evaluator=null", f'engines.engine.environment=["{TAG}"]'),
)


class Instant(msgspec.Struct, frozen=True):
    """When a victim is killed, or its disk fails: after seconds, or before an operation."""

    kind: str
    """`wall`, `ledger`, `files`, or `none`."""
    at: float = 0.0
    failure: str | None = None
    """The name of a DiskFailure, instead of the kill."""


NEVER = Instant("none")


class Ended(msgspec.Struct):
    code: int
    seconds: float
    killed: bool
    operations: dict[str, int]
    """How many of each kind there were, when it came to its own end."""


def load_everything() -> None:
    """What a run imports, in this process. Raises when that started a thread."""
    import transformers.models.llama.modeling_llama  # noqa: F401 - the tiny model is one
    from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: F401
    from transformers import AutoModelForCausalLM, GenerationConfig  # noqa: F401

    import penstock.engine.torch_engine
    import penstock.trainer.colocate
    import penstock.trainer.disaggregated
    import penstock.trainer.parts  # noqa: F401
    from penstock.models import load_tokenizer, resolve_model

    load_tokenizer(resolve_model("tiny"))
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise RuntimeError(f"{threads} threads after the imports; a fork would have only one of them")


def run_victim(trainer: Trainer, run_dir: Path, instant: Instant = NEVER) -> Ended:
    """Run until killed or done. Everything it says is in `<run directory>.log`; orphans are an error."""
    log = run_dir.with_name(f"{run_dir.name}.log")
    counts = run_dir.with_name(f"{run_dir.name}.operations")
    counts.unlink(missing_ok=True)
    started = time.monotonic()
    tag = f"{os.getpid()}-{time.monotonic_ns()}"
    pid = os.fork()
    if pid == 0:
        _live(trainer, run_dir, instant, log, counts, tag)
    deadline = started + (instant.at if instant.kind == "wall" else HANGS_AFTER_S)
    status = _wait(pid, deadline)
    if status is None:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if instant.kind != "wall":
            raise AssertionError(f"{run_dir}: the victim hangs; see {log}")
    seconds = time.monotonic() - started
    orphans = _orphans(tag)
    if orphans:
        raise AssertionError(f"{run_dir}: left running after its driver's end: {orphans}")
    code = os.waitstatus_to_exitcode(status)
    operations = json.loads(counts.read_text()) if counts.exists() else {}
    return Ended(code, seconds, code == -signal.SIGKILL, operations)


def _live(trainer: Trainer, run_dir: Path, instant: Instant, log: Path, counts: Path, tag: str) -> None:
    """In the child, to its end."""
    code = 70
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ[TAG] = tag
        print(f"--- {trainer.name} {instant}", flush=True)
        code = _train(trainer, run_dir, instant, counts)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _train(trainer: Trainer, run_dir: Path, instant: Instant, counts: Path) -> int:
    import torch

    from penstock.trainer.colocate import RLColocateTrainer
    from penstock.trainer.disaggregated import RLDisaggregatedTrainer
    from penstock.trainer.parts import build_trainer

    torch.set_num_threads(1)
    failure = DiskFailure[instant.failure] if instant.failure else None
    faults = {
        kind: Faults(int(instant.at) if instant.kind == kind else None, failure=failure) for kind in ("ledger", "files")
    }
    config: Any = load_config(trainer.recipe, trainer.all_settings)
    kind: Any = RLColocateTrainer if trainer.recipe == "tiny" else RLDisaggregatedTrainer
    journal = Journal(run_dir)
    try:
        build_trainer(
            config,
            kind,
            run_dir,
            None,
            "auto",
            disk=FaultyDisk(faults["ledger"], on_commit=journal.committed),
            files=FaultyFiles(faults["files"]),
        ).fit()
    except (RunError, RefusedError) as error:
        print(f"penstock: {error}", flush=True)
        return 2 if isinstance(error, RefusedError) else 1
    counts.write_text(json.dumps({kind: fault.count for kind, fault in faults.items()}))
    return 0


class Journal:
    """Every event that a commit made durable, written beside the run by the one who saw the commit return.

    A kill leaves the page cache alone, so nothing needs to be flushed.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = journal_file(run_dir)
        self._file: int | None = None

    def committed(self, events: list[Sequence[Any]]) -> None:
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(self._file, b"".join(json.dumps(list(event)).encode() + b"\n" for event in events))


def journal_file(run_dir: Path) -> Path:
    return run_dir.with_name(f"{run_dir.name}.journal")


def _wait(pid: int, deadline: float) -> int | None:
    """The child's status, or None at the deadline."""
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.005)
    return None


def _orphans(tag: str) -> list[str]:
    """Processes that carry the tag and do not go away. A fork of this process has its parent's environment."""
    deadline = time.monotonic() + ORPHANS_GONE_WITHIN_S
    while (found := _tagged(tag)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def _tagged(tag: str) -> list[str]:
    wanted = f"{TAG}={tag}".encode()
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                found.append(f"{process.name} {(process / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()}")
        except OSError:
            continue
    return found
