"""The records that flow through Penstock: one rollout, the group it belongs to, and what was said about it.

A `RolloutState` is one attempt at one prompt. A group is a plain list of the K rollouts of one prompt, in order.
Records are msgspec structs: they travel to disk and over sockets as they are, without pickle.

    Prompt     what is asked; one object shared by the K rollouts of a group, never changed
    Tokens     ids, logprobs, loss mask and model steps, one length by construction (`tokens.py`)
    Segment    a run of tokens and the place it goes on from: the prompt, or somewhere in another segment
    Verdict    the reward, with its parts; `Unjudged` when there is none, with the reason
    Failure    why an attempt failed, as data

Nothing here imports torch, ray or transformers.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.tokens import NO_TOKENS as NO_TOKENS
from penstock.tokens import ROOT as ROOT
from penstock.tokens import UNKNOWN_STEP as UNKNOWN_STEP
from penstock.tokens import WHOLE as WHOLE
from penstock.tokens import FloatArray as FloatArray
from penstock.tokens import IntArray as IntArray
from penstock.tokens import MaskArray as MaskArray
from penstock.tokens import Runs as Runs
from penstock.tokens import Segment as Segment
from penstock.tokens import Tokens as Tokens
from penstock.tokens import join_runs
from penstock.tokens import linear as linear
from penstock.tokens import pack_ids as pack_ids
from penstock.tokens import pack_logprobs as pack_logprobs
from penstock.tokens import unpack_ids as unpack_ids


class Status(enum.StrEnum):
    """Where one rollout stands. A group's status is derived from its rollouts: `get_group_status`."""

    INIT = "init"
    COMPLETED = "completed"
    ABORTED = "aborted"
    """Interrupted by a pause or a restart; may be retried."""
    EXPIRED = "expired"
    """Too stale to train."""
    FAILED = "failed"
    FILTERED = "filtered"
    MAX_TRIES = "max_tries"
    """Interrupted as often as allowed; waits for a tail batch."""


class FinishReason(enum.StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """The model ended its answer: end-of-text, a stop id or a stop string."""
    LENGTH = "length"
    """The token budget is used up."""
    ABORT = "abort"
    """Interrupted; the tokens so far were handed back."""


class _NamesItsFields(msgspec.StructMeta):
    """A struct that users write themselves: a misspelt field is refused with the nearest one."""

    def __call__(cls, *values: Any, **fields: Any) -> Any:
        for name in fields:
            if name not in cls.__struct_fields__:
                near = difflib.get_close_matches(name, cls.__struct_fields__, n=1)
                hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(cls.__struct_fields__)}."
                raise TypeError(f"{cls.__name__}.{name} is not a field. {hint}")
        return super().__call__(*values, **fields)


class SampleParams(msgspec.Struct, metaclass=_NamesItsFields, frozen=True, kw_only=True):
    """How an answer is sampled. Training needs top_p 1, top_k 0, min_p 0 and min_tokens 0 to have exact logprobs."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    """A text is one stop."""
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        stop: object = self.stop
        if isinstance(stop, str):
            msgspec.structs.force_setattr(self, "stop", (stop,))
        wrong = [
            f"{name} is {value}; it must be {rule}"
            for name, value, fine, rule in (
                ("temperature", self.temperature, 0 <= self.temperature <= 100, "between 0 (greedy) and 100"),
                ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
                ("top_k", self.top_k, 0 <= self.top_k <= 10**9, "between 0 (off) and 10^9"),
                ("min_p", self.min_p, 0 <= self.min_p < 1, "at least 0 and below 1"),
                ("max_tokens", self.max_tokens, 1 <= self.max_tokens <= 10**9, "between 1 and 10^9"),
                ("min_tokens", self.min_tokens, 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens"),
            )
            if not fine
        ]
        if wrong:
            raise ValueError("SampleParams: " + "; ".join(wrong))

    @property
    def truncates(self) -> bool:
        """Whether sampling cuts the distribution, so that its logprobs are not the model's."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """A judger's answer: a finite score, its named parts, and optionally what the judge said."""

    score: float
    parts: dict[str, float] = {}
    text: str | None = None


class Unjudged(msgspec.Struct, frozen=True, gc=False):
    """No score, and why. Never turned into a number."""

    reason: str
    detail: str = ""
    """What helps to mend the judge, such as the traceback of a function that raised; a few thousand characters."""


class FailureReason(enum.StrEnum):
    """Why an attempt failed, in a stable word for metrics and budgets; the message says it to people."""

    ACTOR_DIED = "actor_died"
    """The actor that played or judged it is gone, and so was the one that was asked next."""
    AGENT_LOOP_ERROR = "agent_loop_error"
    """The user's loop raised, or left a rollout unplayed."""
    BAD_FRAME = "bad_frame"
    CONTEXT_TOO_LONG = "context_too_long"
    EMPTY_ANSWER = "empty_answer"
    EMPTY_PROMPT = "empty_prompt"
    ENGINE_ABORT = "engine_abort"
    """Interrupted although production was not paused."""
    ENGINE_CLOSED = "engine_closed"
    ENGINE_DEADLINE = "engine_deadline"
    ENGINE_DIED = "engine_died"
    ENGINE_ERROR = "engine_error"
    ENGINE_FENCED = "engine_fenced"
    ENGINE_GONE = "engine_gone"
    """It cannot come back."""
    ENGINE_NONSENSE = "engine_nonsense"
    """Columns of different lengths, logprobs that are not finite, weights that were never published."""
    ENGINE_START = "engine_start"
    ENGINE_START_DEADLINE = "engine_start_deadline"
    LOGITS_NOT_FINITE = "logits_not_finite"
    NO_ENGINE = "no_engine"
    RECORD_MISMATCH = "record_mismatch"
    """A loop that was played again made another kind of call than the one on record."""
    REQUEST_REFUSED = "request_refused"
    ROLLOUT_DEADLINE = "rollout_deadline"
    SAMPLING_PARAMS = "sampling_params"
    TEMPLATE_REFUSED = "template_refused"
    """The chat template cannot write the conversation."""
    TOKEN_OUTSIDE_VOCABULARY = "token_outside_vocabulary"
    TOOL_DEADLINE = "tool_deadline"
    UNJUDGED = "unjudged"
    WEIGHTS_DAMAGED = "weights_damaged"

    @classmethod
    def _missing_(cls, value: object) -> FailureReason | None:
        """Earlier versions wrote some reasons with spaces, and two in other words."""
        word = str(value).replace(" ", "_")
        word = {"refused": "request_refused", "scripted": "engine_error"}.get(word, word)
        return cls._value2member_map_.get(word)  # type: ignore[return-value]


