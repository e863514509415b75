"""The engine in a process of its own: the contract, and what happens to the process."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_contract import (
    CONTRACT,
    LONG,
    AsNew,
    CharacterTokenizer,
    Subject,
    Tensors,
    ask,
    closing_fails_what_is_pending_and_all_that_comes_later,
    has_made,
    ids_of,
)
from engine_processes import is_gone, process_engine, run

from penstock.engine import EmbeddedEngineConfig
from penstock.engine.frames import Setup
from penstock.engine.process import ProcessEngine
from penstock.errors import (
    InfrastructureFailure,
    ModelError,
    WeightSyncError,
)
from penstock.rollout import FinishReason
from penstock.weights import WriterSettings, build_channel


@pytest.fixture(scope="module")
def one_loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def shared_process(served_dir: Path, one_loop: asyncio.Runner) -> Iterator[ProcessEngine]:
    engine = process_engine(served_dir)
    yield engine
    one_loop.run(engine.close())


@pytest.mark.parametrize(
    "check",
    [check for check in CONTRACT if check is not closing_fails_what_is_pending_and_all_that_comes_later],
    ids=lambda check: check.__name__,
)
def test_the_contract_holds_for_a_process_of_its_own(
    check: Callable[[Subject], Awaitable[None]],
    subjects: dict[str, Subject],
    references: dict[str, Any],
    one_loop: asyncio.Runner,
    shared_process: ProcessEngine,
) -> None:
    inner = subjects["llama"]
    reused = AsNew(shared_process, Tensors(references["llama"].state_dict()))
    subject = Subject(
        make=reused.again,  # type: ignore[arg-type]
        other_weights=inner.other_weights,
        reference=inner.reference,
    )
    one_loop.run(check(subject))


def test_closing_a_process_fails_what_is_pending_and_all_that_comes_later(
    served_dir: Path, subjects: dict[str, Subject]
) -> None:
    inner = subjects["llama"]
    subject = Subject(
        make=lambda: process_engine(served_dir), other_weights=inner.other_weights, reference=inner.reference
    )
    asyncio.run(closing_fails_what_is_pending_and_all_that_comes_later(subject))


def test_an_engine_in_its_own_process_answers_as_the_one_in_this(
    served_dir: Path, subjects: dict[str, Subject]
) -> None:
    subject = subjects["llama"]

    async def test() -> None:
        here, there = subject.make(), process_engine(served_dir)
        try:
            for step in (0, 5):
                if step:
                    for engine in (here, there):
                        await engine.load_weights(subject.other_weights, step)
                asked = [ask(f"{i}", seed=i, max_tokens=20, stop=("ab", "c")) for i in range(8)]
                ours = await asyncio.gather(*(here.generate(request) for request in asked))
                theirs = await asyncio.gather(*(there.generate(request) for request in asked))
                assert [ids_of(completion) for completion in ours] == [ids_of(completion) for completion in theirs]
                assert {step for completion in theirs for step, _ in completion.steps} == {step}
            waiting = [asyncio.create_task(there.generate(ask(f"{i}", max_tokens=LONG))) for i in range(256)]
            await has_made(there, 1000)
            await there.pause_generation()
            completions = await asyncio.gather(*waiting)
            assert {completion.finish_reason for completion in completions} == {FinishReason.ABORT}
            pid = there.pid
        finally:
            await here.close()
            await there.close()
        assert pid is not None and is_gone(pid)
        with pytest.raises(InfrastructureFailure, match="closed"):
            await there.generate(ask("late"))

    run(test)


def test_weights_reach_a_process_through_memory_and_through_files(
    served_dir: Path, tmp_path: Path, subjects: dict[str, Subject]
) -> None:
    weights = subjects["llama"].other_weights

    async def test() -> None:
        engine = process_engine(served_dir)
        bound = Changing({})
        shared, disk = (
            build_channel(bound, engine, WriterSettings(kind="shared_memory")),
            build_channel(bound, engine, WriterSettings(kind="disk", directory=str(tmp_path / "weights"))),
        )
        try:
            for step, channel in enumerate((shared, disk, shared, shared), start=1):
                bound.state = {name: tensor * (1 + step / 8) for name, tensor in weights.state.items()}
                published = await channel.publish(step)
                assert (published.model_step, await engine.model_step()) == (step, step)
                assert published.num_bytes == sum(tensor.nbytes for tensor in weights.state.values())
                assert published.seconds > 0
                assert (await engine.generate(ask("a", max_tokens=4))).steps == ((step, 4),)
            name = next(iter(weights.state))
            bound.state = {name: weights.state[name]}
            with pytest.raises(WeightSyncError, match="kept"):
                await shared.publish(9)
            assert await engine.model_step() == 4
        finally:
            await shared.close()
            await engine.close()

    run(test)


class Changing:
    """Weights as a train worker has them: the same object, other numbers after each step."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def tensors(self) -> Iterator[tuple[str, Any]]:
        yield from self.state.items()


