"""What an answer is made of: tokens in packed columns, and the segments they form.

A run holds millions of tokens, so their columns are bytes: 9 a token, and a few for each run of one model step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
MaskArray = npt.NDArray[np.uint8]

Runs = tuple[tuple[int, int], ...]
"""Of tokens made by one version of the weights: (model step, number of tokens)."""

WORTH_SHARING = 8
"""Tokens that prompts must have in common: one that every text begins with is no reason to wait for another."""
UNKNOWN_STEP = -1
"""The model step of a token whose maker did not say. The replay buffer fills it with that of the attempt's start."""


class Tokens(msgspec.Struct, frozen=True, gc=False):
    """An answer's tokens. Four columns that always have one length; `append` is the only way to grow.

    Packed: int32, float32, uint8.
    """

    ids: bytes = b""
    logprobs: bytes = b""
    mask: bytes = b""
    steps: Runs = ()

    def __post_init__(self) -> None:
        n, steps = len(self.mask), self.steps
        known = steps[0][1] if len(steps) == 1 else sum([run[1] for run in steps])
        if len(self.ids) != 4 * n or len(self.logprobs) != 4 * n or known != n:
            raise ValueError(
                f"answer columns differ in length: {len(self.ids) // 4} ids, {len(self.logprobs) // 4} logprobs, "
                f"{n} mask, {known} model steps; they must be equal"
            )

    def __len__(self) -> int:
        return len(self.mask)

    @property
    def model_steps(self) -> IntArray:
        """The model step that made each token."""
        steps, counts = [step for step, _ in self.steps], [n for _, n in self.steps]
        return np.repeat(np.asarray(steps, dtype=np.int32), counts)

    def append(
        self,
        ids: Sequence[int] | IntArray | bytes,
        logprobs: Sequence[float] | FloatArray | bytes | None = None,
        *,
        model_step: int = UNKNOWN_STEP,
        steps: Iterable[tuple[int, int]] | None = None,
        trained: bool = True,
    ) -> Tokens:
        """These tokens and more. Without logprobs they are 0 and the tokens must not be trained (tool text)."""
        packed = pack_ids(ids)
        n = len(packed) // 4
        if logprobs is None:
            if trained:
                raise ValueError("tokens without logprobs cannot be trained; pass trained=False for tool text")
            packed_logprobs = bytes(4 * n)
        else:
            packed_logprobs = pack_logprobs(logprobs)
        runs = ((model_step, n),) if steps is None else tuple(steps)
        return Tokens(
            self.ids + packed,
            self.logprobs + packed_logprobs,
            self.mask + (b"\x01" if trained else b"\x00") * n,
            join_runs(self.steps, runs),
        )

    def with_unknown_steps(self, model_step: int) -> Tokens:
        """The same tokens, those of unknown origin ascribed to `model_step`."""
        if all(step != UNKNOWN_STEP for step, _ in self.steps):
            return self
        runs = tuple((model_step if step == UNKNOWN_STEP else step, n) for step, n in self.steps)
        return Tokens(self.ids, self.logprobs, self.mask, join_runs((), runs))


NO_TOKENS = Tokens()


ROOT = -1
"""The parent of a segment that goes on from the prompt."""

WHOLE = -1
"""The start of a segment that goes on from the whole prompt."""


class Segment(msgspec.Struct, frozen=True, gc=False):
    """A run of tokens after a context. A rollout's segments form a tree whose root is the prompt.

    A conversation that only grows is one segment. One that was edited, branched or compacted has several; each names
    where it begins, so nothing is stored twice and every sampled token is trained once.
    """

    tokens: Tokens = NO_TOKENS
    parent: int = ROOT
    """Which earlier segment of the rollout it goes on from; ROOT is the prompt."""
    start: int = WHOLE
    """How many tokens of its parent come before it; WHOLE for all of the prompt."""

    def __post_init__(self) -> None:
        if self.start == WHOLE and self.parent == ROOT:  # nearly all do
            return
        if self.parent < ROOT or self.start < WHOLE or (self.parent != ROOT and self.start == WHOLE):
            raise ValueError(f"a segment cannot begin at token {self.start} of segment {self.parent}")


def linear(tokens: Tokens) -> tuple[Segment, ...]:
    """The segments of an answer that goes on from the prompt and never branched: nearly all are."""
    return (Segment(tokens),) if tokens.mask else ()


def pack_ids(ids: Sequence[int] | IntArray | bytes) -> bytes:
    return ids if isinstance(ids, bytes) else np.asarray(ids, dtype=np.int32).tobytes()


def unpack_ids(packed: bytes) -> IntArray:
    return np.frombuffer(packed, dtype=np.int32)


def common_beginning(first: IntArray, other: IntArray) -> int:
    """How many tokens both begin with; 0 if they are too few to be worth computing them for both at once."""
    length = min(len(first), len(other))
    differ = np.flatnonzero(first[:length] != other[:length])
    common = int(differ[0]) if len(differ) else length
    return common if common >= WORTH_SHARING else 0


def pack_logprobs(logprobs: Sequence[float] | FloatArray | bytes) -> bytes:
    return logprobs if isinstance(logprobs, bytes) else np.asarray(logprobs, dtype=np.float32).tobytes()


def join_runs(head: Runs, tail: Runs) -> Runs:
    """Concatenate runs; neighbours of one model step become one, empty ones vanish."""
    joined: list[tuple[int, int]] = []
    for step, n in (*head, *tail):
        if n == 0:
            continue
        if joined and joined[-1][0] == step:
            joined[-1] = (step, joined[-1][1] + n)
        else:
            joined.append((step, n))
    return tuple(joined)
