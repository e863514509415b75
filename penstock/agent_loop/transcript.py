"""Transcript: one rollout while it is played. Nothing else writes a rollout's tokens.

It appends what the engine and the tools said, turn by turn, into `rollout.turns` and `rollout.segments`. A rollout that
was interrupted is played again from its beginning: calls that are on record (`Record`) are answered from it, and the
interrupted one goes on from its tokens.

A conversation that only grows is segment 0. `branch` begins another one; each has its own line of turns, its own
requests and its own random numbers, so several may be written at once and played again in any order.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from penstock.agent_loop.asking import Asked, OnPiece
from penstock.agent_loop.deadline import Clock
from penstock.agent_loop.record import GENERATE, MESSAGE, TOOL, Record, last_tokens
from penstock.agent_loop.rendering import ids_after
from penstock.agent_loop.stops import resolve_stops
from penstock.errors import DataFailure, Interrupted
from penstock.played import AT_TOOL, GENERATED, QUEUED, with_span
from penstock.ports import Completion, FinishedTurn
from penstock.rollout import (
    NO_TOKENS,
    ROOT,
    UNKNOWN_STEP,
    WHOLE,
    FailureReason,
    FinishReason,
    RolloutState,
    SampleParams,
    Segment,
    Turn,
    pack_ids,
    unpack_ids,
)

T = TypeVar("T")

REFUSAL_S = 0.1
"""How long a refusal takes: code that calls again and again, whatever is raised, must not keep the event loop busy."""


class Answer(msgspec.Struct, frozen=True):
    """What one `generate` call made: the new tokens as text, and why it ended."""

    text: str
    finish_reason: FinishReason


class ToolAnswer(msgspec.Struct, frozen=True):
    """What a tool said, or what the model is told instead; see `Turn.outcome`."""

    text: str
    outcome: str = ""


class Calling(msgspec.Struct, frozen=True):
    """A tool's call that is to be made."""

    name: str
    call: Callable[[], Awaitable[ToolAnswer]]


