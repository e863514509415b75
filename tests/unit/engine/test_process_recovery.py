"""Engine processes behind the controller: killed while they serve, while they are idle, and while they sleep."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest
from engine_contract import (
    LONG,
    CharacterTokenizer,
    Subject,
    ask,
    has_made,
    ids_of,
)
from engine_processes import kill, process_engine, run

from penstock.engine import EmbeddedEngineConfig, EnginesConfig, RolloutControllerConfig
from penstock.errors import (
    EngineUnavailable,
    InfrastructureFailure,
)
from penstock.events import EngineChanged, Event
from penstock.weights import WriterSettings, build_channel

LIMITS = RolloutControllerConfig(probe_interval_s=0.5, probe_retry_s=0.1, probe_timeout_s=30.0, recovery_retry_s=0.5)


class States:
    """What the controller says of each engine."""

    def __init__(self) -> None:
        self._now: dict[str, str] = {}

    def notice(self, event: Event) -> None:
        if isinstance(event, EngineChanged):
            self._now[event.engine] = event.state

    async def reach(self, name: str, *states: str) -> None:
        while self._now.get(name) not in states:  # noqa: ASYNC110 - seen from outside, as a user would
            await asyncio.sleep(0.01)

    async def fenced(self, name: str) -> None:
        async with asyncio.timeout(10):
            await self.reach(name, "fenced", "recovering")


@pytest.mark.long_tier
def test_killed_engines_are_fenced_their_work_is_done_elsewhere_and_they_return_with_the_current_weights(
    served_dir: Path, subjects: dict[str, Subject]
) -> None:
    subject = subjects["llama"]

    async def test() -> None:
        engines = {"one": process_engine(served_dir), "two": process_engine(served_dir)}
        states = States()
        controller = LIMITS.build(engines, observer=states)
        channel = build_channel(subject.other_weights, controller, WriterSettings(kind="shared_memory"))
        try:
            await controller.check_health()
            for name in engines:
                await states.reach(name, "active")
            await channel.publish(3)
            expected = await asyncio.gather(
                *(controller.generate(ask(f"{i}", seed=i, max_tokens=400)) for i in range(12))
            )
            made = (await controller.stats()).generated_tokens

            # While serving.
            asking = [asyncio.create_task(controller.generate(ask(f"{i}", seed=i, max_tokens=400))) for i in range(12)]
            await has_made(controller, made + 12)
            kill(engines["one"])
            await states.fenced("one")
            answers = await asyncio.gather(*asking)
            assert [ids_of(answer) for answer in answers] == [ids_of(answer) for answer in expected]
            await states.reach("one", "active")
            assert await engines["one"].model_step() == 3
            assert {step for answer in answers for step, _ in answer.steps} == {3}

            # While idle.
            kill(engines["two"])
            await states.fenced("two")
            assert (await controller.generate(ask("a", max_tokens=5))).steps == ((3, 5),)
            await states.reach("two", "active")
            assert await engines["two"].model_step() == 3
        finally:
            await controller.close()
            await channel.close()
        assert all(engine.pid is None for engine in engines.values())

    run(test)


@pytest.mark.long_tier
def test_when_the_last_engine_is_gone_and_cannot_return_the_error_names_every_engine(
    served_dir: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(served_dir, directory)

    async def test() -> None:
        engines = {"one": process_engine(directory), "two": process_engine(directory)}
        states = States()
        controller = LIMITS.build(engines, observer=states)
        try:
            await controller.check_health()
            for name in engines:
                await states.reach(name, "active")
            (directory / "model.safetensors").write_bytes(b"gone")
            asking = asyncio.create_task(controller.generate(ask("a", max_tokens=LONG)))
            await has_made(controller, 1)
            for engine in engines.values():
                kill(engine)
            with pytest.raises(EngineUnavailable) as error:
                await asking
            for name in engines:
                assert f"{name} is fenced: " in str(error.value)
            with pytest.raises(EngineUnavailable):
                await controller.generate(ask("b"))
            with pytest.raises(InfrastructureFailure, match="no engine is active"):
                await controller.check_health()
        finally:
            await controller.close()

    run(test)


@pytest.mark.long_tier
def test_a_colocated_engine_killed_asleep_or_serving_is_restarted_with_the_current_weights(
    served_dir: Path, tmp_path: Path, subjects: dict[str, Subject]
) -> None:
    subject = subjects["llama"]
    states = States()
    config = EnginesConfig(engine=EmbeddedEngineConfig(process=True, max_running=6), controller=LIMITS)
    controller = config.build(str(served_dir), CharacterTokenizer(), threads=1, observer=states)
    channel = config.build_channel(subject.other_weights, controller, run_dir=tmp_path)
    name = "engine-0"

    async def turn(step: int, *, kill_asleep: bool) -> None:
        """The engine gives its memory to the trainer, and comes back with the weights of this step."""
        await controller.pause_generation()
        await controller.sleep()
        if kill_asleep:
            kill_process(pid_of_the_engine())
            await states.reach(name, "fenced", "recovering")
            await states.reach(name, "active")
        await channel.publish(step)
        await controller.wake()
        await controller.continue_generation()
        answers = await asyncio.gather(*(controller.generate(ask(f"{i}", max_tokens=6)) for i in range(8)))
        assert {answer.steps for answer in answers} == {((step, 6),)}

    async def test() -> None:
        try:
            await controller.check_health()
            await turn(1, kill_asleep=False)
            await turn(2, kill_asleep=True)
            made = (await controller.stats()).generated_tokens
            asking = [asyncio.create_task(controller.generate(ask(f"{i}", seed=i, max_tokens=400))) for i in range(8)]
            await has_made(controller, made + 8)
            kill_process(pid_of_the_engine())
            assert {answer.steps for answer in await asyncio.gather(*asking)} == {((2, 400),)}
            await turn(3, kill_asleep=False)
        finally:
            await controller.close()
            await channel.close()

    run(test)


def pid_of_the_engine() -> int:
    (engine,) = [child.pid for child in psutil.Process().children() if "penstock.engine.server" in child.cmdline()]
    return engine


def kill_process(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
