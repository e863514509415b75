"""What durability costs. Each group is drawn and completed: 8 rollouts of 64 tokens, two transitions.

ledger.durable_groups_per_s   512 groups at once, each waits until it is durable
ledger.vs_bare_sqlite         that, against as many rows of bytes that lie ready, inserted in a plain table, 64 a commit
ledger.ack_p99_ms             how long a finished group waits at half that rate; the median of five quiet rounds
ledger.durable_turns_per_s    turns of 64 tokens of groups that are being played, each waits until it is durable
ledger.index_us_per_group     what the indexes for readers cost the writer, from a group's draw to its training
ledger.open_100k_s            open and restore a ledger that holds 100,000 completed groups
ledger.open_1m_s              the same with 1,000 completed groups, after 1,000,000 that were trained; `tenth`: 100,000
ledger.open_1m_mb             what that adds to the memory of a new process, over what it adds with a tenth of them
ledger.step_1m                draw, finish, take, commit and prune a batch then, over the same with a tenth of them
ledger.story_ms               the story of one group among them
ledger.step_wait_percent      of a `quickstart` step, the time in which some ledger call was under way
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from penstock.cli.config_file import load_config
from penstock.ports import FinishedTurn
from penstock.replay import LEDGER_FILE, Ledger, ReplayBuffer, StaleRule, Storage, group_story
from penstock.replay.codec import RolloutsEncoder, encode_rollouts
from penstock.replay.disk import SqliteDisk
from penstock.replay.jobs import Job, apply
from penstock.rollout import FinishReason, Group, Prompt, RolloutState, Status, Tokens, Turn, Verdict, pack_ids
from penstock.testing.long_run import write_trained

K = 8
TOKENS = 64
AT_ONCE = 64
"""Groups in a transaction of plain SQLite."""
IN_FLIGHT = 512
"""Groups that wait for durability at the same time."""

STEPS = 50
"""Train steps that are timed after a long history."""
ROUNDS, MAX_ROUNDS = 5, 20
QUIET_PERCENT = 2.0

PROMPT = Prompt(messages=({"role": "user", "content": "What is 17 + 25?"},), ids=pack_ids(range(32)), ground_truth="42")
ANSWER = Tokens().append(range(TOKENS), [-0.5] * TOKENS, model_step=0)


def new_group(draw: int) -> Group:
    group_id = f"sums:{draw}"
    return [
        RolloutState(prompt=PROMPT, task_name="sums", group_id=group_id, rollout_id=f"{group_id}:{k}", draw=draw)
        for k in range(K)
    ]


def play(group: Group) -> None:
    for rollout in group:
        rollout.response = ANSWER
        rollout.response_text = "The answer is 42."
        rollout.finish_reason = FinishReason.STOP
        rollout.reward = Verdict(1.0, {"exact_match": 1.0})
        rollout.status = Status.COMPLETED


async def store(buffer: ReplayBuffer, draw: int) -> float:
    """Draw, play in no time, and put; returns the seconds that the put waited."""
    group = new_group(draw)
    buffer.draw(group, draw + 1)
    play(group)
    started = time.perf_counter()
    buffer.put(group, "sums", model_step=0, current_train_step=1, stale_threshold=10**9)
    await buffer.flush()
    return time.perf_counter() - started


async def ledger_rate(directory: Path, groups: int) -> float:
    buffer = ReplayBuffer(storage=Ledger.open(directory))
    draws = iter(range(groups))
    started = time.perf_counter()

    async def producer() -> None:
        for draw in draws:
            await store(buffer, draw)

    async with asyncio.TaskGroup() as producers:
        for _ in range(IN_FLIGHT):
            producers.create_task(producer())
    seconds = time.perf_counter() - started
    await buffer.close()
    return groups / seconds


async def turn_rate(directory: Path, turns: int) -> float:
    """As many rollouts as wait at once are played side by side, each a turn after the other."""
    buffer = ReplayBuffer(storage=Ledger.open(directory))
    groups = [new_group(draw) for draw in range(IN_FLIGHT // K)]
    for group in groups:
        buffer.draw(group, group[0].draw + 1)
    each = turns // IN_FLIGHT
    turn = Turn("generate", TOKENS, FinishReason.STOP, "The answer is 42.")

    async def play_turns(rollout: RolloutState) -> None:
        for index in range(each):
            finished = FinishedTurn(
                task_name="sums",
                group_id=rollout.group_id,
                rollout_id=rollout.rollout_id,
                index=index,
                turn=turn,
                tokens=ANSWER,
            )
            await buffer.append(finished, durable=True)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as players:
        for group in groups:
            for rollout in group:
                players.create_task(play_turns(rollout))
    seconds = time.perf_counter() - started
    await buffer.close()
    return each * IN_FLIGHT / seconds


class _Jobs:
    """A writer that only collects."""

    def __init__(self) -> None:
        self.taken: list[Job] = []

    def submit(self, job: Job) -> int:
        self.taken.append(job)
        return len(self.taken)


def index_costs(directory: Path, groups: int) -> dict[str, float]:
    """Microseconds a group, by index. The same transactions without and with each, no fsync, the best of seven."""
    ledger = Ledger.open(directory, threaded=False)
    jobs = ledger._writer = _Jobs()  # type: ignore[assignment]
    buffer = ReplayBuffer(storage=ledger)
    for step, first in enumerate(range(0, groups, AT_ONCE), 1):
        drawn = [new_group(draw) for draw in range(first, first + AT_ONCE)]
        for group in drawn:
            buffer.draw(group, group[0].draw + 1)
        for group in drawn:
            play(group)
            buffer.put(group, "sums", model_step=0, current_train_step=1, stale_threshold=1000)
        buffer.take_batch({"sums": AT_ONCE}, train_step=step)
        buffer.commit(step)
    connection = sqlite3.connect(directory / LEDGER_FILE)
    rows = connection.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'index' AND sql NOT NULL").fetchall()
    connection.close()
    made: dict[str, str] = dict(rows)
    added = [[], *([name] for name in made), [*made]]
    best = [float("inf")] * len(added)
    for _ in range(7):
        for number, names in enumerate(added):
            with tempfile.TemporaryDirectory(dir=directory) as name:
                asyncio.run(Ledger.open(Path(name), threaded=False).close())
                disk = SqliteDisk().connect(Path(name) / LEDGER_FILE)
                disk.execute("PRAGMA synchronous = OFF")
                for dropped in made.keys() - names:
                    disk.execute(f"DROP INDEX {dropped}")
                started = time.process_time()
                for first in range(0, len(jobs.taken), 4 * AT_ONCE):  # type: ignore[union-attr]
                    disk.execute("BEGIN IMMEDIATE")
                    apply(disk, jobs.taken[first : first + 4 * AT_ONCE])  # type: ignore[union-attr]
                    disk.execute("COMMIT")
                best[number] = min(best[number], time.process_time() - started)
                disk.close()
    labels = ["none", *made, "all"]
    return {
        label: round((seconds - best[0]) / groups * 1e6, 2) for label, seconds in zip(labels, best, strict=True)
    } | {"none": round(best[0] / groups * 1e6, 2)}


def bare_rate(directory: Path, groups: int, *, ready: bytes | None = None) -> float:
    """Plain SQLite. With `ready`, of these bytes again and again: nothing is made or encoded."""
    encoder = RolloutsEncoder()

    def content(draw: int) -> bytes:
        if ready is not None:
            return ready
        group = new_group(draw)
        play(group)
        return encoder.encode(group)

    connection = sqlite3.connect(directory / "bare.sqlite", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE contents (id INTEGER PRIMARY KEY, content BLOB)")
    started = time.perf_counter()
    for first in range(0, groups, AT_ONCE):
        rows = [(draw, content(draw)) for draw in range(first, first + AT_ONCE)]
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO contents VALUES (?, ?)", rows)
        connection.execute("COMMIT")
    seconds = time.perf_counter() - started
    connection.close()
    return groups / seconds


async def acknowledgements(directory: Path, rate: float, seconds: float) -> list[float]:
    """Groups finish at a steady rate, whether or not earlier ones are acknowledged."""
    buffer = ReplayBuffer(storage=Ledger.open(directory))
    loop = asyncio.get_running_loop()
    waits: list[float] = []

    async def finish(draw: int) -> None:
        waits.append(await store(buffer, draw))

    started = loop.time()
    async with asyncio.TaskGroup() as group:
        for draw in itertools.count():
            due = started + draw / rate
            if due - started > seconds:
                break
            if due > loop.time():
                await asyncio.sleep(due - loop.time())
            group.create_task(finish(draw))
    await buffer.close()
    return waits


class Round(NamedTuple):
    p99_ms: float
    p50_ms: float
    stolen_percent: float
    """Of all processors, by the machine's host. What waits for that does not wait for the ledger."""

    @property
    def quiet(self) -> bool:
        return self.stolen_percent < QUIET_PERCENT