def open_segments() -> set[int]:
    """Of shared memory for weights, by inode."""
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return {path.stat().st_ino for path in links if "penstock-weights" in str(path.readlink())}


def test_weights_without_a_channel_use_the_same_memory_in_turn(served_dir: Path, subjects: dict[str, Subject]) -> None:
    weights = subjects["llama"].other_weights

    async def test() -> None:
        engine, segments, of_others = process_engine(served_dir), set(), open_segments()
        try:
            for step in range(1, 6):
                await engine.load_weights(weights, step)
                segments |= open_segments()
        finally:
            await engine.close()
        assert len(segments - of_others) == 2

    run(test)


@pytest.mark.long_tier
def test_a_killed_process_fails_what_it_owes_and_can_be_restarted(served_dir: Path) -> None:
    async def test() -> None:
        engine = process_engine(served_dir)
        try:
            asking = [asyncio.create_task(engine.generate(ask(f"{i}", max_tokens=LONG))) for i in range(20)]
            await has_made(engine, 20)
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            for outcome in await asyncio.gather(*asking, return_exceptions=True):
                assert isinstance(outcome, InfrastructureFailure)
                assert outcome.reason == "engine_died"
                assert "SIGKILL" in str(outcome)
            with pytest.raises(InfrastructureFailure, match="SIGKILL"):
                await engine.check_health()
            await engine.restart()
            await engine.check_health()
            assert await engine.model_step() == 0
            assert len(ids_of(await engine.generate(ask("a", max_tokens=7)))) == 7
        finally:
            await engine.close()

    run(test)


def test_a_model_that_cannot_be_loaded_is_refused_with_the_processs_own_words(served_dir: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(served_dir, broken)
    (broken / "model.safetensors").write_bytes(b"not weights")

    async def test() -> None:
        engine = process_engine(broken)
        try:
            outcomes = await asyncio.gather(engine.check_health(), engine.generate(ask("a")), return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [ModelError, ModelError]
            assert str(broken) in str(outcomes[0])
            with pytest.raises(ModelError):
                await engine.check_health()
        finally:
            await engine.close()

    run(test)


def test_a_process_that_does_not_start_in_time_is_killed(served_dir: Path) -> None:
    async def test() -> None:
        setup = Setup(config={}, model_dir=str(served_dir), stop_ids=())
        engine = ProcessEngine(setup, start_timeout_s=0.05)
        asking = asyncio.create_task(engine.check_health())
        with pytest.raises(InfrastructureFailure, match=r"within 0.05 s") as failure:
            await asking
        assert failure.value.reason == "engine_start_deadline"
        assert engine.pid is not None and is_gone(engine.pid)
        await engine.close()

    run(test)


def test_closing_while_the_process_starts_leaves_nothing(served_dir: Path) -> None:
    async def test() -> None:
        engine = process_engine(served_dir)
        asking = asyncio.create_task(engine.check_health())
        while engine.pid is None:  # noqa: ASYNC110 - the start of a process has no event
            await asyncio.sleep(0.001)
        pid = engine.pid
        await engine.close()
        with pytest.raises(InfrastructureFailure, match="closed"):
            await asking
        assert is_gone(pid)

    run(test)


@pytest.mark.long_tier
def test_the_engines_process_dies_with_a_trainer_that_is_killed(served_dir: Path) -> None:
    program = textwrap.dedent(f"""
        import asyncio
        from penstock.engine.frames import Setup
        from penstock.engine.process import ProcessEngine

        async def main():
            engine = ProcessEngine(Setup(config={{}}, model_dir={str(served_dir)!r}, stop_ids=(), threads=1))
            await engine.check_health()
            print(engine.pid, flush=True)
            await asyncio.sleep(1000)

        asyncio.run(main())
    """)
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    try:
        engine = psutil.Process(int(trainer.stdout.readline()))
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()
    psutil.wait_procs([engine], timeout=20)
    assert is_gone(engine.pid)


def test_an_engines_process_gets_no_secret_of_this_one_unless_it_is_named(
    served_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET_KEY", "canary-1")
    monkeypatch.setenv("HF_TOKEN", "canary-2")
    monkeypatch.setenv("MY_SETTING", "passed on")
    config = EmbeddedEngineConfig(process=True, environment=["MY_SETTING"])
    engine = config.build(str(served_dir), CharacterTokenizer(), threads=1)
    assert isinstance(engine, ProcessEngine)

    async def test() -> None:
        try:
            await engine.check_health()
            environment = psutil.Process(engine.pid).environ()
            assert environment["MY_SETTING"] == "passed on"
            assert not [name for name, value in environment.items() if "canary" in value]
        finally:
            await engine.close()

    run(test)
