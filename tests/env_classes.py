"""Environments for tests, where worker processes can import them."""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import Any


class Counts:
    """Three steps: says how many there were, and what it was told at first."""

    def __init__(self, steps: int = 3) -> None:
        self.steps = steps
        self.done = 0

    def reset(self, row: dict[str, Any]) -> Any:
        self.row = row
        return row["extra_info"].get("begins")

    def step(self, answer: str) -> Any:
        self.done += 1
        return f"{self.done}:{answer}", self.done / 10, self.done == self.steps


class CountsAsync:
    def __init__(self, steps: int = 3) -> None:
        self.inner = Counts(steps)

    async def reset(self, row: dict[str, Any]) -> Any:
        return self.inner.reset(row)

    async def step(self, answer: str) -> Any:
        await asyncio.sleep(0.5)
        return self.inner.step(answer)


class Says:
    """Whatever it was made with."""

    def __init__(self, step: Any) -> None:
        self.said = step

    async def reset(self, row: dict[str, Any]) -> None:
        return

    async def step(self, answer: str) -> Any:
        return self.said


class Breaks(Counts):
    def step(self, answer: str) -> Any:
        raise RuntimeError("no more")


class Hangs(Counts):
    """At the answer `hang`."""

    def step(self, answer: str) -> Any:
        if answer == "hang":
            time.sleep(3600)
        return super().step(answer)


class Dies(Counts):
    def step(self, answer: str) -> Any:
        os._exit(3)


class Forgets(CountsAsync):
    """Says something else every time."""

    async def step(self, answer: str) -> Any:
        said, reward, done = await super().step(answer)
        return said + str(random.random()), reward, done


class Mixed(Counts):
    async def step(self, answer: str) -> Any:
        return super().step(answer)


class NoStep:
    def reset(self, row: dict[str, Any]) -> None:
        return


class EchoResult:
    def __init__(self, observation: Any, reward: float | None, done: bool) -> None:
        self.observation = observation
        self.reward = reward
        self.done = done


class EchoClient:
    """As clients of OpenEnv are: made with a URL, async, results with observation, reward, done."""

    closed = 0

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.steps = 0

    async def reset(self, **options: Any) -> EchoResult:
        return EchoResult({"prompt": f"Say something to {self.base_url}", **options}, None, False)

    async def step(self, action: dict[str, str]) -> EchoResult:
        self.steps += 1
        return EchoResult(action["message"] + "!", 0.5, self.steps == 2)

    async def close(self) -> None:
        EchoClient.closed += 1


class PlainEchoClient:
    """The same without async, as older ones are."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    def reset(self) -> EchoResult:
        return EchoResult("Hello.", None, False)

    def step(self, action: str) -> EchoResult:
        return EchoResult(action, 1.0, True)

    def close(self) -> None:
        return


def shouted(answer: str) -> str:
    return answer.upper()


def asked(observation: Any) -> str:
    return observation["prompt"] if isinstance(observation, dict) else str(observation)
