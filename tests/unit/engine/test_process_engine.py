"""The engine in a process of its own: the contract over the wire, and what happens to the process."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
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
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from penstock.engine import EmbeddedEngineConfig, RolloutControllerConfig
from penstock.engine.controller import RolloutController
from penstock.engine.frames import MAX_FRAME, Call, Failed, Reply, Setup, error_from_wire, error_to_wire, frame
from penstock.engine.process import ProcessEngine
from penstock.engine.remote import RemoteEngine
from penstock.engine.server import serve
from penstock.errors import (
    ConfigError,
    DataFailure,
    EngineUnavailable,
    InfrastructureFailure,
    ModelError,
    RunError,
    WeightSyncError,
)
from penstock.rollout import FailureReason, FinishReason
from penstock.weights import DiskChannel, SharedMemoryChannel

DEADLINE = 120.0
"""For a whole test with real processes, which take seconds to import torch on a busy machine."""


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE):
            await test()

    asyncio.run(bounded())


@pytest.fixture(scope="module")
def served_dir(model_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the tokenizer that `CharacterTokenizer` is, and an end-of-text that is never made."""
    directory = tmp_path_factory.mktemp("served") / "llama"
    shutil.copytree(model_dirs["llama"], directory)
    vocabulary = {chr(32 + i): i for i in range(96)} | {"<end>": 96}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>").save_pretrained(directory)
    return directory


def process_engine(directory: Path) -> ProcessEngine:
    config = EmbeddedEngineConfig(max_running=6, prefill_chunk_tokens=64, process=True)
    engine = config.build(str(directory), CharacterTokenizer(), threads=1)
    assert isinstance(engine, ProcessEngine)
    return engine


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


# Over the wire, without a process: the same frames, server and client.


