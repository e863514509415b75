"""The rollouts of one train step, each as a lane: queue, generation, tools, judging, the wait in the buffer, training.

The ledger knows when a group was drawn, finished, taken and trained; the trajectory of a rollout knows what it did
while its group was played. Where the rollout has nothing on record, its lane has the group's moves alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from penstock.trainer.trajectories import step_path

MAX_LANES = 512
"""Shown of one batch; nobody reads more."""

BINS = 160
STRIPS = ("queue", "generate", "tool", "judge")
MAX_READ = 1 << 26
"""Bytes of trajectories; what is more is not read to draw a strip."""

WAITS = {
    "completed": "buffer",
    "leased": "train",
    "aborted": "interrupted",
    "expired": "stale",
    "max_tries": "tail",
}
"""By the state of its group, when it is not played."""


class LaneSpan(msgspec.Struct, frozen=True, array_like=True):
    what: str
    """queue, generate, tool, judge, more, play (not told apart), siblings, or one of `WAITS`."""
    begin: float
    end: float
    """The wall clock's seconds."""
    version: int | None = None
    """The weights that generated."""


class Lane(msgspec.Struct, frozen=True):
    rollout_id: str
    group_id: str
    task: str
    reward: float | None
    tokens: int
    versions: list[int]
    spans: list[LaneSpan]


class _Played(msgspec.Struct):
    """What is read of a trajectory's line."""

    rollout_id: str
    group_id: str
    task: str = ""
    reward: dict[str, Any] | None = None
    tokens: int = 0
    model_steps: list[tuple[int, int]] = []
    played: list[tuple[str, float, float]] = []


_decode = msgspec.json.Decoder(_Played).decode


def rollout_lanes(run_dir: Path, step: int, groups: list[dict[str, Any]]) -> tuple[list[Lane], int]:
    """Lanes in the order of the groups, and how many more there are; none in a run that kept no times."""
    moves = {group["group_id"]: group["moves"] for group in groups}
    rollouts = [rollout for rollout in _read(step_path(run_dir / "trajectories", step)) if rollout.group_id in moves]
    if not any(rollout.played for rollout in rollouts):
        return [], 0
    order = {group_id: place for place, group_id in enumerate(moves)}
    rollouts.sort(key=lambda rollout: order[rollout.group_id])
    lanes = [_lane(rollout, moves[rollout.group_id]) for rollout in rollouts[:MAX_LANES]]
    return lanes, len(rollouts) - len(lanes)


class Activity:
    """How many rollouts of some steps were generated, at their tools or judged at a time. Remembers what it read."""

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / "trajectories"
        self._read: dict[tuple[str, int, int], list[tuple[str, float, float]]] = {}

    def strips(self, steps: list[int], begin: float, end: float) -> dict[str, list[float]]:
        """By what they did: the mean number in each of `BINS` equal parts of this time, by the wall clock."""
        files = [path for path in (step_path(self._directory, step) for step in steps) if path.is_file()]
        known = {(path.name, found.st_mtime_ns, found.st_size): path for path in files for found in [path.stat()]}
        if sum(size for _, _, size in known) > MAX_READ or end <= begin:
            return {}
        self._read = {
            key: self._read[key]
            if key in self._read
            else [span for rollout in _read(path) for span in rollout.played if span[0] in STRIPS]
            for key, path in known.items()
        }
        strips: dict[str, list[float]] = {}
        width = (end - begin) / BINS
        for what, at, seconds in (span for spans in self._read.values() for span in spans):
            strip = strips.setdefault(what, [0.0] * BINS)
            first, last = max(0.0, (at - begin) / width), min(float(BINS), (at + seconds - begin) / width)
            for place in range(int(first), min(BINS, int(last) + 1)):
                strip[place] += max(0.0, min(last, place + 1) - max(first, place))
        return {what: [round(value, 2) for value in strips[what]] for what in STRIPS if what in strips}


def _read(path: Path) -> list[_Played]:
    try:
        lines = path.read_bytes().splitlines()
        return [_decode(line) for line in lines]
    except (OSError, msgspec.DecodeError):
        # Not saved yet, or being written again: the next question finds it.
        return []


def _lane(rollout: _Played, moves: list[tuple[str, float, str | None]]) -> Lane:
    score = (rollout.reward or {}).get("score")
    return Lane(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        task=rollout.task,
        reward=float(score) if isinstance(score, int | float) else None,
        tokens=rollout.tokens,
        versions=sorted({version for version, _ in rollout.model_steps}),
        spans=list(_spans(rollout, moves)),
    )


def _spans(rollout: _Played, moves: list[tuple[str, float, str | None]]) -> Iterator[LaneSpan]:
    played = list(_by_version(sorted(rollout.played, key=lambda span: span[1]), rollout.model_steps))
    for (state, begin, _), (_, end, _) in itertools.pairwise(moves):
        if state in WAITS:
            yield LaneSpan(WAITS[state], begin, end)
        else:
            yield from _while_played(played, begin, end)


def _while_played(played: Iterable[LaneSpan], begin: float, end: float) -> Iterator[LaneSpan]:
    """What it did in this time: before the first it waited for its turn, after the last for its siblings."""
    inside = [
        LaneSpan(span.what, max(begin, span.begin), min(end, span.end), span.version)
        for span in played
        if span.end > begin and span.begin < end
    ]
    if not inside:
        yield LaneSpan("play", begin, end)
        return
    first, last = min(span.begin for span in inside), max(span.end for span in inside)
    if first > begin:
        yield LaneSpan("queue", begin, first)
    yield from inside
    if last < end:
        yield LaneSpan("siblings", last, end)


def _by_version(played: list[tuple[str, float, float]], steps: list[tuple[int, int]]) -> Iterator[LaneSpan]:
    """Generation is cut where the weights changed, by the share of the tokens that each made."""
    generated = sum(seconds for what, _, seconds in played if what == "generate")
    tokens = sum(count for _, count in steps)
    left = [(version, generated * count / tokens) for version, count in steps if count]
    for what, begin, seconds in played:
        end = begin + seconds
        if what != "generate" or not left:
            yield LaneSpan(what, begin, end)
            continue
        while len(left) > 1 and left[0][1] < end - begin:
            version, share = left.pop(0)
            if share > 0:
                yield LaneSpan("generate", begin, begin + share, version)
                begin += share
        version, share = left[0]
        left[0] = version, share - (end - begin)
        yield LaneSpan("generate", begin, end, version)
