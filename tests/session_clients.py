"""Clients of a session without sockets, and what they leave on record."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from chat_families import tokenizer_of

from penstock.agent_loop.asking import Asked
from penstock.agent_loop.parsers import hermes
from penstock.agent_loop.session.reply import Reply
from penstock.agent_loop.session.requests import Finished
from penstock.agent_loop.session.session import Session, SessionRules
from penstock.agent_loop.session.wire_openai import ChatWire, CompletionWire
from penstock.agent_loop.transcript import Transcript
from penstock.models.tokenizer import HFTokenizer
from penstock.ports import Completion, FinishedTurn, GenerateRequest, joined
from penstock.rollout import ROOT, WHOLE, Prompt, RolloutState, SampleParams, pack_ids, unpack_ids
from penstock.testing import EngineScript, ScriptedEngine, run_virtual

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


class Spoken(ScriptedEngine):
    """Says the given texts (or ids) one after the other, texts ended as the family ends a turn; notes what it was
    asked."""

    def __init__(self, tokenizer: HFTokenizer, texts: Sequence[Any], *, end: str, **script: Any) -> None:
        super().__init__(EngineScript(**{"tokens_per_s": 1000.0, "answers": self._next} | script))
        self.asked: list[tuple[GenerateRequest, Completion]] = []
        self._tokenizer = tokenizer
        self._texts = list(texts)
        self._end = end
        self.is_done = asyncio.Event()
        """It has answered somebody."""
        self._given: dict[tuple[int, int], list[int]] = {}

    def _next(self, request: GenerateRequest) -> list[int]:
        # A stream that is joined, and a request that goes on, get the same answer.
        key = (request.seed, request.first_uniform - len(request.response_ids) // 4)
        if key not in self._given:
            said = self._texts.pop(0)
            self._given[key] = self._tokenizer.encode(said + self._end) if isinstance(said, str) else list(said)
        return self._given[key]

    async def generate(self, request: GenerateRequest) -> Completion:
        completion = await super().generate(request)
        self.asked.append((request, completion))
        self.is_done.set()
        return completion

    async def stream(self, request: GenerateRequest) -> Any:
        pieces = []
        async for piece in super().stream(request):
            pieces.append(piece)
            yield piece
        self.asked.append((request, joined(pieces)))


class Kept:
    """A turn log in memory."""

    def __init__(self) -> None:
        self.turns: list[FinishedTurn] = []

    async def append(self, turn: FinishedTurn, *, durable: bool = False) -> None:
        self.turns.append(turn)


class Talk:
    """A session with its engine, and the client's side of it."""

    def __init__(
        self,
        *texts: Any,
        family: str = "qwen2.5",
        prompt: Sequence[Message] = (),
        rollout: RolloutState | None = None,
        end: str | None = None,
        max_tokens: int = 400,
        engine: Any = None,
        params: SampleParams | None = None,
        rules: SessionRules | None = None,
        kept: Kept | None = None,
        **script: Any,
    ) -> None:
        self.tokenizer = tokenizer_of(family)
        ends = {"glm4": "<|user|>", "gemma": "<end_of_turn>", "phi3": "<|end|>", "llama3": "<|eot_id|>"}
        ends |= {"mistral": "</s>", "deepseek": "<|end_of_sentence|>"}
        self.engine = engine or Spoken(
            self.tokenizer, texts, end=ends.get(family, "<|im_end|>") if end is None else end, **script
        )
        ids = pack_ids(self.tokenizer.render(list(prompt or [user("hello")])))
        self.rollout = rollout or RolloutState(
            prompt=Prompt(messages=tuple(prompt), ids=ids), task_name="t", group_id="t:0", rollout_id="t:0:0"
        )
        self.params = params or SampleParams(max_tokens=max_tokens)
        self.kept = kept or Kept()
        self.transcript = Transcript(
            self.rollout,
            Asked(
                engine=self.engine,
                tokenizer=self.tokenizer,
                sample_params=self.params,
                on_pause="keep",
                turn_log=self.kept,
            ),
        )
        self.session = Session(
            self.transcript,
            tokenizer=self.tokenizer,
            sample_params=self.params,
            rules=rules or SessionRules(),
            parser=hermes,
        )

    def ask(self, *messages: Message, retried: bool = False, model: str = "m", **fields: Any) -> Reply:
        """A request; its answer is being made."""
        body = json.dumps({"model": model, "messages": messages, **fields}).encode()
        return self.session.ask(ChatWire().read(body), request=body, retried=retried)

    def complete(self, prompt: Any, *, retried: bool = False, **fields: Any) -> Reply:
        body = json.dumps({"model": "m", "prompt": prompt, **fields}).encode()
        return self.session.ask(CompletionWire().read(body), request=body, retried=retried)

    async def say(self, *messages: Message, **fields: Any) -> Message:
        """A request, and the message that it is answered with, as a client has it."""
        return as_message(await receive(self.ask(*messages, **fields)))

    async def over(self) -> RolloutState:
        """The session ends; what it left behind."""
        await self.session.close()
        self.session.settle()
        return self.rollout

    @property
    def shape(self) -> list[tuple[int, str, list[tuple[str, bool]]]]:
        """Of every segment: its parent, the text of that one which comes before it, and its own runs of tokens that are
        trained or not. Special tokens are written out."""
        found = []
        for segment in self.rollout.segments:
            parent = self.rollout.prompt if segment.parent == ROOT else self.rollout.segments[segment.parent].tokens
            before = unpack_ids(parent.ids)[: None if segment.start == WHOLE else segment.start].tolist()
            found.append((segment.parent, self.text(before), self.runs(segment.tokens.ids, segment.tokens.mask)))
        return found

    def runs(self, ids: bytes, mask: bytes) -> list[tuple[str, bool]]:
        pairs = itertools.groupby(zip(unpack_ids(ids).tolist(), mask, strict=True), key=lambda pair: pair[1])
        return [(self.text([token for token, _ in run]), bool(trained)) for trained, run in pairs]

    def text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.inner.decode(list(ids)))

    def require_exact(self) -> None:
        """What the engine saw and made is what is on record, token by token, each of its answers once."""
        answers = [(turn, *place) for turn, place in places(self.rollout) if turn.kind == "generate"]
        assert len(answers) == len(self.engine.asked)
        for request, completion in self.engine.asked:
            found = [a for a in answers if _matches(self.rollout, a, request, completion)]
            assert found, f"{self.text(unpack_ids(request.prompt_ids))!r} is not on record"
            answers.remove(found[0])