def _stolen_seconds() -> float:
    """What the machine's host has taken from its processors so far."""
    try:
        return int(Path("/proc/stat").read_text().split()[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0


def latency_round(directory: Path, rate: float, seconds: float) -> Round:
    stolen, started = _stolen_seconds(), time.perf_counter()
    waits = sorted(asyncio.run(acknowledgements(directory, rate, seconds)))
    had = (time.perf_counter() - started) * (os.cpu_count() or 1)
    p50, p99 = (round(waits[int(len(waits) * share)] * 1e3, 1) for share in (0.5, 0.99))
    return Round(p99, p50, round(100 * (_stolen_seconds() - stolen) / had, 1))


async def fill(directory: Path, groups: int) -> None:
    buffer = ReplayBuffer(storage=Ledger.open(directory))
    for draws in itertools.batched(range(groups), 512) if hasattr(itertools, "batched") else _batched(groups, 512):
        await asyncio.gather(*(store(buffer, draw) for draw in draws))
    await buffer.close()


def _batched(n: int, size: int) -> Iterator[range]:
    return (range(first, min(first + size, n)) for first in range(0, n, size))


async def open_seconds(directory: Path, groups: int) -> float:
    started = time.perf_counter()
    buffer = ReplayBuffer(storage=Ledger.open(directory))
    buffer.restore(0, {"sums": StaleRule(1000)})
    seconds = time.perf_counter() - started
    if buffer.count("sums", Status.COMPLETED) != groups:
        raise AssertionError("groups are missing after the restart")
    await buffer.close()
    return seconds


def reopen(directory: Path, trained: int, live: int) -> dict[str, float]:
    """A run that was long: seconds to open it for the first time and again, what that adds to a process that did
    nothing else before, and what a train step of `AT_ONCE` groups takes then."""
    step = write_trained(directory, trained)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as alone:
        first = alone.submit(_first_opening, directory, step, live).result()
        return first | alone.submit(_opening, directory, step, trained, live).result()


def _first_opening(directory: Path, step: int, live: int) -> dict[str, float]:
    async def opened() -> dict[str, float]:
        started = time.perf_counter()
        buffer = ReplayBuffer(storage=Ledger.open(directory))
        drawn = buffer.restore(step, {"sums": StaleRule(10**9)}).cursors["sums"]
        seconds = time.perf_counter() - started
        await asyncio.gather(*(store(buffer, draw) for draw in range(drawn, drawn + live)))
        await buffer.close()
        return {"first_open_s": seconds}

    return asyncio.run(opened())


def _opening(directory: Path, step: int, trained: int, live: int) -> dict[str, float]:
    async def opened() -> dict[str, float]:
        before, started = resident_mb(), time.perf_counter()
        buffer = ReplayBuffer(storage=Ledger.open(directory))
        draw = buffer.restore(step, {"sums": StaleRule(10**9)}).cursors["sums"]
        seconds, grown = time.perf_counter() - started, resident_mb() - before
        if buffer.count("sums", Status.COMPLETED) != live or buffer.conservation().drawn != trained + live:
            raise AssertionError("groups are missing after the restart")
        steps = []
        for number in range(step + 1, step + 1 + STEPS):
            began = time.perf_counter()
            await asyncio.gather(*(store(buffer, draw + each) for each in range(AT_ONCE)))
            draw += AT_ONCE
            buffer.take_batch({"sums": AT_ONCE}, train_step=number)
            buffer.commit(number)
            await buffer.flush()
            await buffer.prune(number)
            steps.append(time.perf_counter() - began)
        await buffer.close()
        return {"open_s": seconds, "resident_mb": grown, "step_ms": statistics.median(steps) * 1e3}

    return asyncio.run(opened())


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class TimedStorage:
    """A storage that knows how long it had calls under way, calls that overlap counted once."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self._under_way = 0
        self._since = 0.0
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def record(self, *arguments: Any, **named: Any) -> None:
        with self._timed():
            self._inner.record(*arguments, **named)

    async def flush(self) -> None:
        with self._timed():
            await self._inner.flush()

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        if self._under_way == 0:
            self._since = time.perf_counter()
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if self._under_way == 0:
                self.seconds += time.perf_counter() - self._since


def step_wait(directory: Path, steps: int) -> tuple[float, float]:
    """Seconds in ledger calls, and seconds of all steps, of a real run."""
    config: Any = load_config("quickstart", [f"total_steps={steps}", "evaluator=null"])
    trainer = config.build(run_dir=directory / "run")
    timed = TimedStorage(trainer.parts.buffer._storage)
    trainer.parts.buffer._storage = timed
    summary = trainer.fit()
    return timed.seconds, summary.train_seconds


def say(figure: str, value: float, unit: str, detail: dict[str, Any]) -> None:
    print(json.dumps({"figure": figure, "value": round(value, 3), "unit": unit, "detail": detail}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=8192, help="groups per rate measurement")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a round of the latency measurement")
    parser.add_argument("--open-groups", type=int, default=100_000)
    parser.add_argument("--trained-groups", type=int, default=1_000_000)
    parser.add_argument("--live-groups", type=int, default=1000)
    parser.add_argument("--directory", type=Path, default=None, help="where the files are made; the disk to measure")
    parser.add_argument("--steps", type=int, default=2, help="of quickstart; 0: none")
    asked = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=asked.directory) as name:
        root = Path(name)
        numbers = itertools.count()

        def fresh() -> Path:
            directory = root / str(next(numbers))
            directory.mkdir()
            return directory

        # Alternating, so that a disk that is slow for a while is slow for both.
        played = new_group(0)
        play(played)
        ready = encode_rollouts(played)
        bare, ours, inserts = [], [], []
        gc.freeze()  # as `penstock train` does
        for _ in range(3):
            bare.append(bare_rate(fresh(), asked.groups))
            ours.append(asyncio.run(ledger_rate(fresh(), asked.groups)))
            inserts.append(bare_rate(fresh(), asked.groups, ready=ready))
        rate = statistics.median(ours)
        sizes = {"rollouts": K, "tokens": TOKENS, "in_flight": IN_FLIGHT, "groups": asked.groups}
        say("ledger.durable_groups_per_s", rate, "groups/s", {**sizes, "runs": [round(value) for value in ours]})
        ratios = [mine / theirs for mine, theirs in zip(ours, inserts, strict=True)]
        say(
            "ledger.vs_bare_sqlite",
            statistics.median(ratios),
            "ratio",
            {
                "runs": [round(ratio, 3) for ratio in ratios],
                "bare_groups_per_s": round(statistics.median(inserts)),
                "made_and_encoded_per_s": round(statistics.median(bare)),
                "vs_made_and_encoded": round(statistics.median(ours) / statistics.median(bare), 3),
                "target": ">= 0.25",
            },
        )
        rounds: list[Round] = []
        while len(rounds) < MAX_ROUNDS and sum(each.quiet for each in rounds) < ROUNDS:
            rounds.append(latency_round(fresh(), rate / 2, asked.seconds))
        enough = sum(each.quiet for each in rounds) >= ROUNDS
        counted = [each for each in rounds if each.quiet] if enough else rounds
        say(
            "ledger.ack_p99_ms",
            statistics.median([each.p99_ms for each in counted]),
            "ms",
            {
                "counted": "quiet rounds" if enough else "all rounds, too few were quiet",
                "p99_p50_stolen_percent": rounds,
                "rate": round(rate / 2),
                "target": "< 20",
            },
        )
        turns = [asyncio.run(turn_rate(fresh(), asked.groups)) for _ in range(3)]
        detail: dict[str, Any] = {"tokens": TOKENS, "in_flight": IN_FLIGHT, "runs": [round(each) for each in turns]}
        say("ledger.durable_turns_per_s", statistics.median(turns), "turns/s", detail)
        costs = index_costs(fresh(), min(asked.groups, 4096))
        without = costs.pop("none")
        say("ledger.index_us_per_group", costs.pop("all"), "us", {"each": costs, "writing_without_any": without})
        large = fresh()
        asyncio.run(fill(large, asked.open_groups))
        started = time.perf_counter()
        group_story(large, f"sums:{asked.open_groups // 2}")
        story = time.perf_counter() - started
        seconds = asyncio.run(open_seconds(large, asked.open_groups))
        say("ledger.open_100k_s", seconds, "s", {"groups": asked.open_groups, "target": "< 5"})
        say("ledger.story_ms", story * 1e3, "ms", {"groups": asked.open_groups})
        after: list[dict[str, float]] = []
        named = "1m" if asked.trained_groups == 1_000_000 else f"{asked.trained_groups // 1000}k"
        for trained in (asked.trained_groups // 10, asked.trained_groups):
            long = fresh()
            after.append(reopen(long, trained, asked.live_groups))
            detail = {"trained": trained, "live": asked.live_groups, "target": "<= 5"}
            detail |= {name: round(value, 3) for name, value in after[-1].items()}
            detail["file_mb"] = round((long / LEDGER_FILE).stat().st_size / 2**20)
            name = named if trained == asked.trained_groups else "tenth"
            say(f"ledger.open_{name}_s", after[-1]["open_s"], "s", detail)
        tenth, whole = after
        megabytes = {"mb": round(whole["resident_mb"], 1), "tenth_mb": round(tenth["resident_mb"], 1)}
        say(f"ledger.open_{named}_mb", whole["resident_mb"] / tenth["resident_mb"], "ratio", megabytes)
        milliseconds = {"ms": round(whole["step_ms"], 2), "tenth_ms": round(tenth["step_ms"], 2)}
        say(f"ledger.step_{named}", whole["step_ms"] / tenth["step_ms"], "ratio", milliseconds)
        if not asked.steps:
            return
        waited, seconds = step_wait(fresh(), asked.steps)
        detail = {"waited_s": round(waited, 4), "steps_s": round(seconds, 2), "steps": asked.steps, "target": "< 1"}
        say("ledger.step_wait_percent", 100 * waited / seconds, "%", detail)


if __name__ == "__main__":
    main()
