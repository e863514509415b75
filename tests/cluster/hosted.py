"""Objects that tests put into actors."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncGenerator
from typing import Any

from penstock import errors
from penstock.agent_loop import AgentLoop
from penstock.ports import Completion, Engine, GenerateRequest, Judger
from penstock.rollout import FailureReason, FinishReason, RolloutState, Unjudged, Verdict


class Length(Judger):
    """The length of the answer; some answers have an effect."""

    def __init__(self, unit: float = 1.0) -> None:
        self.unit = unit
        self.judged = 0

    async def judge(self, rollout: RolloutState) -> Verdict | Unjudged:
        text = rollout.response_text
        if text.startswith("raise "):
            raise make_error(text.removeprefix("raise "))
        if text == "foreign":
            raise Foreign("of a class", "that needs two words")
        if text == "wait":
            await asyncio.sleep(3600)
        if text == "die":
            os._exit(1)
        self.judged += 1
        return Verdict(self.unit * len(text), {"pid": float(os.getpid())})

    async def metrics(self) -> dict[str, float]:
        return {"calls": float(self.judged), "max_latency_s": float(self.judged)}


class Odd(Judger):
    async def judge(self, rollout: RolloutState) -> Verdict | Unjudged:
        logging.getLogger("penstock.odd").warning("this is odd")
        return Unjudged("odd")


class Relay:
    """An engine that asks another one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class Foreign(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def make_error(name: str) -> Exception:
    kind = getattr(errors, name)
    if issubclass(kind, errors.RolloutFailure):
        return kind("it failed", reason=FailureReason.TOOL_DEADLINE)
    if issubclass(kind, errors.RefusedError):
        return kind(["first\nof two lines", "second"])
    return kind("it failed")


class Echo:
    """An engine that answers with what it was asked, token by token."""

    async def generate(self, request: GenerateRequest) -> Completion:
        return _completion(request.prompt_ids, FinishReason.STOP)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
        ids = request.prompt_ids
        for start in range(0, len(ids), 4):
            yield _completion(ids[start : start + 4], None)
        yield _completion(b"", FinishReason.STOP)

    async def score(self, ids: bytes) -> bytes:
        return bytes(len(ids) - 4)

    async def model_step(self) -> int:
        return 7


def _completion(ids: bytes, reason: FinishReason | None) -> Completion:
    n = len(ids) // 4
    return Completion(ids=ids, logprobs=bytes(4 * n), finish_reason=reason, steps=((0, n),) if n else ())


class Talkative(AgentLoop):
    """Two turns, and where it was played."""

    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        await self.generate(rollout)
        await self.generate(rollout)
        return rollout


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
