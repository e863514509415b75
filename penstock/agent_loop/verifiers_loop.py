"""VerifiersAgentLoop: a verifiers v1 taskset, played by its harness against the session endpoint.

    row -> session -> one process with verifiers: harness, runtime, rewards -> base URL and key of the session
                                                                           -> verdict: the task's reward

The harness asks verifiers' own proxy, which asks the session; so the tokens are recorded here, as with any agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from penstock.agent_loop.base import AgentLoop
from penstock.agent_loop.config import AgentLoopConfig
from penstock.agent_loop.endpoint import EndpointAgentLoop, EndpointAgentLoopConfig
from penstock.agent_loop.session.agents import END_S, Agent, AgentTask, Report, as_report
from penstock.child import Child
from penstock.data.verifiers import KEY, PROGRAM, VerifiersTasksetConfig, verifiers_environment
from penstock.errors import ConfigError, DataFailure, InfrastructureFailure

LINE_LIMIT = 1 << 28


class VerifiersPlace(msgspec.Struct, frozen=True):
    """Where tasks are played: plain data, so that it may travel."""

    python: str
    settings: dict[str, Any]
    environment: tuple[str, ...]
    timeout_s: float
    """From its start until it knows its tasks."""


class VerifiersAgent:
    """One process for all tasks: starting it takes seconds. When it died, the next task starts it again."""

    def __init__(self, place: VerifiersPlace) -> None:
        self._place = place
        self._process: _Process | None = None
        self._starting = asyncio.Lock()

    async def run(self, task: AgentTask) -> Report:
        key = task.extra_info.get(KEY)
        async with self._starting:
            if self._process is None or self._process.ended:
                if self._process is not None:
                    await self._process.close()
                self._process = await _Process.start(self._place)
            process = self._process
        if key not in process.keys:
            raise DataFailure(f"the taskset has no task {key!r}; rows must come from the loop's own taskset")
        order = {"key": key, "base_url": task.base_url, "api_key": task.api_key, "model": task.model}
        return as_report(await process.play(order), "verifiers")

    async def close(self) -> None:
        if self._process is not None:
            await self._process.close()


class _Process:
    """Speaks to the program; see there."""

    def __init__(
        self, child: Child, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: frozenset[str]
    ) -> None:
        self.keys = keys
        self.ended = False
        self._child = child
        self._writer = writer
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._listening = asyncio.create_task(self._listen(reader), name="verifiers")

    @classmethod
    async def start(cls, place: VerifiersPlace) -> _Process:
        """Raises InfrastructureFailure, and ConfigError when verifiers refuses the settings."""
        environment = verifiers_environment(place.python, place.environment)
        try:
            child = await Child.start(PROGRAM, python=place.python, environment=environment)
        except OSError as error:
            raise InfrastructureFailure(f"{place.python} cannot be started: {error.strerror}") from error
        try:
            reader, writer = await child.connect(limit=LINE_LIMIT)
            _say(writer, place.settings)
            async with asyncio.timeout(place.timeout_s):
                line = await reader.readline()
            if not line:
                raise InfrastructureFailure(f"verifiers {await child.story()}")
            answer = json.loads(line)
            if "refused" in answer:
                raise ConfigError(f"verifiers refuses the taskset or its agent: {answer['refused']}")
        except TimeoutError:
            await child.end(grace_s=0)
            raise InfrastructureFailure(f"verifiers did not load its tasks in {place.timeout_s:g} s") from None
        except BaseException:
            await child.end(grace_s=0)
            raise
        return cls(child, reader, writer, frozenset(task["key"] for task in answer["tasks"]))

    async def play(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """What the task reports. Cancelling ends its harness."""
        if self.ended:
            raise InfrastructureFailure("verifiers has ended")
        number = next(self._numbers)
        outcome = self._waiting[number] = asyncio.get_running_loop().create_future()
        _say(self._writer, {"play": number, **order})
        try:
            heard = await outcome
        except asyncio.CancelledError:
            if not self.ended:
                _say(self._writer, {"cancel": number})
            raise
        finally:
            del self._waiting[number]
        if "failed" in heard:
            failure = InfrastructureFailure if heard["infrastructure"] else DataFailure
            raise failure(f"verifiers: {heard['failed']}")
        report: dict[str, Any] = heard["report"]
        return report

    async def close(self) -> None:
        """Its harnesses end with it, in order if they can."""
        self._listening.cancel()
        await asyncio.wait([self._listening])
        self.ended = True
        await self._child.end(grace_s=END_S)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            with contextlib.suppress(ConnectionError):
                while line := await reader.readline():
                    heard = json.loads(line)
                    outcome = self._waiting.get(heard["played"])
                    if outcome is not None and not outcome.done():
                        outcome.set_result(heard)
        finally:
            self.ended = True
        story = await self._child.story()
        for outcome in self._waiting.values():
            if not outcome.done():
                outcome.set_exception(InfrastructureFailure(f"verifiers {story}"))


def _say(writer: asyncio.StreamWriter, value: Mapping[str, Any]) -> None:
    writer.write(json.dumps(value).encode() + b"\n")


class VerifiersAgentLoop(EndpointAgentLoop):
    """One session per rollout, played by verifiers. The reward is its task's, unless the task here has a judger."""

    def __init__(self, *, place: VerifiersPlace, **rest: Any) -> None:
        self._verifiers = VerifiersAgent(place)
        super().__init__(**rest)

    async def close(self) -> None:
        await super().close()
        await self._verifiers.close()

    def _make_agent(self, *_: Any) -> Agent:
        return self._verifiers


class VerifiersAgentLoopConfig(EndpointAgentLoopConfig):
    """A taskset of verifiers 0.4. The fields of the endpoint hold; `agent`, `command` and `url` are not given."""

    loop: type[AgentLoop] | str = VerifiersAgentLoop
    taskset: VerifiersTasksetConfig
    """The same that the task's sampler draws from."""
    harness: str = ""
    """By its name, such as `null`, a chat with the task's tools. Empty: that of the taskset, or else `bash`."""
    agent_arguments: dict[str, Any] = {}
    """Further settings of the agent, as verifiers names them: `harness` with its own, `timeout`, `retries`. Its
    `runtime` is `{"type": "subprocess"}` unless given."""

    def problems(self) -> Iterator[str]:
        yield from AgentLoopConfig.problems(self)
        yield from self._endpoint_problems()
        for name in ("agent", "command", "url"):
            if getattr(self, name):
                yield f"{name} is given; the agent is verifiers' own"
        for name in sorted(self.agent_arguments.keys() & {"model", "client", "max_turns", "max_output_tokens"}):
            yield f"agent_arguments has {name}; the run decides it"

    def loop_arguments(self) -> dict[str, Any]:
        own = VerifiersAgentLoopConfig.model_fields.keys() - EndpointAgentLoopConfig.model_fields.keys()
        own |= {"agent", "command", "url", "environment"}
        rest = {name: value for name, value in super().loop_arguments().items() if name not in own}
        return rest | {"place": self._place()}

    def _place(self) -> VerifiersPlace:
        settings = self.taskset.settings()
        agent = settings["agent"] | self.agent_arguments
        if self.harness:
            agent["harness"] = {**agent.get("harness", {}), "id": self.harness}
        # Its limits are those of the session: an agent that reaches one ends in order there, and is scored.
        agent |= {"max_turns": self.max_turns, "max_output_tokens": self.max_session_tokens}
        return VerifiersPlace(
            python=self.taskset.interpreter,
            settings=settings | {"agent": agent},
            environment=(*self.taskset.environment, *self.environment),
            timeout_s=self.taskset.timeout_s,
        )
