"""A run directory as a real run leaves it: events, ledger, trajectories, and an answer that tries to be a script."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from penstock.events import (
    EngineChanged,
    EngineSeen,
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
from penstock.played import AT_TOOL, GENERATED, JUDGED, QUEUED, pack_span
from penstock.replay import DiscardReason, Ledger, ReplayBuffer, StaleRule
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
from penstock.view.runs import Runs
from penstock.view.server import ViewServer

BEGAN = 1_700_000_000.0
"""By the clock of the ledger, which goes on a second with every move."""
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


def tell_of_sync(run_dir: Path, step: int) -> None:
    """A step that ends with a sync of four seconds, in which production paused for two."""
    events: dict[float, Event] = {
        100.0: StageBegan(stage="step", train_step=step),
        106.0: StageBegan(stage="sync", train_step=step),
        107.0: StageBegan(stage="pause"),
        109.0: StageEnded(stage="pause", seconds=2.0),
        110.0: StageEnded(stage="sync", train_step=step, seconds=4.0),
        110.5: StageEnded(stage="step", train_step=step, seconds=10.5),
    }
    with (run_dir / EVENTS_FILE).open("ab") as file:
        for at, event in events.items():
            file.write(msgspec.json.encode({"time": BEGAN + at, "at": at, **msgspec.to_builtins(event)}) + b"\n")


def branched_group(draw: int) -> Group:
    """Each of its rollouts went on from two places: after its whole first answer, and after three tokens of it."""
    group = group_of(draw, "first")
    tokenizer = CharTokenizer()
    for rollout in group:
        again = Tokens().append(tokenizer.encode("again"), [-0.5] * 5, model_step=1)
        rollout.segments = (*rollout.segments, Segment(again, parent=0, start=3))
        rollout.turns = (*rollout.turns, Turn("generate", 5, FinishReason.STOP, "again", 1))
    return group


def group_of(draw: int, answer: str = "fine", task: str = "sums") -> Group:
    tokenizer = CharTokenizer()
    prompt = Prompt(messages=({"role": "user", "content": f"question {draw}"},), ids=pack_ids(tokenizer.encode("q")))
    group = []
    for k in range(K):
        rollout = RolloutState(
            prompt=prompt, task_name=task, group_id=f"{task}:{draw}", rollout_id=f"{task}:{draw}:{k}", draw=draw
        )
        ids = tokenizer.encode(answer)
        tokens = Tokens().append(ids, [-0.5] * len(ids), model_step=0).append([7], trained=False, model_step=0)
        rollout.segments = (Segment(tokens),)
        rollout.turns = (Turn("generate", len(ids), FinishReason.STOP, answer), Turn("tool", 1, None, "42", 0, "add"))
        rollout.response_text, rollout.finish_reason = answer, FinishReason.STOP
        rollout.reward = Verdict(float(k), {"right": float(k)})
        rollout.status = Status.COMPLETED
        rollout.played = b"".join(
            [
                pack_span(QUEUED, BEGAN + 0.1, 0.1),
                pack_span(GENERATED, BEGAN + 0.2, 0.3),
                pack_span(AT_TOOL, BEGAN + 0.5, 0.2),
                pack_span(JUDGED, BEGAN + 0.7, 0.1 * (k + 1)),
            ]
        )
        group.append(rollout)
    return group


async def fill_ledger(run_dir: Path) -> None:
    """sums:0 trained, sums:1 discarded, sums:2 waits."""
    moves = itertools.count(-1)  # the first is when the ledger was made
    storage = Ledger.open(run_dir, threaded=False, clock=lambda: BEGAN + next(moves))
    buffer = ReplayBuffer(storage=storage)
    for draw in range(3):
        group = group_of(draw, HOSTILE if draw == 0 else "fine")
        draw_group(buffer, group)
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


def restart(run_dir: Path, do: Callable[[ReplayBuffer], None], *, after_s: float) -> None:
    """The driver begins again from checkpoint 1, does this with the groups, and is gone."""
    moves = itertools.count()

    async def main() -> None:
        storage = Ledger.open(run_dir, threaded=False, clock=lambda: BEGAN + after_s + next(moves))
        buffer = ReplayBuffer(storage=storage)
        buffer.restore(1, dict.fromkeys(("sums", "words"), StaleRule(10)))
        do(buffer)
        await buffer.flush()
        await buffer.close()

    # In a thread of its own: a browser's tests have an event loop in theirs.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, main()).result()
    leave_driver(run_dir)


def draw_group(buffer: ReplayBuffer, group: Group) -> None:
    for rollout in group:
        rollout.status = Status.INIT
    buffer.draw(group, group[0].draw + 1)
    for rollout in group:
        rollout.status = Status.COMPLETED


def play_over_restarts(run_dir: Path) -> None:
    """sums:3 is interrupted, played again, lost with its driver, and trained by the next one, with sums:2."""

    def interrupt(buffer: ReplayBuffer) -> None:
        group = group_of(3)
        draw_group(buffer, group)
        group[0].status = Status.ABORTED
        buffer.put(group, "sums", model_step=1, current_train_step=2, stale_threshold=10)
        buffer.get(1, "sums", Status.ABORTED)

    def train(buffer: ReplayBuffer) -> None:
        [group] = buffer.get(1, "sums", Status.ABORTED)
        for rollout in group:
            rollout.status = Status.COMPLETED
        buffer.put(group, "sums", model_step=1, current_train_step=2, stale_threshold=10)
        buffer.take_batch({"sums": 2}, train_step=2)
        buffer.commit(2)

    restart(run_dir, interrupt, after_s=100)
    restart(run_dir, train, after_s=200)


def leave_driver(run_dir: Path) -> None:
    """The last who held the ledger is a process that is gone."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    holder = {"pid": gone.pid, "host": socket.gethostname()}
    (run_dir / LOCK_FILE).write_bytes(msgspec.json.encode(holder))


def saved_in(run_dir: Path) -> Trajectories:
    return Trajectories(run_dir / "trajectories", CharTokenizer(), RolloutIndex(run_dir))


def make_run(directory: Path) -> Path:
    """Two steps trained, the driver gone."""
    directory.mkdir(parents=True)
    asyncio.run(fill_ledger(directory))
    leave_driver(directory)
    trajectories = saved_in(directory)
    trajectories.save_step(1, [group_of(0, HOSTILE)], {"sums:0:0": -1.0, "sums:0:1": 1.0})
    n = len(HOSTILE) + 1
    trajectories.save_logprobs(1, {f"sums:0:{k}": [np.full(n, -0.25, dtype=np.float32)] for k in range(K)})
    tell(
        directory,
        StageBegan(stage="load"),
        RunBegan(run_name="first", model="tiny", total_steps=4),
        EngineChanged(engine="engine-0", state="active"),
        EngineSeen(engine="engine-0", model_step=2, running=3, waiting=1, busy=0.75, tokens_per_s=120.0),
        EvaluationDone(model_step=0, metrics={"eval/accuracy": 0.25}),
        *step_events(1),
        *step_events(2),
        Warned(text="something odd"),
    )
    return directory


def end_run(run_dir: Path) -> None:
    tell(run_dir, RunEnded(steps=2))


@contextlib.contextmanager
def served(directory: Path) -> Iterator[str]:
    """The address of the page of these runs."""
    server = ViewServer(Runs(directory))
    thread = threading.Thread(target=server.serve, name="view")
    thread.start()
    try:
        yield server.url
    finally:
        server.stop()
        thread.join(20)
