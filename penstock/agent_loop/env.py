"""Environments: what a model plays with, turn by turn.

    class Guess:
        def reset(self, row):            # what the row asks; returns messages, or None: the row's own prompt
            self.secret = row["ground_truth"]

        def step(self, answer):          # the model's words; returns messages, reward, whether it is over
            return "higher" if ... , 0.0, False

The methods may be async. Plain ones run in worker processes, where one that hangs is killed; a process plays many
environments. When a rollout goes on after a pause or a crash, its environment is made anew and stepped with the answers
on record, which must lead to the same: what is random in it should come from the row.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from penstock.agent_loop.tools import Deadline, TooSlow
from penstock.config import dotted_name
from penstock.errors import ConfigError, DataFailure, InfrastructureFailure
from penstock.judger.failure import CallFailed
from penstock.judger.handler import Handler, is_async, locate_handler, resolve_handler
from penstock.judger.pool import Worker, wait_until_gone
from penstock.judger.worker import Setup
from penstock.rollout import FailureReason, RolloutState, storable

Messages = Sequence[Mapping[str, Any]] | Mapping[str, Any] | str | None
"""A text is a user's message."""


class Env(Protocol):
    """Methods may be async; `close()` is called if there is one."""

    def reset(self, row: dict[str, Any]) -> Messages | Awaitable[Messages]:
        """Begin. `row` has `messages`, `ground_truth`, `data_source` and `extra_info`.

        Returns what the model is told in place of the row's prompt; None: that prompt.
        """
        ...

    def step(self, answer: str) -> tuple[Messages, float, bool] | Awaitable[tuple[Messages, float, bool]]:
        """The model's answer in; what it is told next, the reward of this step, and whether it is over."""
        ...


class Step(msgspec.Struct, frozen=True):
    """What an environment said. On record as JSON."""

    messages: tuple[dict[str, Any], ...] = ()
    reward: float = 0.0
    done: bool = False
    own_prompt: bool = True
    """Of a reset: the row's prompt stands."""

    def as_text(self) -> str:
        return msgspec.json.encode(self).decode()

    @staticmethod
    def of_text(text: str) -> Step:
        return msgspec.json.decode(text, type=Step)


class EnvLimits(msgspec.Struct, frozen=True, kw_only=True):
    timeout_s: float = 60.0
    """Of one reset or step, from when it begins."""
    num_workers: int = 2
    start_timeout_s: float = 60.0
    max_memory: int = 2 << 30


class Lost(Exception):
    """The environment is gone with its process."""


def row_of(rollout: RolloutState) -> dict[str, Any]:
    prompt = rollout.prompt
    return {
        "messages": [dict(message) for message in prompt.messages],
        "ground_truth": prompt.ground_truth,
        "data_source": prompt.data_source,
        "extra_info": dict(prompt.extra_info),
    }


