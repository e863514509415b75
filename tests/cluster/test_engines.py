"""Engines in actors, behind the controller in an actor: the contract of all engines, and what dies comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_contract import (
    CONTRACT,
    AsNew,
    CharacterTokenizer,
    Subject,
    Tensors,
    ask,
    closing_fails_what_is_pending_and_all_that_comes_later,
    has_requests,
    ids_of,
)
from engine_models import make_subject, write_model, write_tokenizer
from ray.cluster_utils import Cluster
from transformers import AutoModelForCausalLM

from penstock.cluster.door import ActorEngine
from penstock.cluster.engines import EngineActors, RayEngines
from penstock.cluster.launcher import CPUActorLauncher
from penstock.cluster.session import Session, connect
from penstock.cluster.site import RaySite
from penstock.engine import EmbeddedEngineConfig, EnginesConfig, RolloutControllerConfig
from penstock.errors import ConfigError, EngineUnavailable
from penstock.events import ActorLost, ActorRecovered, EngineChanged, Event
from penstock.resources import RunResourcesConfig, WorkerResourcesConfig
from penstock.weights import WriterSettings, build_channel

MiB = 1 << 20
DEADLINE = 120.0
SMALL = RunResourcesConfig(engines=WorkerResourcesConfig(num_cpus_per_worker=0.5, cpu_memory_per_worker=600 * MiB))


class Told:
    """The events of recovery, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.changed = asyncio.Event()

    def notice(self, event: Event) -> None:
        if isinstance(event, ActorLost | ActorRecovered | EngineChanged):
            self.events.append(event)
            self.changed.set()

    @property
    def story(self) -> list[str]:
        """One word for each, without those of an engine's end."""
        words = []
        for event in self.events:
            if isinstance(event, EngineChanged):
                words.append(f"{event.engine} {event.state}")
            else:
                assert isinstance(event, ActorLost | ActorRecovered)
                words.append(f"{event.actor} {'lost' if isinstance(event, ActorLost) else 'recovered'}")
        return words

    def of(self, name: str) -> list[str]:
        return [word.removeprefix(f"{name} ") for word in self.story if word.startswith(f"{name} ")]

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE):
            while not reached():
                self.changed.clear()
                await self.changed.wait()


class Asked:
    """What a site is asked for by a trainer, as far as engines are concerned."""

    def __init__(self, engines: EnginesConfig, model_dir: Path) -> None:
        self.engines = engines
        self.resources = SMALL
        self.deterministic = False
        self.cpu_threads = 1
        self.model_dir = model_dir
        self.tokenizer = CharacterTokenizer()
        self.config = self
        self.run_dir = None


def context(model_dir: Path, num_engines: int = 1, **limits: Any) -> Any:
    engine = EmbeddedEngineConfig(max_running=6, prefill_chunk_tokens=64, process=True)
    config = EnginesConfig(engine=engine, num_engines=num_engines, controller=RolloutControllerConfig(**limits))
    return Asked(config, model_dir)


def build(session: Session, run: Any, told: Any) -> RayEngines:
    engines = RaySite(session, observer=told).build_engines(run)
    assert isinstance(engines, RayEngines)
    return engines


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("served") / "llama"
    write_model("llama", directory)
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir).eval()


@pytest.fixture(scope="module")
def one_loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="class", params=["controller", "engine"])
def running(
    request: pytest.FixtureRequest, cluster: Cluster, model_dir: Path, one_loop: asyncio.Runner
) -> Iterator[Any]:
    """The controller in front of one engine, and an engine without it; one of each for all checks."""
    with connect(cluster.address, name="contract") as session:
        if request.param == "controller":
            engines = build(session, context(model_dir), Told())
            yield engines
            one_loop.run(engines.close())
        else:
            actors = EngineActors(CPUActorLauncher(session), context(model_dir))
            actors.wait()
            (alone,) = actors.addresses
            yield ActorEngine(alone, actors)  # type: ignore[arg-type]
            one_loop.run(actors.end_all())


WITHOUT_CLOSING = [check for check in CONTRACT if check is not closing_fails_what_is_pending_and_all_that_comes_later]