def storable(text: str) -> str:
    """The text, with what UTF-8 has no bytes for written as an escape."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return text.encode("utf-8", "backslashreplace").decode()
    return text


class Failure(msgspec.Struct, frozen=True, gc=False):
    """Why an attempt failed: the boundary it crossed, the reason in a word, and the message for people."""

    reason: FailureReason
    message: str
    infrastructure: bool = False
    """Whether another engine or another try may help; decides whose budget pays."""
    detail: str = ""
    """What helps to mend the cause, such as the traceback of a judge."""

    def __post_init__(self) -> None:
        # Words of a user's exception: one that names a file whose name is no UTF-8 has lone surrogates.
        msgspec.structs.force_setattr(self, "message", storable(self.message))
        msgspec.structs.force_setattr(self, "detail", storable(self.detail))


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked. Shared by all rollouts of a group."""

    messages: tuple[dict[str, Any], ...] = ()
    ids: bytes = b""
    """The rendered prompt, packed int32. Read it as an array through `RolloutState.prompt_ids`."""
    ground_truth: Any = None
    data_source: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    extra_info: Mapping[str, Any] = {}


class Turn(msgspec.Struct, frozen=True, gc=False):
    """One recorded call of an agent loop: a generation or a tool's answer. A loop played again reads it back."""

    kind: str
    """`generate`, `tool` (its answer), or `message` (what else was said to the model)."""
    num_tokens: int
    finish_reason: FinishReason | None = None
    """None for a tool; ABORT marks the turn that was interrupted and continues."""
    text: str = ""
    """What was said: a tool's answer, or a finished generation up to its stop string."""
    segment: int = 0
    """Which segment of the rollout its tokens belong to."""
    name: str = ""
    """Which tool."""
    call: int = 0
    """Which of the calls that were made at once, from 0."""
    outcome: str = ""
    """Why a tool's answer is none: `unknown_tool`, `bad_call`, `raised`, `timeout`. The text tells the model."""


