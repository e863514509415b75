"""Kill real runs at random instants, resume them to the end, and let the history checker decide.

    python tests/crash/runner.py --kills 60 [--seed 0]

A story is one run directory: several kills in a row, and then a resume to the end. Instants are drawn from the seed:
seconds after the start, before the k-th statement of the ledger (and right after a commit), before the k-th file
operation of a checkpoint. What must hold holds for every instant, so that a kill may well come a little later.
Ends with a JSON line; exits 1 when something was lost, skipped or doubled, or when hardly a kill fell into the writing
of a checkpoint beside training, which a draft tells that was left behind.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import multiprocessing
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parent))

from victim import (
    ASYNC,
    ASYNC_EVALUATED,
    EVAL_INTERVAL,
    PROCESS,
    STEPS,
    SYNC,
    SYNC_EVALUATED,
    Ended,
    Instant,
    Trainer,
    journal_file,
    load_everything,
    run_victim,
)

from penstock.replay.story import ledger_summary, open_read_only
from penstock.testing.history import Findings
from penstock.testing.ledger_history import check_ledger

SHARES = {SYNC: 0.4, SYNC_EVALUATED: 0.1, ASYNC: 0.3, ASYNC_EVALUATED: 0.1, PROCESS: 0.1}
TRAINERS = {trainer.name: trainer for trainer in SHARES}
KINDS = ("wall", "ledger", "files")
MIXED = "mixed"
MAX_KILLS_IN_A_ROW = 5
MAX_ROUNDS = 10
LANES = 2
SOME_IN_WRITES = 30
"""At least one kill of so many falls into the writing of a checkpoint; about one in six does, fewer where disks are
fast."""


class Whole(msgspec.Struct):
    """An uninterrupted run: how long it takes, what it does, what comes out."""

    ended: Ended
    weights: str
    accuracies: list[float | None]


class Story(msgspec.Struct):
    trainer: str
    instants: str
    """A kind of instant, or several mixed."""
    kills: int
    findings: Findings
    resumed: list[int]
    """The checkpoints it went on from."""
    in_writes: int = 0
    """Kills that fell into the writing of a checkpoint beside training."""
    problems: list[str] = []


def weights_hash(run_dir: Path) -> str:
    return hashlib.sha256((run_dir / "hf" / "final" / "model.safetensors").read_bytes()).hexdigest()


def accuracies(run_dir: Path) -> list[float | None]:
    """Before and after, sampled and greedy, as the run's summary has them."""
    summary = json.loads((run_dir / "summary.json").read_text())
    return [summary[f"eval_{how}_{when}"] for when in ("before", "after") for how in ("accuracy", "greedy")]


def run_whole(name: str, place: Path) -> Whole:
    run_dir = place / f"whole-{name}"
    ended = run_victim(TRAINERS[name], run_dir)
    if ended.code:
        raise AssertionError(f"{run_dir} ended with {ended.code}:\n{_log(run_dir)}")
    check_ledger(run_dir).require_none()
    return Whole(ended, weights_hash(run_dir), accuracies(run_dir))


def tell(name: str, place: Path, seed: str, kills: int, whole: Whole) -> Story:
    """One run directory: up to so many kills, then to the end, then the checker."""
    run_dir = place / seed.replace(" ", "-")
    trainer, rng = TRAINERS[name], random.Random(seed)
    story = Story(name, rng.choice([*KINDS, MIXED]), 0, Findings(), [])
    try:
        while story.kills < kills:
            kind = rng.choice(KINDS) if story.instants == MIXED else story.instants
            instant = _draw(rng, kind, run_dir, whole)
            ended = run_victim(trainer, run_dir, instant)
            if ended.killed:
                story.kills += 1
                story.in_writes += _was_writing(run_dir)
            elif ended.code == 0:
                break
            else:
                raise AssertionError(f"{instant}: exit code {ended.code}")
        ended = run_victim(trainer, run_dir)
        if ended.code:
            raise AssertionError(f"the last resume ended with exit code {ended.code}")
        _judge(story, run_dir, trainer, whole)
    except Exception as error:
        story.problems.append(f"{seed}: {type(error).__name__}: {error}")
    if story.problems or story.findings.problems():
        story.problems.append(f"{seed}: {run_dir} is kept\n{_log(run_dir)}")
    else:
        shutil.rmtree(run_dir)
    return story


def _was_writing(run_dir: Path) -> bool:
    """Whether a draft was left behind; that of checkpoint 0 is written before anything else goes on."""
    drafts = (run_dir / "checkpoints").glob(".unfinished-step-*")
    return any(int(draft.name.rpartition("-")[2]) > 0 for draft in drafts)


