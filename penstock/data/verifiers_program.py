"""The program that has verifiers: says which tasks a taskset has, and plays them against an endpoint.

    python -P verifiers_program.py <descriptor of a socket> <process id of the parent>

It runs in an environment that has verifiers and no Penstock, and speaks lines of JSON:

    in   {"taskset": {...}, "agent": {...}, "first": 0, "size": null, "directory": "."}     once, before all
    out  {"tasks": [{"key": ..., "messages": [...]}, ...]}, or {"refused": why}
    in   {"play": number, "key": of the task, "base_url": ..., "api_key": ..., "model": ...}
    in   {"cancel": number}
    out  {"played": number, "report": {...}}, or {"played": number, "failed": why, "infrastructure": whether}

It ends when its input does.
"""

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

LINE_LIMIT = 1 << 28
INFRASTRUCTURE = ("InterceptionError", "SandboxError", "TunnelError")


def beside(name: str) -> ModuleType:
    """A module of Penstock that needs nothing but the standard library."""
    spec = importlib.util.spec_from_file_location(f"penstock_{name}", Path(__file__).parents[1] / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Player:
    """A taskset with its agent. Raises whatever verifiers does with settings that it refuses."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from verifiers.v1.envs.single_agent import SingleAgentEnv
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        self.config = resolve_env_config({"taskset": settings["taskset"], "agent": settings["agent"]})
        self.env = load_environment(self.config)
        if type(self.env) is not SingleAgentEnv:
            raise ValueError(f"{type(self.env).__name__} has agents of its own; one agent is played")
        chosen = self.env.taskset.skip(settings["first"])
        if settings["size"] is not None:
            chosen = chosen.take(settings["size"])
        elif not chosen.bounded:
            raise ValueError(f"{type(self.env.taskset).__name__} has no end; give size")
        self.tasks = {task.key: task for task in chosen}

    def listed(self) -> list[dict[str, Any]]:
        return [{"key": key, "messages": _messages(task.data)} for key, task in self.tasks.items()]

    async def play(self, order: dict[str, Any], tools: Any) -> dict[str, Any]:
        import verifiers.v1 as vf

        # verifiers takes keys from the environment, and keeps variables of such a name from what its agents start.
        variable = f"PENSTOCK_API_KEY_{order['play']}"
        os.environ[variable] = order["api_key"]
        try:
            agent = vf.Agent(
                self.config.agent.model_copy(
                    update={
                        "harness": self.config.agent_harnesses()["agent"],
                        "model": order["model"],
                        "client": vf.EvalClientConfig(base_url=order["base_url"], api_key_var=variable),
                    }
                )
            )
            trace = await agent.run(self.tasks[order["key"]], tools=tools)
        finally:
            del os.environ[variable]
        if not trace.ok:
            error = trace.last_error
            why = f"{error.type}: {error.message}" if error is not None else str(trace.stop_condition)
            return {"failed": why, "infrastructure": error is not None and error.type in INFRASTRUCTURE}
        if not any(reward is not None for reward in trace.rewards.values()):
            return {"failed": "the task gave no reward", "infrastructure": False}
        parts = {name: value for name, value in trace.metrics.items() if value is not None}
        parts |= {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        return {"report": parts | {"answer": trace.last_reply, "reward": trace.reward}}


def _messages(data: Any) -> list[dict[str, str]]:
    """What the task says first, as far as it is text. One whose user begins is shown by its name."""
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    text = data.prompt_text if data.prompt is not None else data.description or data.name or f"task {data.idx}"
    return [*system, {"role": "user", "content": text}]


class Speaker:
    """Plays what it is told to, all at once."""

    def __init__(self, player: Player, writer: asyncio.StreamWriter) -> None:
        self._player = player
        self._writer = writer
        self._playing: dict[int, asyncio.Task[None]] = {}

    async def listen(self, reader: asyncio.StreamReader) -> None:
        async with self._player.env.shared_tools() as tools:
            try:
                while line := await reader.readline():
                    order = json.loads(line)
                    if "cancel" in order:
                        if (playing := self._playing.get(order["cancel"])) is not None:
                            playing.cancel()
                    else:
                        self._playing[order["play"]] = asyncio.create_task(self._play(order, tools))
            finally:
                for playing in self._playing.values():
                    playing.cancel()
                await asyncio.gather(*self._playing.values(), return_exceptions=True)

    async def _play(self, order: dict[str, Any], tools: Any) -> None:
        try:
            outcome = await self._player.play(order, tools)
        except Exception as error:
            outcome = {"failed": f"{type(error).__name__}: {error}", "infrastructure": False}
        finally:
            del self._playing[order["play"]]
        say(self._writer, {"played": order["play"], **outcome})


def say(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
    writer.write(json.dumps(value).encode() + b"\n")


async def main(channel: Any) -> None:
    reader, writer = await asyncio.open_connection(sock=channel, limit=LINE_LIMIT)
    settings = json.loads(await reader.readline())
    sys.path.insert(0, settings["directory"])
    try:
        player = Player(settings)
        tasks = player.listed()
    except Exception as error:  # whatever a taskset raises
        say(writer, {"refused": f"{type(error).__name__}: {error}"})
    else:
        say(writer, {"tasks": tasks})
        await writer.drain()
        await Speaker(player, writer).listen(reader)
    writer.close()


if __name__ == "__main__":
    asyncio.run(main(beside("child").socket_to_parent(int(sys.argv[1]), int(sys.argv[2]))))
