"""A run directory as a real run leaves it: events, ledger, trajectories, and an answer that tries to be a script."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np

from penstock.events import (
    EngineChanged,
    EvaluationDone,
    Event,
    RunBegan,
    RunEnded,
    StageBegan,
    StageEnded,
    StepTrained,
    Warned,
    WeightsPublished,
)
from penstock.replay import DiscardReason, Ledger, ReplayBuffer
from penstock.replay.lock import LOCK_FILE
from penstock.rollout import (
    Failure,
    FailureReason,
    FinishReason,
    Group,
    Prompt,
    RolloutState,
    Segment,
    Status,
    Tokens,
    Turn,
    Verdict,
    pack_ids,
)
from penstock.testing import CharTokenizer
from penstock.trainer.index import RolloutIndex
from penstock.trainer.observers import EVENTS_FILE, EventFile
from penstock.trainer.trajectories import Trajectories

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"
K = 2


def tell(run_dir: Path, *events: Event) -> None:
    file = EventFile(run_dir / EVENTS_FILE)
    for event in events:
        file.notice(event)
    file.close()


def step_events(step: int, **metrics: float) -> list[Event]:
    stages: list[Event] = [StageBegan(stage="step", train_step=step)]
    for stage in ("produce", "train"):
        stages.append(StageBegan(stage=stage, train_step=step))
        stages.append(StageEnded(stage=stage, train_step=step, seconds=0.1))
    trained = StepTrained(train_step=step, metrics={"reward/mean": step / 10, "tokens/generated": 100.0, **metrics})
    return [*stages, trained, StageEnded(stage="step", train_step=step, seconds=0.2), WeightsPublished(
        model_step=step, num_bytes=8, seconds=0.1)]  # fmt: skip


def group_of(draw: int, answer: str = "fine") -> Group:
    tokenizer = CharTokenizer()
    prompt = Prompt(messages=({"role": "user", "content": f"question {draw}"},), ids=pack_ids(tokenizer.encode("q")))
    group = []
    for k in range(K):
        rollout = RolloutState(
            prompt=prompt, task_name="sums", group_id=f"sums:{draw}", rollout_id=f"sums:{draw}:{k}", draw=draw
        )
        ids = tokenizer.encode(answer)
        tokens = Tokens().append(ids, [-0.5] * len(ids), model_step=0).append([7], trained=False, model_step=0)
        rollout.segments = (Segment(tokens),)
        rollout.turns = (Turn("generate", len(ids), FinishReason.STOP, answer), Turn("tool", 1, None, "42", 0, "add"))
        rollout.response_text, rollout.finish_reason = answer, FinishReason.STOP
        rollout.reward = Verdict(float(k), {"right": float(k)})
        rollout.status = Status.COMPLETED
        group.append(rollout)
    return group


async def fill_ledger(run_dir: Path) -> None:
    """sums:0 trained, sums:1 discarded, sums:2 waits."""
    buffer = ReplayBuffer(storage=Ledger.open(run_dir, threaded=False))
    for draw in range(3):
        group = group_of(draw, HOSTILE if draw == 0 else "fine")
        for rollout in group:
            rollout.status = Status.INIT
        buffer.draw(group, draw + 1)
        for rollout in group:
            rollout.status = Status.COMPLETED
        if draw == 1:
            group[0].fail(Failure(FailureReason.ENGINE_DEADLINE, "the engine said nothing", infrastructure=True))
            buffer.discard(group, "sums", DiscardReason.RETRIES_EXHAUSTED, train_step=1)
        else:
            buffer.put(group, "sums", model_step=0, current_train_step=1, stale_threshold=10)
        if draw == 0:
            buffer.take_batch({"sums": 1}, train_step=1)
            buffer.commit(1)
    await buffer.flush()
    await buffer.close()


def leave_driver(run_dir: Path) -> None:
    """The last who held the ledger is a process that is gone."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    holder = {"pid": gone.pid, "host": socket.gethostname()}
    (run_dir / LOCK_FILE).write_bytes(msgspec.json.encode(holder))


def make_run(directory: Path) -> Path:
    """Two steps trained, the driver gone."""
    directory.mkdir(parents=True)
    asyncio.run(fill_ledger(directory))
    leave_driver(directory)
    trajectories = Trajectories(directory / "trajectories", CharTokenizer(), RolloutIndex(directory))
    trajectories.save_step(1, [group_of(0, HOSTILE)], {"sums:0:0": -1.0, "sums:0:1": 1.0})
    n = len(HOSTILE) + 1
    trajectories.save_logprobs(1, {f"sums:0:{k}": [np.full(n, -0.25, dtype=np.float32)] for k in range(K)})
    tell(
        directory,
        StageBegan(stage="load"),
        RunBegan(run_name="first", model="tiny", total_steps=4),
        EngineChanged(engine="engine-0", state="active"),
        EvaluationDone(model_step=0, metrics={"eval/accuracy": 0.25}),
        *step_events(1),
        *step_events(2),
        Warned(text="something odd"),
    )
    return directory


def end_run(run_dir: Path) -> None:
    tell(run_dir, RunEnded(steps=2))