class Transcript:
    def __init__(self, rollout: RolloutState, asked: Asked) -> None:
        self.rollout = rollout
        self.record = Record(rollout)
        self.clock = Clock(lambda: self.stage)
        self.doing = "agent loop"
        """What the rollout waits for when it is neither the engine nor a tool; empty when it is played no more."""
        self.interrupted = False
        """A pause cut off an answer of this playing, whatever the loop makes of it: its further calls are refused."""
        self._asked = asked
        self._now = asyncio.get_running_loop().time
        self._current = 0
        self._num_segments = 1
        """Segments that this playing has asked for; the record may have more."""
        self._requests: dict[int, str] = {}
        """Open requests by segment."""
        self._tools = 0
        self._busy: set[int] = set()
        """Segments that a call is writing."""

    @property
    def stage(self) -> str:
        """What the rollout waits for, in a word."""
        if self._requests:
            return "engine"
        return "tool" if self._tools else self.doing

    @property
    def requests(self) -> list[str]:
        """Ids of the requests that are open."""
        return list(self._requests.values())

    def begin(self, start: int) -> None:
        """The first segment goes on from the first `start` tokens of the prompt, not from all of it.

        Before it has a token. Raises ValueError when the prompt has not as many.
        """
        self._require_played()
        self._require_room(ROOT, start)
        segments = self.rollout.segments or (Segment(),)
        if segments[0].start != start:
            if segments[0].tokens:
                raise self.record.mismatch("its first segment is on record with another beginning")
            self.rollout.segments = (Segment(NO_TOKENS, ROOT, start), *segments[1:])

    def branch(self, parent: int = ROOT, start: int = WHOLE) -> int:
        """Begin another segment after the first `start` tokens of `parent`; returns its index and goes on with it.

        Raises ValueError when there are not as many.
        """
        self._require_played()
        segment = Segment(NO_TOKENS, parent, start)
        self._require_room(parent, start)
        index, segments = self._num_segments, self.rollout.segments or (Segment(),)
        if index == len(segments):
            self.rollout.segments = (*segments, segment)
        elif (segments[index].parent, segments[index].start) != (parent, start):
            if segments[index].tokens or any(turn.segment == index for turn in self.rollout.turns):
                raise self.record.mismatch(f"segment {index} is on record with another beginning")
            # A crash left only that there was one: a later segment finished a turn, and this one did not.
            self.rollout.segments = (*segments[:index], segment, *segments[index + 1 :])
        self._num_segments = index + 1
        self._current = index
        return index

    async def generate(
        self,
        params: SampleParams | None = None,
        *,
        segment: int | None = None,
        durable: bool = False,
        on_piece: OnPiece | None = None,
    ) -> Answer:
        """Let the model write. Waits for the engine as long as that takes; the rollout's clock stands still.

        `durable`: returns when the finished turn is on disk. `on_piece` is told of new tokens as they are made, and of
        none that are on record. Raises Interrupted when a pause comes, with the tokens so far on record; RolloutFailure
        when the engine fails.
        """
        async with self._writing(segment) as segment:
            recorded = self.record.next_turn(segment, GENERATE)
            if recorded is not None and recorded.finish_reason is not FinishReason.ABORT:
                self.record.read_back(segment)
                return Answer(recorded.text, recorded.finish_reason or FinishReason.STOP)
            params = self._checked(params)
            begun = recorded.num_tokens if recorded is not None else 0
            reason = FinishReason.LENGTH
            if begun < params.max_tokens:
                completion = await self._ask(segment, params, begun, on_piece)
                assert completion.finish_reason is not None
                reason = completion.finish_reason
                before = self.record.tokens(segment)
                self.record.set_tokens(segment, before.append(*_columns(completion), steps=completion.steps))
                begun += len(completion.ids) // 4
            text = "" if reason is FinishReason.ABORT else self._decoded(segment, begun, params.stop)
            turn = Turn(GENERATE, begun, reason, text, segment)
            if reason is FinishReason.ABORT:
                self.interrupted = True
                self.record.cut_off(turn, recorded)
                raise Interrupted(f"rollout {self.rollout.rollout_id} was interrupted after {begun} tokens of a turn")
            await self._finished(turn, recorded, durable)
            return Answer(text, reason)

    async def call_tool(
        self,
        tool: Callable[[], Awaitable[str]],
        *,
        timeout_s: float,
        name: str = "",
        segment: int | None = None,
        durable: bool = False,
    ) -> str:
        """A tool's answer, on record as text the model did not write: mask 0, no logprob.

        Raises DataFailure when the tool does not answer in time; what the tool raises passes.
        """
        async with self._writing(segment) as segment:
            recorded = self.record.next_turn(segment, TOOL, name)
            if recorded is not None:
                self.record.read_back(segment)
                return recorded.text
            text = await self._call(tool, timeout_s)
            ids = self._asked.tokenizer.encode(text)
            await self._say(Turn(TOOL, len(ids), None, text, segment, name), ids, durable)
            return text

    async def call_tools(
        self, calls: Sequence[Calling], *, at_once: int, segment: int | None = None, durable: bool = False
    ) -> list[ToolAnswer]:
        """Answers of several tools, in the order of the calls, at most `at_once` of them at work at a time.

        Each is on record as it ends, without tokens: what the model is told is for `append`. A call that is on record
        is not made again, whichever of the others ended. What a call raises passes, and ends the others.
        """
        async with self._writing(segment) as segment:
            read = self.record.read_calls(segment, [calling.name for calling in calls])
            answers = {number: ToolAnswer(turn.text, turn.outcome) for number, turn in read.items()}
            free = asyncio.Semaphore(at_once)

            async def make(number: int, calling: Calling) -> None:
                async with free:
                    answer = await self._while_tool(calling.call())
                turn = Turn(TOOL, 0, None, answer.text, segment, calling.name, number, answer.outcome)
                answers[number] = answer
                await self._finished(turn, None, durable)

            try:
                async with asyncio.TaskGroup() as group:
                    for number, calling in enumerate(calls):
                        if number not in answers:
                            group.create_task(make(number, calling), name=f"tool {calling.name}")
            except ExceptionGroup as raised:
                raise raised.exceptions[0] from None
            self.record.sort_calls(segment, len(calls))
            return [answers[number] for number in range(len(calls))]

    async def append(
        self,
        ids: Sequence[int] | bytes,
        *,
        text: str = "",
        kind: str = MESSAGE,
        name: str = "",
        segment: int | None = None,
        durable: bool = False,
    ) -> None:
        """What the model did not write, already encoded: mask 0, no logprob. `text` is for those who read the record.

        Raises DataFailure when other tokens are on record at this place.
        """
        packed = pack_ids(ids)
        async with self._writing(segment) as segment:
            recorded = self.record.next_turn(segment, kind, name)
            if recorded is None:
                await self._say(Turn(kind, len(packed) // 4, None, text, segment, name), packed, durable)
                return
            self.record.read_tokens(segment, recorded, packed)

    async def say(self, text: str, *, role: str = "user", segment: int | None = None, durable: bool = False) -> None:
        """Somebody answers the model, as its chat template writes that after the answer: mask 0, no logprob.

        Raises DataFailure when the template cannot go on so, ValueError when the model has not answered yet.
        """
        chosen = self._current if segment is None else segment
        history = self.record.history(chosen)
        if not history or history[-1]["role"] != "assistant":
            raise ValueError(f"{self.rollout.rollout_id}: `say` comes after an answer; call `generate` first")
        new = [{"role": role, "content": text}]
        tools, last_id = self.rollout.prompt.tools, self.record.last_id(chosen)
        ids = ids_after(self._asked.tokenizer, history, new, tools, last_id=last_id)
        await self.append(ids, text=text, name=role, segment=chosen, durable=durable)

    # Those who play a conversation that may come back in another order.

    def recall(self) -> None:
        """Every segment on record may be asked for from here on, in any order; `branch` begins others."""
        self._num_segments = max(1, len(self.rollout.segments))

    # Inside.

    @property
    def _over(self) -> bool:
        """Played no more. Code that was left behind is refused at once, while its siblings still play."""
        return not self.doing or self.clock.expired or self.clock.left_behind

    def _require_played(self) -> None:
        if self._over:
            raise Interrupted(f"rollout {self.rollout.rollout_id} is played no more")

    async def _require_going_on(self) -> None:
        """Whatever is called next is not interrupted yet. Raises Interrupted, after a moment."""
        if self.interrupted or self._over:
            await asyncio.sleep(REFUSAL_S)
            self._require_played()
            raise Interrupted(f"rollout {self.rollout.rollout_id} was interrupted in an earlier call")

    @contextlib.asynccontextmanager
    async def _writing(self, segment: int | None) -> AsyncGenerator[int, None]:
        """One call at a time writes a segment: two would be on record as they ended, not as they were called."""
        await self._require_going_on()
        if segment is None:
            segment = self._current
        if not 0 <= segment < self._num_segments:
            raise ValueError(f"{self.rollout.rollout_id} has no segment {segment}; `branch` begins one")
        if segment in self._busy:
            raise RuntimeError(
                f"segment {segment} of {self.rollout.rollout_id} is being written by another call; "
                "wait for that one, or begin another segment with `branch` to write beside it"
            )
        self._current = segment
        self._busy.add(segment)
        try:
            yield segment
        finally:
            self._busy.discard(segment)

    def _require_room(self, parent: int, start: int) -> None:
        """Raises ValueError unless there are `start` tokens of `parent` to go on from."""
        if parent >= self._num_segments:
            raise ValueError(f"{self.rollout.rollout_id} has no segment {parent} to branch from")
        length = len(self.record.tokens(parent)) if parent != ROOT else len(self.rollout.prompt.ids) // 4
        if start > length:
            what = f"segment {parent}" if parent != ROOT else "the prompt"
            raise ValueError(
                f"{self.rollout.rollout_id} cannot branch after token {start} of {what}, which has {length}"
            )

    async def _say(self, turn: Turn, ids: Sequence[int] | bytes, durable: bool) -> None:
        """Tokens that the model did not write, as of the weights before them."""
        before = self.record.tokens(turn.segment)
        last_step = before.steps[-1][0] if before.steps else UNKNOWN_STEP
        self.record.set_tokens(turn.segment, before.append(ids, trained=False, model_step=last_step))
        await self._finished(turn, None, durable)

    async def _finished(self, turn: Turn, recorded: Turn | None, durable: bool) -> None:
        place = self.record.add(turn, recorded)
        if self._asked.turn_log is None:
            return
        segment = self.rollout.segments[turn.segment] if self.rollout.segments else Segment()
        await self._asked.turn_log.append(
            FinishedTurn(
                task_name=self.rollout.task_name,
                group_id=self.rollout.group_id,
                rollout_id=self.rollout.rollout_id,
                index=place,
                turn=turn,
                tokens=last_tokens(segment.tokens, turn.num_tokens),
                parent=segment.parent,
                start=segment.start,
            ),
            durable=durable,
        )

    def _checked(self, params: SampleParams | None) -> SampleParams:
        """A loop may change budgets and stops, not the distribution: the trainer computes logprobs of one."""
        own = self._asked.sample_params
        if params is None:
            return own
        if _distribution(params) == _distribution(own):
            return resolve_stops(params, self._asked.tokenizer)
        raise DataFailure(
            f"generate was called with another distribution ({params}) than the task's sample_params ({own}); "
            "only max_tokens and stops may differ",
            reason=FailureReason.SAMPLING_PARAMS,
        )

    async def _ask(self, segment: int, params: SampleParams, begun: int, on_piece: OnPiece | None) -> Completion:
        request = self._asked.request(self.rollout, segment, params, ids=self.record.tokens(segment).ids, begun=begun)
        self._requests[segment] = request.request_id
        self.clock.hold()
        began = self._now()
        try:
            completion = await self._asked.answer(request, on_piece)
        finally:
            del self._requests[segment]
            self.clock.release()
        self._require_played()
        seconds = self._now() - began
        waited_s = min(completion.waited_s, seconds)
        spans = with_span(self.rollout.played, QUEUED, waited_s, ago_s=seconds - waited_s)
        self.rollout.played = with_span(spans, GENERATED, seconds - waited_s)
        return completion

    async def _call(self, tool: Callable[[], Awaitable[str]], timeout_s: float) -> str:
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                return await self._while_tool(tool())
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DataFailure(
                f"tool did not answer within {timeout_s:g} s", reason=FailureReason.TOOL_DEADLINE
            ) from None

    async def _while_tool(self, answer: Awaitable[T]) -> T:
        self._tools += 1
        began = self._now()
        try:
            answered = await answer
        finally:
            self._tools -= 1
        self._require_played()
        self.rollout.played = with_span(self.rollout.played, AT_TOOL, self._now() - began)
        return answered

    def _decoded(self, segment: int, num_tokens: int, stop: tuple[str, ...]) -> str:
        ids = self.record.tokens(segment).ids
        text = self._asked.tokenizer.decode(unpack_ids(ids[len(ids) - 4 * num_tokens :]).tolist())
        found = [position for position in (text.find(s) for s in stop if s) if position >= 0]
        return text[: min(found)] if found else text


def _columns(completion: Completion) -> tuple[bytes, bytes]:
    return completion.ids, completion.logprobs


def _distribution(params: SampleParams) -> tuple[float, ...]:
    # Before min_tokens the tokens that end an answer are forbidden.
    return params.temperature, params.top_p, params.top_k, params.min_p, params.min_tokens
