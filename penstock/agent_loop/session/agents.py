"""The agent outside: a Python function, a program, or a service. Each is told its task, a base URL and a key.

    function   called by the names of its parameters: prompt, messages, tools, extra_info, base_url, api_key, model
    program    OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY in its environment, the task as
               JSON on standard input; {prompt} in an argument is the last thing the user said
    service    all of that in the body of a POST

What it reports is its final answer (a text), a reward (a number), both (`{"answer": ..., "reward": ...}`, with other
numbers as parts of the reward), or nothing. Of a program that is the last line of its output if it is JSON, else all of
its output as the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from penstock.agent_loop.session import launch
from penstock.config import dotted_name, raised_at
from penstock.environment import child_environment
from penstock.errors import DataFailure, InfrastructureFailure, Interrupted, RolloutFailure, RunError
from penstock.judger.worker import as_reply
from penstock.rollout import FailureReason, RolloutState, Verdict

MAX_OUTPUT = 1 << 20
"""Bytes of a program's output that are kept; the end of a longer one."""
MAX_COMPLAINT = 1000
CONNECT_S = 10.0
END_S = 3.0
"""How long an agent that is told to end may take before it is left behind."""


class AgentTask(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent is told. Not the ground truth."""

    prompt: str
    """The last thing the user said."""
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    extra_info: Mapping[str, Any]
    base_url: str
    api_key: str
    model: str

    @classmethod
    def of(cls, rollout: RolloutState, *, base_url: str, api_key: str, model: str) -> AgentTask:
        said = [str(message["content"]) for message in rollout.messages if message.get("role") == "user"]
        return cls(
            prompt=said[-1] if said else "",
            messages=rollout.messages,
            tools=rollout.prompt.tools,
            extra_info=rollout.extra_info,
            base_url=base_url,
            api_key=api_key,
            model=model,
        )


class Report(msgspec.Struct, frozen=True):
    """What an agent said of its work."""

    answer: str = ""
    verdict: Verdict | None = None


class Agent(Protocol):
    async def run(self, task: AgentTask) -> Report:
        """Cancelling ends it, or leaves it behind. Raises RolloutFailure."""
        ...


class FunctionAgent:
    """An async function runs in this event loop; another in a thread of its own, which is left behind when it hangs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - to be looked at, not called
        )
        self._names = taken_names(function)

    async def run(self, task: AgentTask) -> Report:
        arguments = {name: getattr(task, name) for name in self._names}
        try:
            if self._is_async:
                value = await self._function(**arguments)
            else:
                value = await in_thread(lambda: self._function(**arguments), name=dotted_name(self._function))
        except (RolloutFailure, RunError, Interrupted):
            raise
        except Exception as error:
            where = raised_at(error, self._function)
            raise DataFailure(
                f"agent {dotted_name(self._function)} raised {type(error).__name__}: {error} ({where})"
            ) from error
        return as_report(value, dotted_name(self._function))


def taken_names(function: Callable[..., Any]) -> list[str]:
    """Which parts of a task a function takes. Raises TypeError when it needs something else."""
    known = AgentTask.__struct_fields__
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return list(known)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    if unknown := sorted(set(needed) - set(known)):
        raise TypeError(f"{dotted_name(function)} needs {unknown}; an agent is given {', '.join(known)}")
    return [p.name for p in named if p.name in known]