class Wired:
    """A `RemoteEngine` whose server runs in this event loop. It connects with the first call."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._connecting: asyncio.Task[RemoteEngine] | None = None
        self._serving: asyncio.Task[None] | None = None

    def __getattr__(self, method: str) -> Any:
        async def call(*arguments: Any) -> Any:
            self._connecting = self._connecting or asyncio.create_task(self._connect())
            return await getattr(await self._connecting, method)(*arguments)

        return call

    async def _connect(self) -> RemoteEngine:
        ours, theirs = socket.socketpair()
        self._serving = asyncio.create_task(serve(*await asyncio.open_connection(sock=theirs), self._make()))

        async def why_ended() -> InfrastructureFailure:
            return InfrastructureFailure("the server ended", reason=FailureReason.ENGINE_DIED)

        return RemoteEngine(*await asyncio.open_connection(sock=ours), why_ended)

    async def close(self) -> None:
        if self._connecting is not None:
            await (await self._connecting).close()
        if self._serving is not None:
            await self._serving


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_the_contract_holds_over_the_wire(
    check: Callable[[Subject], Awaitable[None]], subjects: dict[str, Subject]
) -> None:
    inner = subjects["llama"]
    subject = Subject(
        make=lambda: Wired(inner.make),  # type: ignore[arg-type, return-value]
        other_weights=inner.other_weights,
        reference=inner.reference,
    )
    asyncio.run(check(subject))


@pytest.mark.parametrize(
    "error",
    [
        InfrastructureFailure("the thread died", reason=FailureReason.ENGINE_DIED),
        DataFailure("too long", reason=FailureReason.CONTEXT_TOO_LONG),
        WeightSyncError("refused"),
        ModelError(["no config.json", "no weights"]),
        ConfigError("max_running is 0"),
        RunError("cannot sleep"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_arrive_as_what_they_were(error: Exception) -> None:
    arrived = error_from_wire(error_to_wire(error))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert getattr(arrived, "reason", None) == getattr(error, "reason", None)


def test_an_error_that_is_not_ours_is_the_engines_failure() -> None:
    arrived = error_from_wire(error_to_wire(ZeroDivisionError("division by zero")))
    assert isinstance(arrived, InfrastructureFailure)
    assert str(arrived) == "ZeroDivisionError: division by zero"
    assert arrived.reason == "engine_error"


def test_a_method_that_is_not_of_the_port_cannot_be_called(subjects: dict[str, Subject]) -> None:
    async def test() -> None:
        ours, theirs = socket.socketpair()
        serving = asyncio.create_task(serve(*await asyncio.open_connection(sock=theirs), subjects["llama"].make()))
        reader, writer = await asyncio.open_connection(sock=ours)
        for method in ("close", "__class__", "_call"):
            writer.write(frame(Call(1, method, msgspec.Raw(msgspec.msgpack.encode(())))))
        answers = []
        for _ in range(4):
            size = int.from_bytes(await reader.readexactly(4), "big")
            answers.append(msgspec.msgpack.decode(await reader.readexactly(size), type=Reply | Failed))
        assert isinstance(answers[0], Reply)
        for answer in answers[1:]:
            assert isinstance(answer, Failed)
            assert "unknown method" in answer.error.message
        writer.close()
        await serving

    run(test)


def test_a_stream_that_is_no_stream_of_frames_fails_all_that_is_open() -> None:
    async def test() -> None:
        for garbage in (b"\xff" * 64, (4).to_bytes(4, "big") + b"\xc1\xc1\xc1\xc1", (MAX_FRAME + 1).to_bytes(4, "big")):
            ours, theirs = socket.socketpair()

            async def why_ended() -> InfrastructureFailure:
                return InfrastructureFailure("the process lives on", reason=FailureReason.ENGINE_DIED)

            engine = RemoteEngine(*await asyncio.open_connection(sock=ours), why_ended)
            asking = asyncio.create_task(engine.generate(ask("a")))
            theirs.sendall(garbage)
            with pytest.raises(InfrastructureFailure, match="cannot be read"):
                await asking
            with pytest.raises(InfrastructureFailure):
                await engine.check_health()
            await engine.close()
            theirs.close()

    run(test)


# Real processes.


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
            await there.pause_generation("abort")
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
        shared, disk = SharedMemoryChannel(bound, engine), DiskChannel(bound, engine, tmp_path / "weights")
        try:
            for step, channel in enumerate((shared, disk, shared, shared), start=1):
                bound.state = {name: tensor * (1 + step / 8) for name, tensor in weights.state.items()}
                published = await channel.publish(step)
                assert (published.model_step, await engine.model_step()) == (step, step)
                assert published.num_bytes == sum(tensor.nbytes for tensor in weights.state.values())
                assert published.bytes_per_second > 0
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


# Two processes behind the controller.

LIMITS = RolloutControllerConfig(probe_interval_s=0.5, probe_retry_s=0.1, probe_timeout_s=30.0, recovery_retry_s=0.5)


async def until(controller: RolloutController, name: str, state: str) -> None:
    while controller.states()[name] != state:  # noqa: ASYNC110 - seen from outside, as a user would
        await asyncio.sleep(0.01)


async def fenced(controller: RolloutController, name: str) -> None:
    async with asyncio.timeout(10):
        while controller.states()[name] == "active":  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_killed_engines_are_fenced_their_work_is_done_elsewhere_and_they_return_with_the_current_weights(
    served_dir: Path, subjects: dict[str, Subject]
) -> None:
    subject = subjects["llama"]

    async def test() -> None:
        engines = {"one": process_engine(served_dir), "two": process_engine(served_dir)}
        controller = LIMITS.build(engines)
        channel = SharedMemoryChannel(subject.other_weights, controller)
        try:
            await controller.check_health()
            for name in engines:
                await until(controller, name, "active")
            await channel.publish(3)
            expected = await asyncio.gather(
                *(controller.generate(ask(f"{i}", seed=i, max_tokens=400)) for i in range(12))
            )
            made = (await controller.stats()).generated_tokens

            # While serving.
            asking = [asyncio.create_task(controller.generate(ask(f"{i}", seed=i, max_tokens=400))) for i in range(12)]
            await has_made(controller, made + 12)
            kill(engines["one"])
            await fenced(controller, "one")
            answers = await asyncio.gather(*asking)
            assert [ids_of(answer) for answer in answers] == [ids_of(answer) for answer in expected]
            await until(controller, "one", "active")
            assert await engines["one"].model_step() == 3
            assert {step for answer in answers for step, _ in answer.steps} == {3}

            # While idle.
            kill(engines["two"])
            await fenced(controller, "two")
            assert (await controller.generate(ask("a", max_tokens=5))).steps == ((3, 5),)
            await until(controller, "two", "active")
            assert await engines["two"].model_step() == 3
        finally:
            await controller.close()
            await channel.close()
        assert all(engine.pid is None for engine in engines.values())

    run(test)


def kill(engine: ProcessEngine) -> None:
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)


def test_when_the_last_engine_is_gone_and_cannot_return_the_error_names_every_engine(
    served_dir: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(served_dir, directory)

    async def test() -> None:
        engines = {"one": process_engine(directory), "two": process_engine(directory)}
        controller = LIMITS.build(engines)
        try:
            await controller.check_health()
            for name in engines:
                await until(controller, name, "active")
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


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_the_contract_holds_for_the_controller(
    check: Callable[[Subject], Awaitable[None]], subjects: dict[str, Subject]
) -> None:
    inner = subjects["llama"]
    config = RolloutControllerConfig(max_requests_per_engine=16)
    subject = Subject(
        make=lambda: config.build({"only": inner.make()}),
        other_weights=inner.other_weights,
        reference=inner.reference,
    )
    asyncio.run(check(subject))