class Envs:
    """Makes environments and plays them, on the event loop or in worker processes."""

    def __init__(self, env: Handler, arguments: Mapping[str, Any], limits: EnvLimits) -> None:
        """Raises ConfigError when `env` is no environment, or cannot run where it must."""
        make = resolve_handler(env)
        self._name = dotted_name(make)
        asynchronous = [is_async(method) for method in env_methods(make)]
        self._arguments = dict(arguments)
        self._limits = limits
        self._make = make
        self._deadline = Deadline(limits.timeout_s)
        self._here: dict[str, Any] | None = {} if all(asynchronous) else None
        if any(asynchronous) and not all(asynchronous):
            raise ConfigError(f"{self._name} has an async method and a plain one; reset and step must be alike")
        self._workers: list[_EnvWorker] = []
        if self._here is None:
            setup = msgspec.structs.replace(locate_handler(env), kind="object")
            self._workers = [_EnvWorker(setup, limits) for _ in range(limits.num_workers)]
        self._homes: dict[str, _EnvWorker] = {}
        self._numbers = itertools.count()

    def begin(self, rollout: RolloutState) -> Playing:
        return Playing(self, f"{rollout.rollout_id}/{next(self._numbers)}", row_of(rollout))

    async def call(self, name: str, method: str, *values: Any) -> Any:
        """Raises Lost, DataFailure when the environment raised, InfrastructureFailure when its time was up."""
        try:
            if self._here is not None:
                return await self._deadline.keep(self._on_the_loop(name, method, *values), name=f"environment {name}")
            return await self._in_a_worker(name, method, *values)
        except TooSlow:
            raise InfrastructureFailure(
                f"{self._name}.{method} did not answer within {self._limits.timeout_s:g} s",
                reason=FailureReason.TOOL_DEADLINE,
            ) from None

    async def _on_the_loop(self, name: str, method: str, *values: Any) -> Any:
        assert self._here is not None
        if method == "make":
            self._here[name] = self._make(**self._arguments)
            return None
        if method == "forget":
            close = getattr(self._here.pop(name, None), "close", None)
            closed = close() if callable(close) else None
            return await closed if inspect.isawaitable(closed) else closed
        try:
            return await getattr(self._here[name], method)(*values)
        except Exception as error:  # an environment may raise anything
            raise self._raised(method, f"raised {type(error).__name__}: {error}") from error

    async def _in_a_worker(self, name: str, method: str, *values: Any) -> Any:
        if method == "make":
            self._homes[name] = min(self._workers, key=lambda worker: worker.envs)
            self._homes[name].envs += 1
        home = self._homes.get(name)
        if home is None:
            raise Lost
        if method == "forget":
            del self._homes[name]
            home.envs -= 1
        reply = await home.call([name, method, self._arguments if method == "make" else list(values)])
        if reply.get("lost"):
            raise Lost
        if "unjudged" in reply:
            raise self._raised(method, reply["unjudged"])
        return reply["value"]

    def _raised(self, method: str, what: str) -> DataFailure:
        return DataFailure(f"{self._name}.{method} {what}", reason=FailureReason.AGENT_LOOP_ERROR)

    async def close(self) -> None:
        self._deadline.close()
        for worker in self._workers:
            await worker.close()


class Playing:
    """One rollout's environment: made when it is needed, and made again where it was lost."""

    def __init__(self, envs: Envs, name: str, row: dict[str, Any]) -> None:
        self._envs = envs
        self._name = name
        self._row = row
        self._made = False
        self._steps = 0

    async def reset(self) -> Step:
        await self._make()
        said = await self._envs.call(self._name, "reset", self._row)
        return Step(messages_of(said), own_prompt=said is None)

    async def step(self, answers: Sequence[str], on_record: Sequence[Step]) -> Step:
        """What the environment says to the last of the answers. `on_record` is what it said to those before."""
        for attempt in (1, 2):
            try:
                await self._catch_up(answers[:-1], on_record)
                said = await self._envs.call(self._name, "step", answers[-1])
                self._steps += 1
                return step_of(said)
            except Lost:
                # Another environment of its process hung, say.
                self._made, self._steps = False, 0
                if attempt == 2:
                    raise InfrastructureFailure(
                        f"the environment of {self._name} was lost twice", reason=FailureReason.TOOL_DEADLINE
                    ) from None
        raise AssertionError("unreachable: the second try returns or raises")

    async def forget(self) -> None:
        if self._made:
            self._made = False
            with contextlib.suppress(Lost, DataFailure, InfrastructureFailure):
                await self._envs.call(self._name, "forget")

    async def _make(self) -> None:
        await self._envs.call(self._name, "make")
        self._made = True

    async def _catch_up(self, answers: Sequence[str], on_record: Sequence[Step]) -> None:
        """Step a new environment to where the old one was. Raises DataFailure when it goes another way."""
        if self._made and self._steps == len(answers):
            return
        if not self._made:
            await self.reset()
        for answer, recorded in zip(answers[self._steps :], on_record[self._steps :], strict=True):
            said = step_of(await self._envs.call(self._name, "step", answer))
            self._steps += 1
            if said != recorded:
                raise DataFailure(
                    f"the environment of {self._name} was played again and said {said.as_text()[:200]} where "
                    f"{recorded.as_text()[:200]} is on record; what is random in it must come from the row",
                    reason=FailureReason.RECORD_MISMATCH,
                )