class RolloutState(msgspec.Struct, kw_only=True, gc=False):
    """One attempt at one prompt, from drawing to training. Identity is stable over retries and restarts."""

    prompt: Prompt
    task_name: str = ""
    group_id: str = ""
    rollout_id: str = ""
    draw: int = 0
    """The group's position in its task's sequence of draws, from 0, over all epochs."""
    segments: tuple[Segment, ...] = ()
    response_text: str = ""
    """What the model wrote, as the judger sees it: decoded, without special tokens, stop string and what tools said.
    Set when the answer is finished."""
    turns: tuple[Turn, ...] = ()
    finish_reason: FinishReason | None = None
    reward: Verdict | None = None
    status: Status = Status.INIT
    num_tries: int = 0
    """How often this rollout was interrupted and started again."""
    infrastructure_failures: int = 0
    data_failures: int = 0
    group_generate_time_s: float = 0.0
    """Wall time of the attempt that finished the group, judging included."""
    error: Failure | None = None
    played: bytes = b""
    """When it was generated, judged, and so on: `penstock.played` reads it."""

    @property
    def prompt_ids(self) -> IntArray:
        return unpack_ids(self.prompt.ids)

    @property
    def messages(self) -> tuple[dict[str, Any], ...]:
        return self.prompt.messages

    @property
    def ground_truth(self) -> Any:
        return self.prompt.ground_truth

    @property
    def data_source(self) -> str:
        return self.prompt.data_source

    @property
    def extra_info(self) -> Mapping[str, Any]:
        return self.prompt.extra_info

    @property
    def response(self) -> Tokens:
        """The answer of a rollout that never branched. Raises ValueError when there are several segments."""
        segments = self.segments
        if len(segments) > 1:
            raise ValueError(f"{self.rollout_id} has {len(segments)} segments; there is no one answer: read `segments`")
        return segments[0].tokens if segments else NO_TOKENS

    @response.setter
    def response(self, tokens: Tokens) -> None:
        self.segments = (Segment(tokens),) if tokens.mask else ()

    @property
    def num_tokens(self) -> int:
        """Of all segments, each token once."""
        segments = self.segments
        return len(segments[0].tokens.mask) if len(segments) == 1 else sum([len(s.tokens.mask) for s in segments])

    @property
    def steps(self) -> Runs:
        """Runs of (model step, number of tokens), over all segments."""
        segments = self.segments
        if len(segments) == 1:
            return segments[0].tokens.steps
        return join_runs((), tuple(run for segment in segments for run in segment.tokens.steps))

    def context_ids(self, index: int) -> bytes:
        """Everything before a segment, from the prompt on, packed int32."""
        pieces = []
        while index != ROOT:
            segment = self.segments[index]
            whole = self.prompt.ids if segment.parent == ROOT else self.segments[segment.parent].tokens.ids
            pieces.append(whole if segment.start == WHOLE else whole[: 4 * segment.start])
            index = segment.parent
        return b"".join(reversed(pieces))

    @property
    def response_ids(self) -> IntArray:
        return unpack_ids(self.response.ids)

    @property
    def logprobs(self) -> FloatArray:
        return np.frombuffer(self.response.logprobs, dtype=np.float32)

    @property
    def response_mask(self) -> MaskArray:
        """1 where a token is trained, 0 for text the model did not write."""
        return np.frombuffer(self.response.mask, dtype=np.uint8)

    @property
    def model_steps(self) -> IntArray:
        """The model step that made each token."""
        return self.response.model_steps

    def fail(self, failure: Failure) -> None:
        """End this attempt with a reason. The tokens stay for the story; a retry forgets them."""
        self.status = Status.FAILED
        self.reward = None
        self.error = failure


Group = list[RolloutState]


def new_rollout(
    prompt: str | Sequence[Mapping[str, Any]],
    *,
    ground_truth: Any = None,
    data_source: str = "",
    tools: Sequence[Mapping[str, Any]] = (),
    extra_info: Mapping[str, Any] | None = None,
) -> RolloutState:
    """A rollout that asks `prompt` (a user's text, or chat messages). What a `to_rollout` function returns."""
    messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(dict(m) for m in prompt)
    return RolloutState(
        prompt=Prompt(
            messages=messages,
            ground_truth=ground_truth,
            data_source=data_source,
            tools=tuple(dict(t) for t in tools),
            extra_info=dict(extra_info or {}),
        )
    )


_WORST_FIRST = (Status.FAILED, Status.MAX_TRIES, Status.ABORTED, Status.EXPIRED, Status.FILTERED)
_COMPLETED = Status.COMPLETED


def get_group_status(group: Sequence[RolloutState]) -> Status:
    """COMPLETED when all are; otherwise the first that occurs of FAILED, MAX_TRIES, ABORTED, EXPIRED, FILTERED.

    Raises ValueError for an empty group and for one that still has an INIT rollout: those have no status.
    """
    statuses = [rollout.status for rollout in group]
    if statuses.count(_COMPLETED) == len(statuses) > 0:
        return _COMPLETED
    if not statuses:
        raise ValueError("an empty group has no status")
    if Status.INIT in statuses:
        unplayed = [rollout.rollout_id for rollout in group if rollout.status is Status.INIT]
        raise ValueError(f"group {group[0].group_id!r} has no status yet: {unplayed} were not played")
    return next(status for status in _WORST_FIRST if status in statuses)


def count_tokens(group: Sequence[RolloutState]) -> int:
    """Of all answers of a group."""
    return sum([len(segment.tokens.mask) for rollout in group for segment in rollout.segments])


def made_by(group: Sequence[RolloutState]) -> set[int]:
    """The model steps of all tokens of a group: nearly always one."""
    return {run[0] for rollout in group for segment in rollout.segments for run in segment.tokens.steps}


def reset_rollout_response(rollout: RolloutState) -> None:
    """Forget the answer and everything said about it. Identity, prompt, tries and status stay."""
    rollout.segments = ()
    rollout.response_text = ""
    rollout.turns = ()
    rollout.finish_reason = None
    rollout.reward = None
    rollout.error = None
    rollout.played = b""


def fill_model_steps(rollout: RolloutState, model_step: int) -> None:
    """Ascribe tokens of unknown origin to `model_step`: the one at which the attempt started."""
    rollout.segments = tuple(
        Segment(segment.tokens.with_unknown_steps(model_step), segment.parent, segment.start)
        for segment in rollout.segments
    )
