"""EndpointAgentLoop: plays a rollout with an agent outside, which speaks to the session endpoint as to any API."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pydantic

from penstock.agent_loop.base import AgentLoop
from penstock.agent_loop.config import AgentLoopConfig
from penstock.agent_loop.parsers import find_parser
from penstock.agent_loop.rendering import Seams, TemplateProblem, template_problems
from penstock.agent_loop.session.agents import (
    END_S,
    Agent,
    AgentTask,
    CommandAgent,
    FunctionAgent,
    Report,
    ServiceAgent,
    taken_names,
)
from penstock.agent_loop.session.session import Session, SessionRules
from penstock.agent_loop.session.tree import Strictness
from penstock.config import import_name
from penstock.errors import ConfigError, DataFailure, RolloutFailure
from penstock.ports import Tokenizer
from penstock.rollout import FailureReason, FinishReason, RolloutState

if TYPE_CHECKING:
    from penstock.agent_loop.session.server import SessionServer

logger = logging.getLogger(__name__)


class EndpointAgentLoop(AgentLoop):
    """One session per rollout: a base URL and a key of its own.

    An agent outside cannot be cut off and played again: its requests wait at the engine over a pause. After a crash it
    is run again from its start, and what it asked before is answered from the record.
    """

    replayable = False
    sets_reward = True

    def __init__(
        self,
        *,
        agent: Callable[..., Any] | str | None = None,
        command: Sequence[str] = (),
        url: str = "",
        environment: Sequence[str] = (),
        tool_parser: str | Callable[..., Any] | None = "hermes",
        match: Strictness = "json-arguments",
        max_turns: int = 64,
        max_session_tokens: int | None = None,
        model_name: str = "penstock",
        host: str = "127.0.0.1",
        port: int = 0,
        public_url: str = "",
        **rest: Any,
    ) -> None:
        if rest.get("on_pause", "abort") == "abort":
            rest["on_pause"] = "keep"
        super().__init__(**rest)
        self._agent = self._make_agent(agent, command, url, environment)
        self._seams = Seams(self.tokenizer)
        self._parser = find_parser(tool_parser) if tool_parser is not None else None
        self._rules = SessionRules(
            max_turns=max_turns, max_tokens=max_session_tokens, context=self.context, strictness=match
        )
        self._model_name = model_name
        self._address: dict[str, Any] = {"host": host, "port": port, "public_url": public_url}
        self._server: SessionServer | None = None
        self._warned: set[str] = set()
        if match == "role-and-content":
            logger.warning(
                "match='role-and-content': what an answer called is not compared; a conversation whose tool calls were "
                "changed goes on from the recorded ones"
            )

    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        transcript = self.transcript(rollout)
        server = await self._serving()
        session = Session(
            transcript,
            tokenizer=self.tokenizer,
            sample_params=self.sample_params,
            rules=self._rules,
            parser=self._parser,
            seams=self._seams,
        )
        name, access = server.open(session)
        try:
            task = AgentTask.of(rollout, base_url=access.base_url, api_key=access.key, model=self._model_name)
            report = await self._run(task, session)
        finally:
            server.shut(name)
            await session.close()
        self._take(report, session, rollout)
        return rollout

    async def pause(self) -> None:
        """Nothing is aborted: whoever asks cannot ask again."""

    async def close(self) -> None:
        await super().close()
        if self._server is not None:
            await self._server.close()

    # Inside.

    def _make_agent(
        self, agent: Callable[..., Any] | str | None, command: Sequence[str], url: str, environment: Sequence[str]
    ) -> Agent:
        if agent is not None:
            return FunctionAgent(import_name(agent) if isinstance(agent, str) else agent)
        if command:
            return CommandAgent(command, environment)
        if url:
            return ServiceAgent(url)
        raise ConfigError("EndpointAgentLoop needs an agent: give one of agent, command and url")

    async def _serving(self) -> SessionServer:
        if self._server is None:
            from penstock.agent_loop.session.server import SessionServer

            self._server = SessionServer(**self._address, models=(self._model_name,))
        await self._server.start()
        return self._server

    async def _run(self, task: AgentTask, session: Session) -> Report:
        """What the agent reports. Raises what ends the run or the rollout, whatever the agent makes of it."""
        running = asyncio.create_task(self._agent.run(task), name="agent")
        try:
            waiting: set[asyncio.Future[Any]] = {running, session.fatal}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if session.fatal.done():
                session.fatal.result()
            return await running
        except RolloutFailure as failure:
            if session.cut:  # a limit was reached, and the agent did not expect it
                return Report()
            raise session.failure or failure from failure
        finally:
            running.cancel()
            # One that does not listen is left behind.
            await asyncio.wait([running], timeout=END_S)
            if running.done() and not running.cancelled():
                running.exception()

    def _take(self, report: Report, session: Session, rollout: RolloutState) -> None:
        """After the session: what was said counts, and what nobody heard does not."""
        last = session.settle()
        if session.failure is not None and not session.cut:
            # The agent made do without an answer that the model was never asked for; no score is of that.
            raise session.failure
        if last is None:
            raise DataFailure("the agent asked for no answer", reason=FailureReason.EMPTY_ANSWER)
        if self.judger is None:
            if report.verdict is None:
                raise DataFailure("the agent reported no reward, and the task has no judger_config")
            rollout.reward = report.verdict
        rollout.response_text = report.answer or last.text
        cut = session.cut or last.resume_at is None
        rollout.finish_reason = FinishReason.LENGTH if cut else FinishReason.STOP
        if fresh := session.unheeded - self._warned:
            self._warned |= fresh
            logger.warning("the agent asks for %s; that is not followed, the run's own holds", ", ".join(sorted(fresh)))


class EndpointAgentLoopConfig(AgentLoopConfig):
    """An agent outside: exactly one of `agent`, `command` and `url`."""

    loop: type[AgentLoop] | str = EndpointAgentLoop
    agent: Callable[..., Any] | str | None = None
    """A function, async or not, or its dotted path. Its parameters say what it gets: `prompt`, `messages`, `tools`,
    `extra_info`, `base_url`, `api_key`, `model`."""
    command: list[str] = []
    """A program and its arguments; `{prompt}` in one stands for what the user said last."""
    url: str = ""
    """A service that plays one task per POST."""
    environment: list[str] = []
    """Names of variables that the program sees besides what programs need to start."""
    tool_parser: Callable[..., Any] | str | None = "hermes"
    """How calls of tools are found in an answer: hermes, qwen3_coder, llama3_json, json, or the path of a function."""
    match: Strictness = "json-arguments"
    """How strictly a conversation must match the recorded one to go on from it."""
    max_turns: int = pydantic.Field(default=64, ge=1)
    """Answers per rollout."""
    max_session_tokens: int | None = pydantic.Field(default=None, ge=1)
    """Tokens that the model may write per rollout."""
    model_name: str = "penstock"
    """What `/v1/models` says. Requests may name any model."""
    host: str = "127.0.0.1"
    """Where it listens; another address than this machine's own is reachable by others."""
    port: int = pydantic.Field(default=0, ge=0, le=65535)
    """0 takes a free one."""
    public_url: str = ""
    """How agents elsewhere reach the endpoint, where that is not host and port."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        given = [name for name in ("agent", "command", "url") if getattr(self, name)]
        if len(given) != 1:
            yield f"exactly one of agent, command and url must be given; {' and '.join(given) or 'none'} is"
        yield from self._endpoint_problems()
        yield from self._agent_problems()

    def _endpoint_problems(self) -> Iterator[str]:
        for package in ("starlette", "uvicorn"):
            if importlib.util.find_spec(package) is None:
                yield f"the endpoint needs {package}; install penstock[serve]"
        if self.tool_parser is not None:
            with contextlib.suppress(ConfigError):
                find_parser(self.tool_parser)
                return
            yield f"tool_parser is {self.tool_parser!r}; there is no such parser"

    def _agent_problems(self) -> Iterator[str]:
        if self.agent is not None:
            try:
                agent = import_name(self.agent) if isinstance(self.agent, str) else self.agent
                taken_names(agent)
            except (ConfigError, TypeError, ValueError) as error:
                yield f"agent: {error}"
        if self.command and shutil.which(self.command[0]) is None:
            yield f"command: there is no program {self.command[0]!r}"
        if self.url and not self.url.startswith(("http://", "https://")):
            yield f"url is {self.url!r}; it must begin with http:// or https://"

    def loop_arguments(self) -> dict[str, Any]:
        own = EndpointAgentLoopConfig.model_fields.keys() - AgentLoopConfig.model_fields.keys()
        return {name: getattr(self, name) for name in sorted(own)} | self.arguments

    def template_problems(self, tokenizer: Tokenizer) -> list[TemplateProblem]:
        """Whether an agent sends tool and system messages is not known; one that does is refused at its request."""
        return [
            problem
            if problem.append == "user" or not problem.refused
            else problem._replace(refused=False, text=f"{problem.text}; a request with one gets an error")
            for problem in template_problems(tokenizer)
        ]
