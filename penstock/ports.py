"""What the pipeline asks of the world. Everything outside comes in through one of these.

    Tokenizer      text <-> token ids
    Engine         token ids in, token ids and logprobs out
    Judger         a rollout in, a verdict or a reason why there is none
    AgentLoop      a group of prompts in, the group played and judged
    TrainWorker    a prepared batch in, changed weights
    WeightChannel  the trainer's weights to the engines
    Placement      where an object lives: here, or (in `cluster/`) in actors

Time is the event loop's: code measures with `loop.time()` and waits with asyncio, so that `penstock.testing` can run
the same code on a virtual clock.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import msgspec

from penstock.errors import ConfigError
from penstock.rollout import FinishReason, Group, RolloutState, SampleParams, Unjudged, Verdict

BatchT = TypeVar("BatchT", contravariant=True)
T = TypeVar("T")


class Tokenizer(Protocol):
    """Text to ids and back. The adapter over transformers lives in `models/tokenizer.py`: that import brings torch."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer: end-of-text and, for chat models, end-of-turn."""
        ...

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """Without special tokens."""
        ...

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Chat messages as the model's template writes them, ready for the assistant's answer."""
        ...


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to make, or to go on with."""

    request_id: str
    prompt_ids: bytes
    """Everything before this answer, packed int32."""
    response_ids: bytes = b""
    """What this answer already has (a continued partial rollout). The token budget includes it."""
    params: SampleParams
    seed: int
    first_uniform: int = 0
    """Index of the first random number to use: the i-th one is a function of (seed, i)."""
    group_id: str = ""
    """Requests of one group share their prompt; an engine computes it once."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The new tokens only; what the request brought is not repeated."""

    ids: bytes
    logprobs: bytes
    finish_reason: FinishReason
    steps: tuple[tuple[int, int], ...]
    """Runs of (model step, number of tokens)."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    running: int = 0
    waiting: int = 0
    generated_tokens: int = 0
    """Since the engine started."""
    busy_seconds: float = 0.0
    cache_use: float = 0.0
    """Share of the KV cache in use, 0 to 1."""


class WeightSource(Protocol):
    """Weights to load: names as in the Hugging Face state dict, tensors on any device."""

    def tensors(self) -> Iterator[tuple[str, Any]]: ...


@runtime_checkable
class LentWeights(WeightSource, Protocol):
    """Weights in memory that an engine may use in place."""

    def keep(self) -> Callable[[], None]:
        """Nobody changes them until the returned function is called."""
        ...


@runtime_checkable
class KeptWeights(WeightSource, Protocol):
    """Weights that stay readable after their sync, until the next: what a restarted engine is given."""

    @property
    def checksum(self) -> str: ...


class LoadedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's confirmation of a load."""

    model_step: int
    checksum: str | None = None
    """Of the bytes it received; None where nothing was sent."""


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """A weight sync that was confirmed, and what it cost."""

    model_step: int
    num_bytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        return self.num_bytes / self.seconds if self.seconds > 0 else 0.0


PauseMode = Literal["abort", "keep"]


class Engine(Protocol):
    """Text generation. Every engine passes the one suite in `tests/engine_contract.py`."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Waits for the whole answer. Cancelling drops it.

        Paused in mode abort: running requests end at once with ABORT and what they have; new ones too, with nothing.
        Raises InfrastructureFailure when the engine fails, DataFailure when the request cannot be served.
        """
        ...

    async def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Stop making tokens; returns when stopped, after at most one engine step. Idempotent."""
        ...

    async def continue_generation(self) -> None:
        """Take requests again. Idempotent."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these with ABORT and what they have; unknown ids are ignored."""
        ...

    async def sleep(self) -> None:
        """Give up device memory; only while paused and idle."""
        ...

    async def wake(self) -> None: ...

    async def load_weights(self, source: WeightSource, model_step: int) -> LoadedWeights | None:
        """Replace the weights; requests frozen by a keep-pause go on under them.

        Returns what was received, or None from an engine that reads the trainer's own memory. Raises WeightSyncError,
        old weights kept, when names, shapes or bytes do not fit.
        """
        ...

    async def model_step(self) -> int:
        """What it really serves."""
        ...

    async def check_health(self) -> None:
        """Returns if the engine can serve; raises InfrastructureFailure with the cause if not."""
        ...

    async def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...


class Judger(abc.ABC):
    """Scores rollouts. Subclass it when a plain `reward_handler(response, label, extra_info)` is not enough."""

    relative = False
    """True when a score depends on the siblings; then `judge_group` is called instead of `judge`."""

    @abc.abstractmethod
    async def judge(self, rollout: RolloutState) -> Verdict | Unjudged:
        """A finite score or the reason why not, within the judger's own deadline. Never raises for a bad judge."""

    async def judge_group(self, group: Group) -> list[Verdict | Unjudged]:
        """One answer per rollout, in order."""
        return [await self.judge(rollout) for rollout in group]

    def metrics(self) -> dict[str, float]:
        """Latency, timeouts, abstentions, cache hits since the judger was built."""
        return {}

    async def close(self) -> None:  # noqa: B027 - most judgers hold nothing
        pass


class AgentLoop(Protocol):
    """Plays a group. Users subclass `penstock.agent_loop.AgentLoop`, which implements this."""

    async def generate_group(self, group: Group, *, enable_partial_rollout: bool) -> Group:
        """Every rollout comes back COMPLETED, ABORTED or FAILED; those already COMPLETED are left alone."""
        ...

    async def pause(self) -> None:
        """Abort this loop's own requests."""
        ...

    def stage(self, rollout_id: str) -> str:
        """What a rollout being played waits for, in a word; for the message of a stalled run."""
        ...

    async def close(self) -> None: ...


class TrainWorker(Protocol[BatchT]):
    """Holds the trained weights. Calls block; the trainer makes them in a thread."""

    def train(self, batch: BatchT) -> dict[str, float]:
        """One train step; returns its metrics.

        Raises StepRefused, weights unchanged, when loss or gradient is not finite.
        """
        ...

    def tensors(self) -> Iterator[tuple[str, Any]]: ...

    def save_hf(self, directory: str) -> None: ...


class WeightChannel(Protocol):
    async def publish(self, source: WeightSource, model_step: int) -> Published:
        """Bring the engines to `model_step`. Raises WeightSyncError when none confirmed."""
        ...

    async def close(self) -> None: ...


class Placement(Protocol):
    """Decides where an object lives. Consumers only ever see the port it implements."""

    def place(self, build: Callable[[], T], *, name: str, num_actors: int, num_cpus: float, memory: int) -> T: ...


class Local:
    """Everything in this process."""

    def place(self, build: Callable[[], T], *, name: str, num_actors: int, num_cpus: float, memory: int) -> T:
        if num_actors:
            raise ConfigError(f"{name}: num_ray_actors is {num_actors}; without Ray it must be 0")
        return build()
