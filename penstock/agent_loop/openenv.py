"""Environments that speak OpenEnv: a client with `reset` and `step`, async or not, in front of a server.

    EnvAgentLoopConfig(
        env=OpenEnv,
        env_arguments={"client": "echo_env:EchoEnv", "base_url": "http://localhost:8000", "action": "my_run:action"},
    )

`client` is the client's class, made with `base_url`; `action` makes an action of the model's words; `say` makes
messages of an observation. They are named, so that the configuration is plain data.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
from typing import Any

from penstock.config import import_name


class OpenEnv:
    def __init__(self, client: str, base_url: str, action: str | None = None, say: str | None = None) -> None:
        self._client = import_name(client)(base_url=base_url)
        self._action = import_name(action) if action is not None else _message
        self._say = import_name(say) if say is not None else _shown

    async def reset(self, row: dict[str, Any]) -> Any:
        """`extra_info["reset"]` of the row are the keyword arguments of the client's own."""
        result = await _called(self._client.reset, **row["extra_info"].get("reset", {}))
        return self._say(result.observation)

    async def step(self, answer: str) -> tuple[Any, float, bool]:
        result = await _called(self._client.step, self._action(answer))
        return self._say(result.observation), float(result.reward or 0.0), bool(result.done)

    async def close(self) -> None:
        await _called(self._client.close)


async def _called(method: Any, *values: Any, **named: Any) -> Any:
    """Awaited where it is async; in a thread where it would block."""
    if inspect.iscoroutinefunction(method):
        return await method(*values, **named)
    return await asyncio.to_thread(method, *values, **named)


def _message(answer: str) -> dict[str, str]:
    return {"message": answer}


def _shown(observation: Any) -> str:
    """A text as it is, anything else as JSON."""
    if isinstance(observation, str):
        return observation
    if hasattr(observation, "model_dump"):
        observation = observation.model_dump()
    elif dataclasses.is_dataclass(observation) and not isinstance(observation, type):
        observation = dataclasses.asdict(observation)
    return json.dumps(observation, default=str, ensure_ascii=False)