class TestTheContract:
    """A class of its own, so that its connection is closed before the next test opens one."""

    @pytest.mark.parametrize("check", WITHOUT_CLOSING, ids=lambda check: check.__name__)
    def test_it_holds_for_an_actor(
        self,
        check: Callable[[Subject], Awaitable[None]],
        model_dir: Path,
        reference: Any,
        running: Any,
        one_loop: asyncio.Runner,
    ) -> None:
        inner = make_subject(model_dir, reference)
        reused = AsNew(running, Tensors(reference.state_dict()))
        subject = Subject(make=reused.again, other_weights=inner.other_weights, reference=inner.reference)  # type: ignore[arg-type]

        async def bounded() -> None:
            async with asyncio.timeout(DEADLINE):
                await running.check_health()
                await check(subject)

        one_loop.run(bounded())


# What dies comes back.


async def pid_of(engines: RayEngines, name: str) -> int:
    (address,) = [address for address in engines.addresses if address.name == name]
    return (await address.member.identify()).pid


def play(session: Session, run: Any, test: Callable[[RayEngines, Told], Awaitable[None]]) -> list[str]:
    """Plays `test` when all engines serve. Returns the events from then to its end."""
    told = Told()
    engines = build(session, run, told)
    story: list[str] = []

    async def main() -> None:
        try:
            async with asyncio.timeout(2 * DEADLINE):
                await engines.check_health()
                await told.until(lambda: len(told.story) >= run.engines.num_engines)
                assert {word.split()[1] for word in told.story} == {"active"}, "starting is no recovery"
                told.events.clear()
                await test(engines, told)
                story.extend(told.story)
        finally:
            await engines.close()

    asyncio.run(main())
    return story


async def ask_all(engines: RayEngines, count: int, **params: Any) -> list[Any]:
    return await asyncio.gather(*(engines.generate(ask(f"{i}", seed=i, **params)) for i in range(count)))


def test_without_a_kill_nothing_is_recovered(session: Session, model_dir: Path) -> None:
    async def test(engines: RayEngines, told: Told) -> None:
        answers = await ask_all(engines, 12)
        assert all(len(ids_of(answer)) == 12 for answer in answers)
        assert [member.state for member in await engines.members()] == ["active", "active"]

    assert play(session, context(model_dir, num_engines=2), test) == []


def test_an_engine_killed_while_it_serves_comes_back_with_the_published_weights(
    session: Session, model_dir: Path, reference: Any
) -> None:
    other = make_subject(model_dir, reference).other_weights

    async def test(engines: RayEngines, told: Told) -> None:
        channel = build_channel(other, engines, WriterSettings(kind="shared_memory"))
        await channel.publish(3)
        expected = [ids_of(answer) for answer in await ask_all(engines, 8, max_tokens=200)]
        asking = asyncio.create_task(ask_all(engines, 8, max_tokens=200))
        await has_requests(engines, 8)
        os.kill(await pid_of(engines, "engine-0"), signal.SIGKILL)
        answers = await asking
        assert [ids_of(answer) for answer in answers] == expected
        assert all(answer.steps == ((3, 200),) for answer in answers)
        await told.until(lambda: told.of("engine-0")[-1:] == ["active"])
        await engines.drain_engine("engine-1")
        answers = await ask_all(engines, 4, max_tokens=200)
        assert [ids_of(answer) for answer in answers] == expected[:4], "the one that came back has these weights too"
        assert {step for answer in answers for step, _ in answer.steps} == {3}
        await channel.close()

    story = play(session, context(model_dir, num_engines=2), test)
    assert sorted(story[:-2]) == sorted(
        [
            "engine-0 lost",
            "engine-0 fenced",
            "engine-0 recovering",
            "engine-0 recovered",
            "engine-0 active",
        ]
    )
    assert story[-2:] == ["engine-1 draining", "engine-1 left"]


@pytest.mark.soak_tier
def test_an_idle_engine_that_is_killed_comes_back_by_itself(session: Session, model_dir: Path) -> None:
    async def test(engines: RayEngines, told: Told) -> None:
        os.kill(await pid_of(engines, "engine-0"), signal.SIGKILL)
        await told.until(lambda: told.of("engine-0")[-1:] == ["active"])
        assert all(answer.steps == ((0, 12),) for answer in await ask_all(engines, 4))

    story = play(session, context(model_dir), test)
    assert [word for word in story if "lost" not in word and "recovered" not in word] == [
        "engine-0 fenced",
        "engine-0 recovering",
        "engine-0 active",
    ]
    assert [word for word in story if "lost" in word or "recovered" in word] == ["engine-0 lost", "engine-0 recovered"]