def _draw(rng: random.Random, kind: str, run_dir: Path, whole: Whole) -> Instant:
    """Within what is left of the run, as far as can be told from its newest checkpoint."""
    steps = [int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*")]
    left = 1.0 - max(steps, default=0) / STEPS
    longest = whole.ended.seconds if kind == "wall" else whole.ended.operations[kind]
    # In seconds a run is at least its start.
    at = rng.random() * longest * max(left, 0.5 if kind == "wall" else 0.1)
    return Instant(kind, at if kind == "wall" else int(at))


def _judge(story: Story, run_dir: Path, trainer: Trainer, whole: Whole) -> None:
    story.findings = check_ledger(run_dir)
    story.findings.lost += _lost_events(run_dir)
    summary = ledger_summary(run_dir)
    story.resumed = [restart["checkpoint_step"] for restart in summary["restarts"]]
    if not summary["conserved"]:
        story.findings.unbalanced.append(f"{run_dir}: {summary['total']}")
    story.problems += [f"{run_dir}: {problem}" for problem in _differences(run_dir, trainer, whole)]


def _differences(run_dir: Path, trainer: Trainer, whole: Whole) -> list[str]:
    """From the uninterrupted run, in what was logged and in what came out."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    problems = []
    logged = [line["step"] for line in lines if "reward/mean" in line]
    if logged != list(range(1, STEPS + 1)):
        problems.append(f"metrics of steps {logged}")
    evaluated = [line["step"] for line in lines if "eval/accuracy" in line]
    if evaluated != (list(range(0, STEPS + 1, EVAL_INTERVAL)) if trainer.evaluated else []):
        problems.append(f"evaluations of steps {evaluated}")
    if trainer.deterministic:
        if weights_hash(run_dir) != whole.weights:
            problems.append("the weights differ")
        if accuracies(run_dir) != whole.accuracies:
            problems.append(f"the accuracies are {accuracies(run_dir)}, uninterrupted {whole.accuracies}")
    return problems


def _lost_events(run_dir: Path) -> list[str]:
    """Events that were acknowledged and are not in the ledger, or differ there."""
    with open_read_only(run_dir) as connection:
        there = {row[0]: list(row) for row in connection.execute("SELECT * FROM events")}
    told = [json.loads(line) for line in journal_file(run_dir).read_text().splitlines()]
    return [f"event {event} was acknowledged; the ledger has {there.get(event[0])}" for event in told
            if there.get(event[0]) != event]  # fmt: skip


def _log(run_dir: Path) -> str:
    log = run_dir.with_name(f"{run_dir.name}.log")
    return "\n".join(log.read_text().splitlines()[-40:]) if log.exists() else "nothing was said"


def plan(kills: int, rng: random.Random) -> list[tuple[str, int]]:
    """Trainer and kills in a row of each story; the longest trainer first."""
    stories = []
    for name in reversed(TRAINERS):
        left = round(kills * SHARES[TRAINERS[name]]) if name != SYNC.name else kills - sum(n for _, n in stories)
        while left > 0:
            n = min(left, rng.randint(1, MAX_KILLS_IN_A_ROW))
            stories.append((name, n))
            left -= n
    return stories


def crash(kills: int, seed: int, place: Path) -> list[Story]:
    load_everything()
    rng = random.Random(f"plan {seed}")
    stories: list[Story] = []
    with concurrent.futures.ProcessPoolExecutor(LANES, mp_context=multiprocessing.get_context("fork")) as lanes:
        planned = plan(kills, rng)
        wholes = {name: lanes.submit(run_whole, name, place) for name in dict.fromkeys(name for name, _ in planned)}
        for round_number in range(MAX_ROUNDS):
            running = [
                lanes.submit(tell, name, place, f"{seed} {round_number} {number}", n, wholes[name].result())
                for number, (name, n) in enumerate(planned)
            ]
            for future in concurrent.futures.as_completed(running):
                stories.append(future.result())
                print(f"{_kills(stories)} of {kills} kills", file=sys.stderr, flush=True)
            if _kills(stories) >= kills or any(story.problems for story in stories):
                break
            # A victim that was done before its instant was not killed: others are.
            planned = [(name, n) for name, n in plan(kills - _kills(stories), rng) if name in wholes]
    return stories


def _kills(stories: list[Story]) -> int:
    return sum(story.kills for story in stories)


def table(stories: list[Story]) -> list[str]:
    rows = [["trainer", "instants", "kills", "in writes", "lost", "skipped", "doubled", "resumed from steps"]]
    for name in TRAINERS:
        for kind in (*KINDS, MIXED):
            mine = [story for story in stories if (story.trainer, story.instants) == (name, kind)]
            counts = [sum(len(getattr(s.findings, what)) for s in mine) for what in ("lost", "skipped", "doubled")]
            resumed = Counter(step for story in mine for step in story.resumed)
            told = ", ".join(f"{step} x{n}" for step, n in sorted(resumed.items()))
            kills = (sum(story.kills for story in mine), sum(story.in_writes for story in mine))
            rows.append([name, kind, *map(str, (*kills, *counts)), told])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.monotonic()
    place = Path(tempfile.mkdtemp(prefix="penstock-crash-"))
    stories = crash(options.kills, options.seed, place)
    problems = [problem for story in stories for problem in [*story.problems, *story.findings.problems()]]
    for problem in problems:
        print(problem, file=sys.stderr)
    print("\n".join(table(stories)))
    print(f"{len(stories)} run directories, {time.monotonic() - started:.0f} s")
    verdict = {what: sum(len(getattr(s.findings, what)) for s in stories) for what in ("lost", "skipped", "doubled")}
    in_writes = sum(story.in_writes for story in stories)
    print(json.dumps({"kills": _kills(stories), "in_writes": in_writes, **verdict}))
    if problems or _kills(stories) < options.kills or in_writes < options.kills // SOME_IN_WRITES:
        return 1
    shutil.rmtree(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
