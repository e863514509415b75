"""Transcript: the record of one rollout while it is played. Nothing else writes a rollout's tokens.

It appends what the engine and the tools said, turn by turn, into `rollout.turns` and `rollout.segments`. A rollout that
was interrupted is played again from its beginning: calls that are on record are answered from it, and the interrupted
one goes on from its tokens. A call of another kind than the one on record is refused, so that a tool's text is never
taken for the model's.

A conversation that only grows is segment 0. `branch` begins another one; each has its own line of turns, its own
requests and its own random numbers, so several may be written at once and played again in any order.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence, Set
from typing import Any, TypeVar

import msgspec

from penstock.agent_loop.asking import Asked, OnPiece
from penstock.agent_loop.deadline import Clock
from penstock.agent_loop.rendering import ids_after
from penstock.agent_loop.stops import resolve_stops
from penstock.errors import DataFailure, Interrupted
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
    Tokens,
    Turn,
    pack_ids,
    unpack_ids,
)

T = TypeVar("T")

GENERATE = "generate"
TOOL = "tool"
MESSAGE = "message"
"""What somebody else said, already encoded: a user, a client, a template."""

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
        self.clock = Clock(lambda: self.stage)
        self.doing = "agent loop"
        """What the rollout waits for when it is neither the engine nor a tool; empty when it is played no more."""
        self.interrupted = False
        """A pause cut off an answer of this playing, whatever the loop makes of it: its further calls are refused."""
        self._asked = asked
        self._current = 0
        self._num_segments = 1
        """Segments that this playing has asked for; the record may have more."""
        self._turns_done: Counter[int] = Counter()
        """Calls of this playing that were answered, by segment."""
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
                raise self._mismatch("its first segment is on record with another beginning")
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
                raise self._mismatch(f"segment {index} is on record with another beginning")
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
            recorded = self._recorded(segment, GENERATE)
            if recorded is not None and recorded.finish_reason is not FinishReason.ABORT:
                self._turns_done[segment] += 1
                return Answer(recorded.text, recorded.finish_reason or FinishReason.STOP)
            params = self._checked(params)
            begun = recorded.num_tokens if recorded is not None else 0
            reason = FinishReason.LENGTH
            if begun < params.max_tokens:
                completion = await self._ask(segment, params, begun, on_piece)
                assert completion.finish_reason is not None
                reason = completion.finish_reason
                self._append(segment, self._tokens(segment).append(*_columns(completion), steps=completion.steps))
                begun += len(completion.ids) // 4
            text = "" if reason is FinishReason.ABORT else self._decoded(segment, begun, params.stop)
            turn = Turn(GENERATE, begun, reason, text, segment)
            if reason is FinishReason.ABORT:
                self._cut_off(turn, recorded)
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
            recorded = self._recorded(segment, TOOL, name)
            if recorded is not None:
                self._turns_done[segment] += 1
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
            answers = self._recorded_calls(segment, calls)
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
            self._sort_calls(segment, len(calls))
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
            recorded = self._recorded(segment, kind, name)
            if recorded is None:
                await self._say(Turn(kind, len(packed) // 4, None, text, segment, name), packed, durable)
                return
            begun = 4 * self.position(segment)
            if self._tokens(segment).ids[begun : begun + 4 * recorded.num_tokens] != packed:
                raise self._mismatch(f"turn {self._turns_done[segment]} has other tokens on record")
            self._turns_done[segment] += 1

    async def say(self, text: str, *, role: str = "user", segment: int | None = None, durable: bool = False) -> None:
        """Somebody answers the model, as its chat template writes that after the answer: mask 0, no logprob.

        Raises DataFailure when the template cannot go on so, ValueError when the model has not answered yet.
        """
        chosen = self._current if segment is None else segment
        history = self._history(chosen)
        if not history or history[-1]["role"] != "assistant":
            raise ValueError(f"{self.rollout.rollout_id}: `say` comes after an answer; call `generate` first")
        new = [{"role": role, "content": text}]
        ids = ids_after(self._asked.tokenizer, history, new, self.rollout.prompt.tools, last_id=self.last_id(chosen))
        await self.append(ids, text=text, name=role, segment=chosen, durable=durable)

    # Those who play a conversation that may come back in another order.

    def recall(self) -> None:
        """Every segment on record may be asked for from here on, in any order; `branch` begins others."""
        self._num_segments = max(1, len(self.rollout.segments))

    def position(self, segment: int) -> int:
        """How many tokens of a segment the calls of this playing have made, or read back."""
        mine = [turn for turn in self.rollout.turns if turn.segment == segment]
        return sum([turn.num_tokens for turn in mine[: self._turns_done[segment]]])

    def last_id(self, segment: int) -> int | None:
        """The last token of a segment that the calls of this playing have made, or read back."""
        end = self.position(segment)
        return int(unpack_ids(self._tokens(segment).ids)[end - 1]) if end else None

    def on_record(self, segment: int) -> bytes | None:
        """What a segment has on record before the next answer that a call reads back; None when nothing is left."""
        mine = [turn for turn in self.rollout.turns if turn.segment == segment][self._turns_done[segment] :]
        if not mine:
            return None
        said = sum(turn.num_tokens for turn in itertools.takewhile(lambda turn: turn.kind != GENERATE, mine))
        begun = self.position(segment)
        return self._tokens(segment).ids[4 * begun : 4 * (begun + said)]

    def leave_out(self, segment: int, begin: int, end: int) -> None:
        """These tokens of a segment stay as context and are not trained."""
        tokens = self._tokens(segment)
        mask = tokens.mask[:begin] + bytes(end - begin) + tokens.mask[end:]
        self._append(segment, Tokens(tokens.ids, tokens.logprobs, mask, tokens.steps))

    def train_only(self, answers: Set[tuple[int, int]]) -> None:
        """Of what the model wrote, only these are trained, each by its segment and its first token there.

        The rest stays as context: also what is on record and was not read back, and what a call that ended too early
        left there.
        """
        begins: Counter[int] = Counter()
        for turn in self.rollout.turns:
            begin = begins[turn.segment]
            begins[turn.segment] += turn.num_tokens
            if turn.kind == GENERATE and (turn.segment, begin) not in answers:
                self.leave_out(turn.segment, begin, begin + turn.num_tokens)

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

    def _history(self, segment: int) -> list[dict[str, Any]]:
        """What this playing made or read back of a segment, as messages. Text of a tool stands inside the answer."""
        history: list[dict[str, Any]] = [*map(dict, self.rollout.messages)]
        mine = [turn for turn in self.rollout.turns if turn.segment == segment]
        for turn in mine[: self._turns_done[segment]]:
            if turn.kind == MESSAGE:
                history.append({"role": turn.name or "user", "content": turn.text})
            elif history and history[-1]["role"] == "assistant":
                history[-1]["content"] += turn.text
            else:
                history.append({"role": "assistant", "content": turn.text})
        return history

    def _tokens(self, segment: int) -> Tokens:
        segments = self.rollout.segments
        return segments[segment].tokens if segments else NO_TOKENS

    def _require_room(self, parent: int, start: int) -> None:
        """Raises ValueError unless there are `start` tokens of `parent` to go on from."""
        if parent >= self._num_segments:
            raise ValueError(f"{self.rollout.rollout_id} has no segment {parent} to branch from")
        length = len(self._tokens(parent)) if parent != ROOT else len(self.rollout.prompt.ids) // 4
        if start > length:
            what = f"segment {parent}" if parent != ROOT else "the prompt"
            raise ValueError(
                f"{self.rollout.rollout_id} cannot branch after token {start} of {what}, which has {length}"
            )

    async def _say(self, turn: Turn, ids: Sequence[int] | bytes, durable: bool) -> None:
        """Tokens that the model did not write, as of the weights before them."""
        before = self._tokens(turn.segment)
        last_step = before.steps[-1][0] if before.steps else UNKNOWN_STEP
        self._append(turn.segment, before.append(ids, trained=False, model_step=last_step))
        await self._finished(turn, None, durable)

    def _append(self, segment: int, tokens: Tokens) -> None:
        segments = self.rollout.segments
        if not segments:
            self.rollout.segments = (Segment(tokens),) if tokens.mask else ()
            return
        old = segments[segment]
        self.rollout.segments = (
            *segments[:segment], Segment(tokens, old.parent, old.start), *segments[segment + 1 :],
        )  # fmt: skip

    def _recorded_calls(self, segment: int, calls: Sequence[Calling]) -> dict[int, ToolAnswer]:
        """Of calls that were made at once: the answers on record, by their numbers."""
        answers: dict[int, ToolAnswer] = {}
        for _ in calls:
            turn = self._recorded(segment, TOOL)
            if turn is None:
                break
            if turn.call >= len(calls) or turn.name != calls[turn.call].name or turn.call in answers:
                raise self._mismatch(f"call {turn.call} of {turn.name!r} is on record and is not made now")
            answers[turn.call] = ToolAnswer(turn.text, turn.outcome)
            self._turns_done[segment] += 1
        return answers

    def _sort_calls(self, segment: int, number: int) -> None:
        """The last calls as they were made, not as they ended: who reads the record sees the same every time."""
        done = self._turns_done[segment]
        turns = [*self.rollout.turns]
        places = [place for place, turn in enumerate(turns) if turn.segment == segment][done - number : done]
        for place, turn in zip(places, sorted([turns[p] for p in places], key=lambda turn: turn.call), strict=True):
            turns[place] = turn
        self.rollout.turns = tuple(turns)

    def _recorded(self, segment: int, kind: str, name: str = "") -> Turn | None:
        """The turn that answers the next call on this segment; None when it is not on record."""
        turns = self.rollout.turns
        mine = turns if len(self.rollout.segments) <= 1 else [turn for turn in turns if turn.segment == segment]
        place = self._turns_done[segment]
        if place >= len(mine):
            return None
        turn = mine[place]
        if turn.kind != kind:
            raise self._mismatch(f"turn {place} is on record as {turn.kind!r}, and now {kind!r} is called")
        if name and turn.name and name != turn.name:
            raise self._mismatch(f"turn {place} is on record as tool {turn.name!r}, and now {name!r} is called")
        return turn

    def _mismatch(self, what: str) -> DataFailure:
        return DataFailure(
            f"rollout {self.rollout.rollout_id} was played again in another way: {what}; it starts again",
            reason=FailureReason.RECORD_MISMATCH,
        )

    def _cut_off(self, turn: Turn, recorded: Turn | None) -> None:
        self.interrupted = True
        others = [other for other in self.rollout.turns if other is not recorded]
        self.rollout.turns = (*others, turn)

    async def _finished(self, turn: Turn, recorded: Turn | None, durable: bool) -> None:
        """Finished turns stand before those of other segments that were interrupted, so their places never change."""
        others = [other for other in self.rollout.turns if other is not recorded]
        place = len(others)
        while place and others[place - 1].finish_reason is FinishReason.ABORT:
            place -= 1
        self.rollout.turns = (*others[:place], turn, *others[place:])
        self._turns_done[turn.segment] += 1
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
                tokens=_last(segment.tokens, turn.num_tokens),
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
        request = self._asked.request(self.rollout, segment, params, ids=self._tokens(segment).ids, begun=begun)
        self._requests[segment] = request.request_id
        self.clock.hold()
        try:
            completion = await self._asked.answer(request, on_piece)
        finally:
            del self._requests[segment]
            self.clock.release()
        self._require_played()
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
        try:
            answered = await answer
        finally:
            self._tools -= 1
        self._require_played()
        return answered

    def _decoded(self, segment: int, num_tokens: int, stop: tuple[str, ...]) -> str:
        ids = self._tokens(segment).ids
        text = self._asked.tokenizer.decode(unpack_ids(ids[len(ids) - 4 * num_tokens :]).tolist())
        found = [position for position in (text.find(s) for s in stop if s) if position >= 0]
        return text[: min(found)] if found else text


def _columns(completion: Completion) -> tuple[bytes, bytes]:
    return completion.ids, completion.logprobs


def _distribution(params: SampleParams) -> tuple[float, ...]:
    # Before min_tokens the tokens that end an answer are forbidden.
    return params.temperature, params.top_p, params.top_k, params.min_p, params.min_tokens


def _last(tokens: Tokens, n: int) -> Tokens:
    """The last n tokens."""
    first = len(tokens) - n
    if first <= 0:
        return tokens
    runs, left = [], n
    for step, length in reversed(tokens.steps):
        if left:
            runs.append((step, min(length, left)))
            left -= runs[-1][1]
    return Tokens(tokens.ids[4 * first :], tokens.logprobs[4 * first :], tokens.mask[first:], tuple(reversed(runs)))
