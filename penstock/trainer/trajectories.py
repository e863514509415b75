"""Trajectories: what was asked, answered and rewarded, one JSON line per rollout, for people, notebooks and the page.

    trajectories/step-000010.jsonl       the batch of train step 10, written before it is trained
                 logprobs-000010.jsonl   what the trainer made of its tokens, written when the step counts
                 eval-000010.jsonl       the evaluation of model step 10

Beside the readable text stand the tokens: ids, logprobs and mask of every segment, packed (int32, float32, uint8, in
base64), so that they can be looked at after the ledger dropped them. A process that is killed between the two files of
a step leaves the first one alone; the second one is there as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.errors import StorageError
from penstock.played import read_played
from penstock.ports import Tokenizer
from penstock.replay import rollout_staleness
from penstock.rollout import (
    FloatArray,
    Group,
    IntArray,
    MaskArray,
    RolloutState,
    Segment,
    Turn,
    Verdict,
    unpack_ids,
)
from penstock.trainer.index import RolloutIndex


class SegmentRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A segment's tokens. In the file the packed columns are base64."""

    parent: int
    start: int
    ids: bytes
    logprobs: bytes
    mask: bytes
    steps: tuple[tuple[int, int], ...]
    """Runs of (model step, number of tokens)."""
    trainer_logprobs: bytes = b""
    """From the first pass of the step, NaN where a token was not computed. From the second file."""

    @property
    def token_ids(self) -> IntArray:
        return unpack_ids(self.ids)

    @property
    def token_logprobs(self) -> FloatArray:
        """Under the weights that made the tokens."""
        return np.frombuffer(self.logprobs, dtype=np.float32)

    @property
    def token_trainer_logprobs(self) -> FloatArray | None:
        """Under the weights that were trained; None when the step never came to count."""
        packed = self.trainer_logprobs
        return np.frombuffer(packed, dtype=np.float32) if packed else None

    @property
    def token_mask(self) -> MaskArray:
        return np.frombuffer(self.mask, dtype=np.uint8)


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout, as a line of the file."""

    rollout_id: str
    group_id: str
    task: str
    data_source: str
    prompt: tuple[dict[str, Any], ...]
    """The messages."""
    rendered_prompt: str
    """As the model read it, without special tokens."""
    prompt_ids: bytes
    answer: str
    """What the model wrote."""
    ground_truth: Any
    extra_info: dict[str, Any] = {}
    """Of the row: what a judge needs to judge the answer again."""
    turns: tuple[Turn, ...]
    reward: Verdict | None
    advantage: float | None = None
    status: str
    finish_reason: str | None
    tokens: int
    model_steps: tuple[tuple[int, int], ...]
    staleness: int
    num_tries: int
    segments: tuple[SegmentRecord, ...]
    played: tuple[tuple[str, float, float], ...] = ()
    """What it did, when (the wall clock's seconds since 1970), and for how many seconds: see `penstock.played`."""


class _Logprobs(msgspec.Struct, frozen=True):
    rollout_id: str
    logprobs: tuple[bytes, ...]
    """Per segment, packed float32."""


class Trajectories:
    """Writes them. Blocks: use a thread. Raises StorageError."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, index: RolloutIndex | None = None) -> None:
        """`index` is told of every file of rollouts."""
        self.directory = directory
        self._tokenizer = tokenizer
        self._index = index

    def save_step(self, train_step: int, groups: Iterable[Group], advantages: Mapping[str, float]) -> Path:
        """Before the step is trained; replaces an earlier try of it. `advantages` are by rollout id."""
        path = step_path(self.directory, train_step)
        try:
            # Of a lineage that was left, or of the try before.
            logprobs_path(self.directory, train_step).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"trajectories could not be written to {path}: {error}") from error
        return self._save(path, groups, train_step, advantages)

    def save_evaluation(self, model_step: int, groups: Iterable[Group]) -> Path:
        return self._save(evaluation_path(self.directory, model_step), groups, model_step + 1, {})

    def save_as(self, name: str, groups: Iterable[Group]) -> Path:
        """Answers of the initial weights that belong to no run."""
        return self._save(self.directory / name, groups, 1, {})

    def save_logprobs(self, train_step: int, logprobs: Mapping[str, Sequence[FloatArray]]) -> Path:
        """When the step counts; by rollout, one array per segment."""
        lines = [
            _Logprobs(rollout_id, tuple(np.asarray(array, dtype=np.float32).tobytes() for array in arrays))
            for rollout_id, arrays in logprobs.items()
        ]
        return self._write(logprobs_path(self.directory, train_step), lines)

    def _save(self, path: Path, groups: Iterable[Group], train_step: int, advantages: Mapping[str, float]) -> Path:
        lines = [
            self._line(rollout, train_step, advantages.get(rollout.rollout_id)) for group in groups for rollout in group
        ]
        self._write(path, lines)
        if self._index is not None:
            self._index.add(path)
        return path

    def _line(self, rollout: RolloutState, train_step: int, advantage: float | None) -> Trajectory:
        return Trajectory(
            rollout_id=rollout.rollout_id,
            group_id=rollout.group_id,
            task=rollout.task_name,
            data_source=rollout.data_source,
            prompt=rollout.messages,
            rendered_prompt=self._tokenizer.decode(rollout.prompt_ids.tolist()),
            prompt_ids=rollout.prompt.ids,
            answer=rollout.response_text,
            ground_truth=rollout.ground_truth,
            extra_info=dict(rollout.extra_info),
            turns=rollout.turns,
            reward=rollout.reward,
            advantage=advantage,
            status=rollout.status,
            finish_reason=rollout.finish_reason,
            tokens=rollout.num_tokens,
            model_steps=rollout.steps,
            staleness=rollout_staleness(rollout, train_step),
            num_tries=rollout.num_tries,
            segments=tuple(map(_segment, rollout.segments)),
            played=tuple(
                [(stage, round(began, 4), round(seconds, 4)) for stage, began, seconds in read_played(rollout.played)]
            ),
        )

    def _write(self, path: Path, lines: Iterable[msgspec.Struct]) -> Path:
        unfinished = path.with_name(f".{path.name}")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(b"".join(msgspec.json.encode(line, enc_hook=repr) + b"\n" for line in lines))
            unfinished.replace(path)
        except OSError as error:
            raise StorageError(f"trajectories could not be written to {path}: {error}") from error
        return path


def step_path(directory: Path, train_step: int) -> Path:
    return directory / f"step-{train_step:06d}.jsonl"


def logprobs_path(directory: Path, train_step: int) -> Path:
    return directory / f"logprobs-{train_step:06d}.jsonl"


def evaluation_path(directory: Path, model_step: int) -> Path:
    return directory / f"eval-{model_step:06d}.jsonl"


def read_trajectories(path: Path) -> list[Trajectory]:
    """The rollouts of one file, with the trainer's logprobs where the step came to count.

    Raises StorageError when it cannot be read.
    """
    try:
        read = [msgspec.json.decode(line, type=Trajectory) for line in path.read_bytes().splitlines()]
        beside = path.with_name(path.name.replace("step-", "logprobs-", 1))
        if not path.name.startswith("step-") or not beside.exists():
            return read
        lines = [msgspec.json.decode(line, type=_Logprobs) for line in beside.read_bytes().splitlines()]
    except (OSError, msgspec.DecodeError) as error:
        raise StorageError(f"trajectories could not be read from {path}: {error}") from error
    made = {line.rollout_id: line.logprobs for line in lines}
    return [_with_logprobs(line, made.get(line.rollout_id, ())) for line in read]


def _with_logprobs(line: Trajectory, logprobs: tuple[bytes, ...]) -> Trajectory:
    if len(logprobs) != len(line.segments):
        return line
    segments = tuple(
        msgspec.structs.replace(segment, trainer_logprobs=packed)
        for segment, packed in zip(line.segments, logprobs, strict=True)
    )
    return msgspec.structs.replace(line, segments=segments)


def _segment(segment: Segment) -> SegmentRecord:
    tokens = segment.tokens
    return SegmentRecord(
        parent=segment.parent,
        start=segment.start,
        ids=tokens.ids,
        logprobs=tokens.logprobs,
        mask=tokens.mask,
        steps=tokens.steps,
    )
