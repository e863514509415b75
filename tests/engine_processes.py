"""Engines in processes of their own, for tests."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
from engine_contract import CharacterTokenizer

from penstock.engine import EmbeddedEngineConfig
from penstock.engine.process import ProcessEngine

DEADLINE = 120.0
"""For a whole test with real processes, which take seconds to import torch on a busy machine."""


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE):
            await test()

    asyncio.run(bounded())


def process_engine(directory: Path) -> ProcessEngine:
    config = EmbeddedEngineConfig(max_running=6, prefill_chunk_tokens=64, process=True)
    engine = config.build(str(directory), CharacterTokenizer(), threads=1)
    assert isinstance(engine, ProcessEngine)
    return engine


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def kill(engine: ProcessEngine) -> None:
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)


def engines_of(trainer: int) -> list[int]:
    """The processes of the engines that this trainer started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:  # it ended meanwhile
            continue
        if b"penstock.engine.server" in command and command.endswith(f"{trainer}\0".encode()):
            found.append(int(path.parent.name))
    return found