class _EnvWorker:
    """A process that hosts environments, one call at a time; killed and started anew when a call hangs."""

    def __init__(self, setup: Setup, limits: EnvLimits) -> None:
        self._setup = setup
        self._limits = limits
        self._worker: Worker | None = None
        self._dying: list[Worker] = []
        self._turn: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.envs = 0

    async def call(self, arguments: list[Any]) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._bury()
            self._loop, self._turn = loop, asyncio.Lock()
        assert self._turn is not None
        async with self._turn:
            done = False
            try:
                if self._worker is not None and not self._worker.alive:
                    self._bury()
                if self._worker is None:
                    self._worker = Worker(self._setup)
                await self._worker.get_ready(self._limits.start_timeout_s)
                packed = msgspec.msgpack.encode(arguments)
                reply = await self._worker.call(packed, self._limits.timeout_s, self._limits.max_memory)
                done = True
                return reply
            except CallFailed as failure:
                if failure.cause == "timeout":
                    raise TooSlow from None
                raise InfrastructureFailure(
                    f"an environment's process failed: {failure.reason}", reason=FailureReason.TOOL_DEADLINE
                ) from None
            except OSError as error:
                raise InfrastructureFailure(
                    f"no process for an environment could be started: {error}", reason=FailureReason.TOOL_DEADLINE
                ) from None
            finally:
                if not done:
                    # Also when the caller was cancelled: the answer would be taken for that of the next call.
                    self._bury()

    def _bury(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._dying = [worker for worker in (*self._dying, self._worker) if worker.alive]
            self._worker = None

    async def close(self) -> None:
        """Returns when its processes are gone, after at most a second."""
        self._bury()
        await wait_until_gone(self._dying, 1.0)


def env_methods(make: Callable[..., Any]) -> list[Callable[..., Any]]:
    """`reset` and `step` of a class. Raises ConfigError when it is none, or has none."""
    if not isinstance(make, type):
        raise ConfigError(f"{dotted_name(make)} is no class; an environment is a class with reset and step")
    missing = [name for name in ("reset", "step") if not callable(getattr(make, name, None))]
    if missing:
        raise ConfigError(f"{dotted_name(make)} has no {' and no '.join(missing)}; an environment has reset and step")
    return [getattr(make, name) for name in ("reset", "step")]


def messages_of(said: Any) -> tuple[dict[str, Any], ...]:
    """Raises DataFailure when it is none."""
    if said is None:
        return ()
    if isinstance(said, str):
        return ({"role": "user", "content": storable(said)},)
    messages = [said] if isinstance(said, Mapping) else said
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        raise _wrong(f"messages are a text, or a list of objects with role and content, not {said!r:.80}")
    if not all(isinstance(message.get("content"), str) and "role" in message for message in messages):
        raise _wrong(f"a message has a role and a text as its content: {said!r:.80}")
    return tuple({**message, "content": storable(message["content"])} for message in messages)


def step_of(said: Any) -> Step:
    """Raises DataFailure when it is none."""
    if not isinstance(said, Sequence) or isinstance(said, str) or len(said) != 3:
        raise _wrong(f"step must return (messages, reward, done), not {said!r:.80}")
    messages, reward, done = said
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) < float("inf"):
        raise _wrong(f"the reward of a step must be a finite number, not {reward!r:.80}")
    if not isinstance(done, bool):
        raise _wrong(f"done must be true or false, not {done!r:.80}")
    found = messages_of(messages)
    if not found and not done:
        raise _wrong("it said nothing and is not done")
    step = Step(found, float(reward), done)
    try:
        step.as_text()
    except (TypeError, ValueError) as error:
        raise _wrong(f"its messages cannot be kept: {error}") from None
    return step


def _wrong(what: str) -> DataFailure:
    return DataFailure(f"the environment is wrong: {what}", reason=FailureReason.AGENT_LOOP_ERROR)