async def in_thread(function: Callable[[], Any], *, name: str) -> Any:
    """What it returns. Its thread ends with the process: cancelling leaves it behind, and nothing waits for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def tell(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not done.done():
            set_outcome(outcome)

    def work() -> None:
        try:
            outcome, set_outcome = function(), done.set_result
        except BaseException as error:  # SystemExit too: an agent that exits has failed
            failure = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
            outcome, set_outcome = failure, done.set_exception
            if isinstance(error, StopIteration):
                outcome = RuntimeError(f"StopIteration: {error}")
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, set_outcome, outcome)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await done


class CommandAgent:
    """A process of its own, in a process group that is ended with it."""

    def __init__(self, command: Sequence[str], environment: Sequence[str] = ()) -> None:
        self._command = list(command)
        self._environment = environment

    async def run(self, task: AgentTask) -> Report:
        own = {name: value for name, value in child_environment(self._environment).items() if not _is_ours(name)}
        root = task.base_url.removesuffix("/v1")
        own |= {"OPENAI_BASE_URL": task.base_url, "OPENAI_API_KEY": task.api_key}
        own |= {"ANTHROPIC_BASE_URL": root, "ANTHROPIC_API_KEY": task.api_key}
        arguments = [argument.replace("{prompt}", task.prompt) for argument in self._command]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(Path(launch.__file__)), str(os.getpid()), *arguments),
            env=own,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        told = {"messages": task.messages, "tools": task.tools, "extra_info": task.extra_info, "model": task.model}
        try:
            _, output, complaint, code = await asyncio.gather(
                _write(process.stdin, msgspec.json.encode(told)),
                _read_end(process.stdout, MAX_OUTPUT),
                _read_end(process.stderr, MAX_COMPLAINT),
                process.wait(),
            )
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        if code:
            ended = f"exit code {code}" if code > 0 else signal.Signals(-code).name
            raise DataFailure(f"agent {self._command[0]} ended with {ended}: {complaint.decode(errors='replace')}")
        return _printed(output.decode(errors="replace"), self._command[0])


class ServiceAgent:
    """A service that plays one task per POST."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def run(self, task: AgentTask) -> Report:
        import httpx

        try:
            # Without a deadline of its own: the rollout's holds.
            async with httpx.AsyncClient(timeout=httpx.Timeout(None, connect=CONNECT_S)) as client:
                response = await client.post(
                    self._url, content=msgspec.json.encode(task), headers={"content-type": "application/json"}
                )
        except httpx.HTTPError as error:
            raise InfrastructureFailure(f"agent {self._url} did not answer: {type(error).__name__}: {error}") from error
        if not response.is_success:
            message = f"agent {self._url} answered {response.status_code}: {response.text[:MAX_COMPLAINT]}"
            raise (InfrastructureFailure if response.status_code >= 500 else DataFailure)(message)
        if not response.content:
            return Report()
        try:
            value = msgspec.json.decode(response.content)
        except msgspec.DecodeError as error:
            raise DataFailure(f"agent {self._url} answered what is no JSON: {error}") from None
        return as_report(value, self._url)


def as_report(value: Any, agent: str) -> Report:
    """Raises DataFailure for what is neither an answer nor a reward."""
    if value is None:
        return Report()
    if isinstance(value, str):
        return Report(answer=value)
    answer = ""
    if isinstance(value, dict):
        rest = {str(name): part for name, part in value.items()}
        answer = rest.pop("answer", "") or ""
        if not isinstance(answer, str):
            raise DataFailure(f"agent {agent} reported {type(answer).__name__} as its answer; it must be a text")
        if not rest.keys() & {"reward", "score"}:
            return Report(answer)
        value = rest | {"score": rest.pop("reward", rest.get("score"))}
    reply = as_reply(value)
    if "unjudged" in reply:
        raise DataFailure(f"agent {agent} {reply['unjudged']}", reason=FailureReason.UNJUDGED)
    return Report(answer, Verdict(reply["score"], reply["parts"], reply["text"]))


def _printed(output: str, agent: str) -> Report:
    lines = output.strip().splitlines()
    try:
        value = msgspec.json.decode(lines[-1]) if lines else None
    except msgspec.DecodeError:
        return Report(answer=output.strip())
    return as_report(value, agent) if isinstance(value, dict) else Report(answer=output.strip())


def _is_ours(name: str) -> bool:
    return name.startswith("PENSTOCK_")


async def _write(pipe: asyncio.StreamWriter, text: bytes) -> None:
    """All of it, unless nobody reads."""
    with contextlib.suppress(ConnectionError):
        pipe.write(text)
        await pipe.drain()
    with contextlib.suppress(ConnectionError):
        pipe.close()
        await pipe.wait_closed()


async def _read_end(pipe: asyncio.StreamReader, limit: int) -> bytes:
    """What a pipe brings until it closes; of more than the limit, the end."""
    chunks: deque[bytes] = deque()
    size = 0
    while chunk := await pipe.read(1 << 16):
        chunks.append(chunk)
        size += len(chunk)
        while size - len(chunks[0]) >= limit:
            size -= len(chunks.popleft())
    return b"".join(chunks)[-limit:]