@pytest.mark.soak_tier
def test_an_engine_that_hangs_is_killed_and_comes_back(session: Session, model_dir: Path) -> None:
    async def test(engines: RayEngines, told: Told) -> None:
        before = await pid_of(engines, "engine-0")
        os.kill(before, signal.SIGSTOP)
        await told.until(lambda: told.of("engine-0")[-1:] == ["active"])
        assert await pid_of(engines, "engine-0") != before
        assert all(answer.steps == ((0, 12),) for answer in await ask_all(engines, 4))

    story = play(session, context(model_dir, probe_timeout_s=1.0, probe_interval_s=0.5), test)
    assert [word for word in story if "lost" not in word and "recovered" not in word] == [
        "engine-0 fenced",
        "engine-0 recovering",
        "engine-0 active",
    ]


def test_a_killed_controller_is_followed_by_another_and_no_answer_is_lost(
    session: Session, model_dir: Path, reference: Any
) -> None:
    other = make_subject(model_dir, reference).other_weights

    async def test(engines: RayEngines, told: Told) -> None:
        async def found_both(times: int) -> None:
            # A controller that is killed before it has looked at an engine, or before its word has come, says nothing.
            await told.until(lambda: all(told.of(name) == ["active"] * times for name in ("engine-0", "engine-1")))

        channel = build_channel(other, engines, WriterSettings(kind="shared_memory"))
        await channel.publish(5)
        expected = [ids_of(answer) for answer in await ask_all(engines, 8, max_tokens=200)]
        asking = asyncio.create_task(ask_all(engines, 8, max_tokens=200))
        await has_requests(engines, 8)
        os.kill((await engines.controller.identify()).pid, signal.SIGKILL)
        answers = await asking
        assert [ids_of(answer) for answer in answers] == expected
        assert all(answer.steps == ((5, 200),) for answer in answers)
        assert await engines.model_step() == 5
        await found_both(1)
        # Paused, it is followed by one that is paused.
        await engines.pause_generation()
        os.kill((await engines.controller.identify()).pid, signal.SIGKILL)
        answer = await engines.generate(ask("late"))
        assert not answer.ids
        await channel.publish(6)
        await engines.continue_generation()
        assert {answer.steps for answer in await ask_all(engines, 4)} == {((6, 12),)}
        await found_both(2)
        await channel.close()

    story = play(session, context(model_dir, num_engines=2), test)
    assert [word for word in story if word.startswith("rollout-controller")] == [
        "rollout-controller lost",
        "rollout-controller recovered",
    ] * 2
    for name in ("engine-0", "engine-1"):
        assert [word for word in story if word.startswith(name)] == [f"{name} active"] * 2, "they went on serving"


def test_a_model_that_cannot_be_loaded_is_told_as_what_it_is(session: Session, model_dir: Path, tmp_path: Path) -> None:
    directory = tmp_path / "broken"
    write_tokenizer(directory)
    (directory / "config.json").write_text((model_dir / "config.json").read_text())
    (directory / "model.safetensors").write_bytes(b"nothing")
    told = Told()
    engines = build(session, context(directory), told)

    async def main() -> None:
        try:
            with pytest.raises(EngineUnavailable, match=r"engine-0 is fenced: .*cannot be loaded"):
                await engines.generate(ask("x"))
        finally:
            await engines.close()

    asyncio.run(main())


@pytest.mark.soak_tier
def test_engines_join_where_there_is_room_and_are_refused_where_there_is_none(
    session: Session, model_dir: Path
) -> None:
    async def test(engines: RayEngines, told: Told) -> None:
        assert await engines.add_engine() == "engine-1"
        assert [member.state for member in await engines.members()] == ["active", "active"]
        await engines.drain_engine("engine-0")
        assert all(answer.steps == ((0, 12),) for answer in await ask_all(engines, 4))
        # Three nodes of 4 CPUs, one of which has the controller: where engine-0 was there is room for one more.
        assert await engines.add_engine() == "engine-2"
        with pytest.raises(ConfigError, match="engines: a worker needs 4 CPU"):
            await engines.add_engine()
        assert [member.name for member in await engines.members()] == ["engine-1", "engine-2"]

    large = context(model_dir)
    large.resources = RunResourcesConfig(
        engines=WorkerResourcesConfig(num_cpus_per_worker=4, cpu_memory_per_worker=600 * MiB)
    )
    assert play(session, large, test)[:2] == ["engine-1 recovering", "engine-1 active"]
