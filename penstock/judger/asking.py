"""Whom an LLM judge asks: an OpenAI-compatible endpoint, or the engines of the run that it judges.

A judge on the run's own engines shares them with the rollouts it judges. So that neither waits for the other for ever,
its requests are served through a pause (`on_pause="serve"`), go before rollouts that wait in line, and find places that
are kept for them (`judging=True`).
"""

from __future__ import annotations

import abc
import asyncio
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.errors import DataFailure, InfrastructureFailure, RunError
from penstock.judger.failure import CallFailed
from penstock.judger.service import Service, ServiceConfig
from penstock.judger.slots import NoSlot, Slots
from penstock.ports import Completion, Engine, GenerateRequest, Tokenizer
from penstock.rollout import FinishReason, SampleParams, pack_ids, unpack_ids

Messages = Sequence[Mapping[str, str]]


class RunEngine:
    """The engines of a run, for judges that are built before there are any. Belongs to the run's `JudgerSet`."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    def bind(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(self, request: GenerateRequest) -> Completion:
        """As the engine's own. Raises RunError while there is none."""
        if self._engine is None:
            raise RunError("a judge asks the engines of the run, and they are not built yet")
        return await self._engine.generate(request)


class Asker(abc.ABC):
    """Raises CallFailed, and RunError when the run has no engine left."""

    @abc.abstractmethod
    async def ask(self, messages: Messages, seed: int, wait_until: float) -> str:
        """A whole answer; one that the token budget cut off is none."""

    @abc.abstractmethod
    async def close(self) -> None: ...


class _Message(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _ChatAnswer(msgspec.Struct):
    """What is read of `/chat/completions`."""

    choices: list[_Choice]


class EndpointAsker(Asker):
    def __init__(
        self, base_url: str, model: str, params: SampleParams, extra_body: Mapping[str, Any], config: ServiceConfig
    ) -> None:
        self._service = Service(f"{base_url.rstrip('/')}/chat/completions", config)
        self._asked: dict[str, Any] = {"model": model, "max_tokens": params.max_tokens}
        self._asked |= {"temperature": params.temperature, "top_p": params.top_p}
        if params.stop:
            self._asked["stop"] = list(params.stop)
        # Last, so that a field the service does not know can be replaced; None leaves one out.
        self._asked |= extra_body

    async def ask(self, messages: Messages, seed: int, wait_until: float) -> str:
        question = {"seed": seed, **self._asked, "messages": [dict(message) for message in messages], "stream": False}
        question = {name: value for name, value in question.items() if value is not None}
        body = await self._service.post(question, wait_until)
        try:
            answer = msgspec.json.decode(body, type=_ChatAnswer)
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
            raise CallFailed("service", f"the service answered with no chat completion: {error}") from None
        if len(answer.choices) != 1:
            raise CallFailed("service", f"the service answered with {len(answer.choices)} choices; 1 was asked for")
        (choice,) = answer.choices
        if choice.finish_reason == "length":
            raise CallFailed("abstention", f"the judge was cut off after {self._asked['max_tokens']} tokens")
        return choice.message.content

    async def close(self) -> None:
        await self._service.close()


class EngineAsker(Asker):
    """Its deadline begins with the engine, as every request's does; waiting for a place ends with `wait_until`."""

    _numbers = itertools.count()

    def __init__(self, engine: Engine, tokenizer: Tokenizer, params: SampleParams, max_concurrency: int) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._params = params
        self._slots = Slots(max_concurrency)

    async def ask(self, messages: Messages, seed: int, wait_until: float) -> str:
        try:
            async with asyncio.timeout_at(wait_until), self._slots.take(wait_until):
                completion = await self._engine.generate(self._request(messages, seed))
        except (NoSlot, TimeoutError):
            raise CallFailed("busy", "the engines of the run had no place for the judge") from None
        except InfrastructureFailure as failure:
            raise CallFailed("service", f"the engine failed: {failure}") from None
        except DataFailure as failure:
            raise CallFailed("service", f"the engine refused the judge's prompt: {failure}", may_pass=False) from None
        if completion.finish_reason is FinishReason.ABORT:
            raise CallFailed("service", "the engine dropped the judge's request")
        if completion.finish_reason is FinishReason.LENGTH:
            raise CallFailed("abstention", f"the judge was cut off after {self._params.max_tokens} tokens")
        text = self._tokenizer.decode(unpack_ids(completion.ids).tolist())
        cut = min((at for at in map(text.find, self._params.stop) if at >= 0), default=len(text))
        return text[:cut]

    def _request(self, messages: Messages, seed: int) -> GenerateRequest:
        try:
            ids = self._tokenizer.render(messages)
        except Exception as error:  # a chat template may raise anything
            said = f"the chat template refused the judge's prompt: {type(error).__name__}: {error}"
            raise CallFailed("service", said, way=said, may_pass=False) from None
        return GenerateRequest(
            request_id=f"judge/{next(self._numbers)}",
            prompt_ids=pack_ids(ids),
            params=self._params,
            seed=seed,
            on_pause="serve",
            judging=True,
        )

    async def close(self) -> None:
        pass  # the engine is the run's


def seed_of(*said: Any) -> int:
    """The same for the same question."""
    digest = hashlib.blake2b(repr(said).encode(errors="backslashreplace"), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
