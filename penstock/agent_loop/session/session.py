"""Session: the conversations of one rollout with an agent outside, on record in its transcript.

    request -> the answer on record that it goes on from (tree.py)
            -> only what is new, as ids, under the same prefix (rendering.py)
            -> its place in the rollout's segments (placing.py)
            -> the transcript appends it, asks the engine, keeps the turn -> reply

An answer is made by a task of the session's own: a client that loses its connection asks again and joins it. What no
client received by the end of the session is not trained.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from penstock.agent_loop.parsers import Parser, call_beginnings
from penstock.agent_loop.rendering import Seams, render_conversation
from penstock.agent_loop.session.allowance import Allowance
from penstock.agent_loop.session.placing import Place, Placing
from penstock.agent_loop.session.reply import Reply
from penstock.agent_loop.session.requests import Asking, Call, Finished, Refused, bad_request
from penstock.agent_loop.session.text_stream import TextStream
from penstock.agent_loop.session.tree import History, Recorded, Strictness, Tree
from penstock.agent_loop.transcript import Answer, Transcript
from penstock.errors import ConfigError, DataFailure, Interrupted, RolloutFailure, RunError
from penstock.ports import Completion, Tokenizer
from penstock.rollout import FailureReason, FinishReason, SampleParams, pack_ids, unpack_ids

logger = logging.getLogger(__name__)

NO_RETRY = {"x-should-retry": "false"}
"""Clients obey it, whatever the status."""
CLIENTS_FAULT = {
    FailureReason.CONTEXT_TOO_LONG: "context_length_exceeded",
    FailureReason.TOKEN_OUTSIDE_VOCABULARY: "invalid_token",
    FailureReason.TEMPLATE_REFUSED: "template_refused",
    FailureReason.SAMPLING_PARAMS: "invalid_request",
}


class SessionRules(msgspec.Struct, frozen=True, kw_only=True):
    """What a session allows, and how it reads requests: the same for all sessions of a loop."""

    max_turns: int = 64
    """Answers in all."""
    max_tokens: int | None = None
    """Tokens that the model may write in all."""
    context: int = 0
    """The model's limit for a conversation with its answer; 0 where it is not known."""
    strictness: Strictness = "json-arguments"


class _Reading(NamedTuple):
    """Where a request stands in the conversations on record."""

    after: Recorded | None
    """The answer that it goes on from."""
    ids: bytes
    """What comes after that, packed."""
    said: str
    """The same for people."""
    history: History | None = None
    """None for a text without messages."""


