from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.ports import GenerateRequest
from penstock.produce import AsyncProduceStrategyConfig, ProduceContext
from penstock.produce.progress import ProduceProgress
from penstock.rollout import unpack_ids
from penstock.testing import EngineScript, ScriptedTask, ScriptedWorld


@pytest.fixture
def seconds() -> Callable[..., EngineScript]:
    """An engine that takes the given seconds for draw 0, 1, ... and `default` for the rest; one token a second."""

    def script(*lengths: int, default: int = 10, **rest: Any) -> EngineScript:
        def answers(request: GenerateRequest) -> Sequence[int]:
            draw = int(unpack_ids(request.prompt_ids)[1]) - 2
            return [97] * (lengths[draw] if draw < len(lengths) else default)

        return EngineScript(tokens_per_s=1.0, answers=answers, **rest)

    return script


@pytest.fixture
def asynchronous() -> Callable[..., ScriptedTask]:
    """A task with the asynchronous strategy; what is not a strategy's option is the task's."""

    def task(**options: Any) -> ScriptedTask:
        mine = {key: options.pop(key) for key in list(options) if key in ScriptedTask.__struct_fields__}
        config = AsyncProduceStrategyConfig(**options)
        config.check()
        return ScriptedTask(strategy=config, **mine)

    return task


@pytest.fixture
def context() -> Callable[..., ProduceContext]:
    """A context of the world's only task, with `due` groups due."""

    def build(
        world: ScriptedWorld,
        *,
        due: int = 0,
        size: int = 4,
        train_step: int = 1,
        model_step: int = 0,
        aborted: bool = False,
        progress: ProduceProgress | None = None,
    ) -> ProduceContext:
        runtime = world.manager.tasks["task"].runtime
        progress = progress or world.manager.progress
        progress.target_samples["task"] = due
        event = asyncio.Event()
        if aborted:
            event.set()
        return ProduceContext(
            runtime,
            progress=progress,
            task_batch_size=size,
            train_step=train_step,
            model_step=model_step,
            update_event=event,
            changed=world.buffer.changed,
        )

    return build