def places(rollout: RolloutState) -> list[tuple[Any, tuple[int, int, int]]]:
    """Every turn with its segment, first and last token."""
    offsets: dict[int, int] = {}
    found = []
    for turn in rollout.turns:
        begin = offsets.get(turn.segment, 0)
        offsets[turn.segment] = begin + turn.num_tokens
        found.append((turn, (turn.segment, begin, begin + turn.num_tokens)))
    return found


def _matches(rollout: RolloutState, answer: Any, request: GenerateRequest, completion: Completion) -> bool:
    _, segment, begin, end = answer
    tokens = rollout.segments[segment].tokens
    return (
        rollout.context_ids(segment) + tokens.ids[: 4 * begin] == request.prompt_ids
        and tokens.ids[4 * begin : 4 * end] == completion.ids
        and tokens.logprobs[4 * begin : 4 * end] == completion.logprobs
    )


async def receive(reply: Reply) -> Finished:
    """As a client that gets all of it."""
    await reply.changed.wait_until(lambda: reply.is_over)
    finished = reply.result()
    reply.delivered()
    return finished


def as_message(answer: Finished) -> Message:
    return json.loads(ChatWire().whole(_NOBODY, answer))["choices"][0]["message"]


_NOBODY: Any = type("Nobody", (), {"model": "m"})()


def played(texts: Sequence[Any], main: Callable[[Talk], Awaitable[None]], **options: Any) -> Talk:
    """A session from its beginning to its end, in virtual time; what is on record is what the engine saw."""

    async def whole() -> Talk:
        talk = Talk(*texts, **options)
        await main(talk)
        await talk.over()
        return talk

    talk = run_virtual(whole())
    talk.require_exact()
    return talk


class Noted:
    """An engine, and what it was asked and answered."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.asked: list[tuple[GenerateRequest, Completion]] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        completion: Completion = await self._engine.generate(request)
        self.asked.append((request, completion))
        return completion

    async def stream(self, request: GenerateRequest) -> Any:
        pieces = []
        async for piece in self._engine.stream(request):
            pieces.append(piece)
            yield piece
        self.asked.append((request, joined(pieces)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