class Session:
    def __init__(
        self,
        transcript: Transcript,
        *,
        tokenizer: Tokenizer,
        sample_params: SampleParams,
        rules: SessionRules,
        parser: Parser | None,
        seams: Seams | None = None,
    ) -> None:
        """`seams` may be shared by the sessions of one tokenizer."""
        self.rules = rules
        self.cut = False
        """A limit ended it; what the agent does then is not its fault."""
        self.failure: RolloutFailure | None = None
        """Why the last answer could not be made; None since one could."""
        self.fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises what ends the run."""
        self.fatal.add_done_callback(lambda fatal: fatal.cancelled() or fatal.exception())  # seen, by whoever looks
        self.unheeded: set[str] = set()
        """Fields of requests that were read and not followed: the run's distribution holds, whatever a client says."""
        self._transcript = transcript
        self._tokenizer = tokenizer
        self._sample_params = sample_params
        self._parser = parser
        self._seams = seams or Seams(tokenizer)
        self._tree = Tree(rules.strictness)
        self._placing = Placing(transcript)
        self._replies: dict[bytes, list[Reply]] = {}
        """By request, those that were asked for with it."""
        self._making: set[asyncio.Task[None]] = set()
        self._answers: list[Recorded] = []
        self._turns = 0
        self._allowance = Allowance(rules.max_tokens)
        self._closed = False

    def ask(self, asking: Asking, *, request: bytes = b"", retried: bool = False) -> Reply:
        """The answer to a request, being made. Never waits. Raises Refused, nothing recorded.

        `request` is equal for equal requests. One that the client marks as asked again gets the answer that the same
        request got before, or is getting.
        """
        if self._closed:
            raise Refused(403, "this session has ended", code="session_ended")
        known = [reply for reply in self._replies.get(request, ()) if not reply.failed]
        if retried and known:
            # Equal requests may be open at once: the one that lost its client is the one that is asked for again.
            reply = next((reply for reply in known if reply.lost), known[-1])
            reply.lost = False
            return reply
        self._require_allowance()
        reading = self._read(asking)
        prompt_tokens = self._placing.num_before(reading.after) + len(reading.ids) // 4
        params = self._params(asking, prompt_tokens)
        try:
            place = self._placing.take(reading.after, reading.ids)
        except Interrupted:  # the rollout's time is up, and its agent does not know yet
            raise _ended() from None
        # Without the conversation: a reply is kept for as long as the session, and every turn brings all of it.
        kept = msgspec.structs.replace(asking, messages=(), tools=())
        reply = Reply(kept, self._answer_id(place), prompt_tokens)
        self._turns += 1
        self.unheeded.update(asking.unheeded, asking.sampling)
        self._replies.setdefault(request, []).append(reply)
        making = asyncio.create_task(self._make(reply, place, params, reading), name=f"answer {reply.answer_id}")
        self._making.add(making)
        making.add_done_callback(lambda task: self._made(task, reply, place))
        return reply

    def count(self, asking: Asking) -> int:
        """How many tokens the model would see."""
        reading = self._read(asking)
        return self._placing.num_before(reading.after) + len(reading.ids) // 4

    def ended(self, reply: Reply, *, delivered: bool) -> None:
        """One that was not delivered is made all the same: the client asks again, or later shows that it has it."""
        reply.lost = not delivered

    def drop(self) -> None:
        """Nothing more is answered, and what is being made is dropped."""
        self._closed = True
        for task in self._making:
            task.cancel()

    async def close(self) -> None:
        """`drop`, and nothing is left at work."""
        self.drop()
        if self._making:
            await asyncio.wait(self._making)

    def settle(self) -> Recorded | None:
        """After `close`: leaves out of training what no client received. Returns the last answer that one did."""
        received = [recorded for recorded in self._answers if recorded.received]
        self._transcript.record.train_only({(recorded.segment, recorded.begin) for recorded in received})
        return received[-1] if received else None

    # Inside.

    def _require_allowance(self) -> None:
        rules = self.rules
        if self._turns >= rules.max_turns:
            self.cut = True
            raise _limit(f"this session has had its {rules.max_turns} turns")
        if self._allowance.left is not None and self._allowance.left <= 0:
            self.cut = True
            raise _limit(f"this session has had its {rules.max_tokens} tokens")

    def _read(self, asking: Asking) -> _Reading:
        try:
            if asking.prompt is not None:
                return self._read_text(asking, asking.prompt)
            if asking.messages[-1]["role"] == "assistant":
                raise bad_request("the last message is the assistant's; going on with a given beginning is not served")
            history = self._tree.history(asking.model, asking.tools, asking.messages)
            after, depth = self._tree.attach(history)
            known, new = asking.messages[:depth], asking.messages[depth:]
            if after is None:
                ids = render_conversation(self._tokenizer, new, asking.tools)
            else:
                ids = self._seams.ids_after(known, new, asking.tools, last_id=self._last_id(after))
        except DataFailure as failure:
            raise Refused(400, str(failure), code=CLIENTS_FAULT.get(failure.reason, "invalid_request")) from None
        except RecursionError:
            raise bad_request("the request is nested too deeply") from None
        return _Reading(after, pack_ids(ids), msgspec.json.encode(new).decode(), history)

    def _read_text(self, asking: Asking, prompt: str | tuple[int, ...]) -> _Reading:
        if not isinstance(prompt, str):
            return _Reading(None, pack_ids(prompt), "")
        after, length = self._tree.attach_text(asking.model, prompt)
        return _Reading(after, pack_ids(self._tokenizer.encode(prompt[length:])), prompt[length:])

    def _last_id(self, after: Recorded) -> int:
        assert after.resume_at is not None, "nothing follows a cut answer"
        ids = unpack_ids(self._transcript.rollout.segments[after.segment].tokens.ids)
        return int(ids[after.resume_at - 1])

    def _params(self, asking: Asking, prompt_tokens: int) -> SampleParams:
        """The run's, with the client's stops and the smallest of all bounds. Raises Refused when none is left."""
        own, rules = self._sample_params, self.rules
        bounds = [own.max_tokens] + ([asking.max_tokens] if asking.max_tokens is not None else [])
        if self._allowance.left is not None:
            bounds.append(self._allowance.left)
        if rules.context:
            if prompt_tokens >= rules.context:
                self.cut = True
                raise Refused(
                    400,
                    f"this conversation has {prompt_tokens} tokens; the context is {rules.context}",
                    code="context_length_exceeded",
                )
            bounds.append(rules.context - prompt_tokens)
        if min(bounds) < own.min_tokens:
            if asking.max_tokens is not None and asking.max_tokens < own.min_tokens:
                raise bad_request(
                    f"max_tokens is {asking.max_tokens}; the run's answers have at least {own.min_tokens}"
                )
            raise self._too_few(min(bounds))
        return msgspec.structs.replace(own, max_tokens=min(bounds), stop=(*own.stop, *asking.stop))

    def _too_few(self, left: int) -> Refused:
        self.cut = True
        return _limit(
            f"{left} tokens are left; the run's answers have at least {max(1, self._sample_params.min_tokens)}"
        )

    async def _make(self, reply: Reply, place: Place, params: SampleParams, reading: _Reading) -> None:
        """The boundary where whatever happens to an answer becomes what its client is told."""
        try:
            async with self._allowance.part(params.max_tokens) as granted:
                if granted < max(1, params.min_tokens):  # others, asked for at the same time, had the rest
                    raise self._too_few(granted)
                params = msgspec.structs.replace(params, max_tokens=granted)
                finished, recorded = await self._answer(reply, place, params, reading)
        except Refused as refused:
            self._refuse(reply, place, refused)
            return
        except Exception as error:
            self._refuse(reply, place, self._explained(error))
            return
        # Free before the client knows: it may go on from there at once.
        self._placing.leave(place.segment, answered=True)
        self.failure = None
        reply.finish(finished, recorded)

    def _made(self, making: asyncio.Task[None], reply: Reply, place: Place) -> None:
        self._making.discard(making)
        if not reply.is_over:  # it was told to end
            self._refuse(reply, place, _ended())

    def _refuse(self, reply: Reply, place: Place, refused: Refused) -> None:
        self._placing.leave(place.segment, answered=False)
        reply.refuse(refused)

    def _explained(self, error: Exception) -> Refused:
        """What an answer that could not be made means for its client, and for the rollout."""
        if isinstance(error, Interrupted):
            return _ended()
        if isinstance(error, ConfigError):
            return bad_request(str(error))
        if isinstance(error, DataFailure) and (code := CLIENTS_FAULT.get(error.reason)):
            self.cut = self.cut or error.reason is FailureReason.CONTEXT_TOO_LONG
            return Refused(400, str(error), code=code)
        if isinstance(error, RolloutFailure):
            self.failure = error
            again = {"retry-after": "1"} if error.infrastructure else NO_RETRY
            return Refused(503 if error.infrastructure else 500, str(error), code=error.reason.value, headers=again)
        if not isinstance(error, RunError):
            logger.error("an answer could not be made", exc_info=error)
        if not self.fatal.done():
            # A RunError ends the run; anything else is a fault of ours, and ends the rollout.
            self.fatal.set_exception(error)
        return Refused(503, f"{type(error).__name__}: {error}", code="server_error", headers=NO_RETRY)

    async def _answer(
        self, reply: Reply, place: Place, params: SampleParams, reading: _Reading
    ) -> tuple[Finished, Recorded]:
        transcript, asking, segment = self._transcript, reply.asking, place.segment
        if place.new:
            await transcript.append(place.new, text=reading.said, segment=segment)
        begin = transcript.record.position(segment)
        reads_calls = self._parser is not None and asking.reads_calls
        stream = TextStream(
            self._tokenizer,
            stops=params.stop,
            calls=call_beginnings(self._parser) if self._parser is not None and reads_calls else None,
        )

        def on_piece(piece: Completion) -> None:
            reply.say(stream.add(unpack_ids(piece.ids).tolist()))

        answer = await transcript.generate(
            params, segment=segment, durable=True, on_piece=on_piece if asking.stream else None
        )
        ids = unpack_ids(transcript.rollout.segments[segment].tokens.ids)[begin : transcript.record.position(segment)]
        content, calls = self._parsed(answer.text, reply)
        if asking.stream:
            # What a client was shown is what it will send again.
            content = content if content.startswith(stream.text) else stream.text
            reply.say(content[len(stream.text) :])
        resume_at, stop = self._ending(answer, ids.tolist(), asking)
        finished = Finished(
            id=reply.answer_id,
            content=content,
            calls=calls,
            cut=answer.finish_reason is FinishReason.LENGTH,
            stop=stop,
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=len(ids),
        )
        recorded = Recorded(
            segment=segment,
            begin=begin,
            end=begin + len(ids),
            resume_at=None if resume_at is None else begin + resume_at,
            text=answer.text,
        )
        self._allowance.spend(len(ids))
        self._answers.append(recorded)
        if reading.history is not None:
            self._tree.add(reading.history, finished.as_message(), recorded)
        elif isinstance(asking.prompt, str):
            self._tree.add_text(asking.model, asking.prompt + finished.content, recorded)
        return finished, recorded

    def _parsed(self, text: str, reply: Reply) -> tuple[str, tuple[Call, ...]]:
        if self._parser is None or not reply.asking.reads_calls:
            return text, ()
        parsed = self._parser(text)
        if any(call.problem for call in parsed.calls):
            return text.strip(), ()  # what cannot be read as calls is what the model said
        # The ids are the same in every playing: a template may write them, and a client sends them again.
        return parsed.content.strip(), tuple(
            Call(_digest(f"{reply.answer_id}/{number}")[:9], call.name, json.dumps(call.arguments, ensure_ascii=False))
            for number, call in enumerate(parsed.calls)
        )

    def _ending(self, answer: Answer, ids: Sequence[int], asking: Asking) -> tuple[int | None, str | None]:
        """How many of the answer's tokens stand before what follows it, and the client's stop that ended it."""
        if answer.finish_reason is not FinishReason.STOP:
            return None, None
        if ids[-1] in self._tokenizer.stop_ids:
            # The end of a text is not the end of a turn: what follows a completion follows its words.
            return len(ids) - (asking.prompt is not None), None
        whole = self._tokenizer.decode(ids)
        if len(whole) == len(answer.text):
            special = next((stop for stop in asking.stop if self._tokenizer.encode(stop) == [ids[-1]]), None)
            return len(ids) - 1, special
        stop = next((stop for stop in asking.stop if whole.startswith(stop, len(answer.text))), None)
        kept = len(ids)
        while kept and len(self._tokenizer.decode(ids[:kept])) > len(answer.text):
            kept -= 1
        return (kept if self._tokenizer.decode(ids[:kept]) == answer.text else None), stop

    def _answer_id(self, place: Place) -> str:
        begin = self._transcript.record.position(place.segment) + len(place.new) // 4
        return "msg-" + _digest(f"{self._transcript.rollout.rollout_id}/{place.segment}/{begin}")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _limit(message: str) -> Refused:
    return Refused(400, message, code="session_limit", headers=NO_RETRY)


def _ended() -> Refused:
    return Refused(503, "this session has ended", code="session_ended", headers=NO_RETRY)
