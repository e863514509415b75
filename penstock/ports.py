"""What the pipeline asks of the world. Everything outside comes in through one of these.

    Tokenizer      text <-> token ids
    Engine         token ids in, token ids and logprobs out
    Engines        several of them behind the port of one; they come and go
    Judger         a rollout in, a verdict or a reason why there is none
    AgentLoop      a group of prompts in, the group played and judged
    TrainWorker    a prepared batch in, changed weights
    WeightChannel  the trainer's weights to the engines
    TurnLog        finished turns of rollouts that are still played, so that a crash costs the unfinished one
    Placement      where an object lives: here, or (in `cluster/`) in actors

What is worth showing goes to an `Observer`; that port and its events are in `events.py`. Members are async calls or
plain data, so that an object in another process can implement them.

Time is the event loop's: code measures with `loop.time()` and waits with asyncio, so that `penstock.testing` can run
the same code on a virtual clock.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import msgspec
import numpy as np

from penstock.errors import ConfigError, InfrastructureFailure
from penstock.rollout import (
    ROOT,
    WHOLE,
    FailureReason,
    FinishReason,
    FloatArray,
    Group,
    RolloutState,
    SampleParams,
    Tokens,
    Turn,
    Unjudged,
    Verdict,
)
from penstock.unbuffered import FileSum

BatchT = TypeVar("BatchT", contravariant=True)

GiB = 1 << 30

OnPause = Literal["abort", "keep", "serve"]
"""What a pause does to a request. abort: it ends with what it has (a rollout that can go on later). keep: it is frozen
and goes on under the next weights (an agent outside that cannot be played again). serve: it goes on (a judge's or an
evaluation's request, without which a drain would wait for ever)."""


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

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        generation_prompt: bool = True,
    ) -> str:
        """The text of which `render` gives the ids, special tokens written out; or without its last part, which makes
        it ready for the assistant's answer."""
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
    on_pause: OnPause = "abort"
    judging: bool = False
    """A judge's: finished rollouts wait for it. It goes before those that wait in line, to places kept for judges."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The new tokens only; what the request brought is not repeated."""

    ids: bytes
    logprobs: bytes
    finish_reason: FinishReason | None
    """None in a piece of a stream that is not its last."""
    steps: tuple[tuple[int, int], ...]
    """Runs of (model step, number of tokens)."""
    waited_s: float = 0.0
    """For a place at an engine, before it was made."""


def check_completion(completion: Completion, request: GenerateRequest) -> None:
    """Raises InfrastructureFailure when an engine's answer cannot be true; nothing of it is used then.

    No token is a finished answer only where the request had none left to ask for.
    """
    n = len(completion.ids) // 4
    versions = sum(count for _, count in completion.steps)
    full = len(request.response_ids) >= 4 * request.params.max_tokens
    if len(completion.ids) % 4 or len(completion.logprobs) != 4 * n or versions != n:
        problem = f"{n} ids, {len(completion.logprobs) // 4} logprobs, {versions} model steps"
    elif not np.isfinite(np.frombuffer(completion.logprobs, dtype=np.float32)).all():
        problem = "logprobs that are not finite"
    elif completion.finish_reason is None:
        problem = "no finish reason"
    elif n == 0 and completion.finish_reason is not FinishReason.ABORT and not full:
        problem = f"no token and finish reason {completion.finish_reason}"
    else:
        return
    raise InfrastructureFailure(
        f"engine answered {request.request_id} with {problem}", reason=FailureReason.ENGINE_NONSENSE
    )


def joined(pieces: Sequence[Completion], *, waited_s: float = 0.0) -> Completion:
    """The answer that was streamed in these pieces, for which somebody waited so long before."""
    steps: list[tuple[int, int]] = []
    for step, count in (run for piece in pieces for run in piece.steps):
        if steps and steps[-1][0] == step:
            steps[-1] = (step, steps[-1][1] + count)
        else:
            steps.append((step, count))
    return Completion(
        ids=b"".join(piece.ids for piece in pieces),
        logprobs=b"".join(piece.logprobs for piece in pieces),
        finish_reason=pieces[-1].finish_reason,
        steps=tuple(steps),
        waited_s=waited_s + sum([piece.waited_s for piece in pieces]),
    )


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    engines: int = 1
    """How many are active; several behind a controller."""
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


class Engine(Protocol):
    """Text generation. Every engine passes the one suite in `tests/engine_contract.py`."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Waits for the whole answer. Cancelling drops it.

        While paused, a request does what its `on_pause` says: `abort` ends at once with ABORT and what it has (a new
        one with nothing), `keep` waits, `serve` is served. Raises InfrastructureFailure when the engine fails,
        DataFailure when the request cannot be served.
        """
        ...

    def stream(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
        """The same answer in pieces, as it is made. Only the last piece has a finish reason; it may be empty.

        Closing it early (`contextlib.aclosing`) drops the request.
        """
        ...

    async def score(self, ids: bytes) -> bytes:
        """The logprob of every token but the first, given those before it: log_softmax of the logits, float32.

        For teachers and checks. Served while paused. Raises like `generate`.
        """
        ...

    async def pause_generation(self) -> None:
        """Stop making tokens, but for requests that are served; returns after at most one engine step. Idempotent."""
        ...

    async def continue_generation(self) -> None:
        """Take requests again; kept ones go on. Idempotent."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these with ABORT and what they have; unknown ids are ignored."""
        ...

    async def sleep(self) -> None:
        """Give up device memory; only while paused, else RunError.

        Kept and served requests finish first, under their weights; what comes later waits until `wake`.
        """
        ...

    async def wake(self) -> None: ...

    async def load_weights(self, source: WeightSource, model_step: int) -> LoadedWeights | None:
        """Replace the weights; kept requests go on under them.

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


class EngineMember(msgspec.Struct, frozen=True, kw_only=True):
    """One of several engines, as the door to them sees it."""

    name: str
    state: str
    """active, draining, fenced, recovering."""
    requests: int = 0
    """That it was given and has not answered."""
    failure: str = ""
    """What went wrong last."""


class Engines(Engine, Protocol):
    """All engines of a run behind the port of one. They may join and leave while the others serve."""

    async def members(self) -> list[EngineMember]: ...

    async def add_engine(self) -> str:
        """Start one more; returns its name when it serves the published weights, like the others.

        Raises InfrastructureFailure when it does not come within its deadline, and RunError where none can be added;
        there is none more then.
        """
        ...

    async def drain_engine(self, name: str) -> None:
        """Take one away: it is given nothing more, its requests end elsewhere, and it is closed when this returns.

        Raises RunError when there is none of that name, or no other that serves.
        """
        ...


class Judger(abc.ABC):
    """Scores rollouts. Subclass it when a plain `reward_handler(response, label, extra_info)` is not enough."""

    relative = False
    """True when a score depends on the siblings; then `judge_group` is called instead of `judge`."""

    @abc.abstractmethod
    async def judge(self, rollout: RolloutState) -> Verdict | Unjudged:
        """A finite score or the reason why not, within the judger's own deadline.

        Raises UserFunctionError for a judge that cannot work at all, and nothing for one that is down.
        """

    async def judge_group(self, group: Group) -> list[Verdict | Unjudged]:
        """One answer per rollout, in order."""
        return [await self.judge(rollout) for rollout in group]

    async def metrics(self) -> dict[str, float]:
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

    async def stages(self) -> dict[str, str]:
        """What each rollout being played waits for, in a word, by rollout id; for the message of a stalled run."""
        ...

    async def close(self) -> None: ...


class TrainOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a train step came to."""

    metrics: dict[str, float]
    logprobs: dict[str, list[FloatArray]] = {}
    """By rollout, one array per segment: the trainer's logprob of each token in its first pass, NaN where a token was
    not computed because it is not trained."""


class SavedState(Protocol):
    """The state of a train worker that can be written: as it is, or as it was when a snapshot was taken."""

    async def save(self, directory: Path) -> Mapping[str, FileSum] | None:
        """Write everything that `load` needs, weights and optimiser, as files into an existing directory. Returns the
        sums of what was in memory, by file; files without one are read for it."""
        ...

    async def save_hf(self, directory: Path) -> None:
        """The weights in Hugging Face format; there as a whole or not at all."""
        ...


class TrainWorker(SavedState, Protocol[BatchT]):
    """Holds the trained weights: a model in this process, or a group of ranks."""

    async def train(self, batch: BatchT) -> TrainOutcome:
        """One train step. Raises StepRefused, weights unchanged, when loss or gradient is not finite."""
        ...

    async def score(self, batch: BatchT) -> dict[str, list[FloatArray]]:
        """The logprob of every token of the batch under the weights as they are; by rollout and segment."""
        ...

    async def score_reference(self, batch: BatchT) -> dict[str, list[FloatArray]]:
        """The same of the reference model. Raises RunError where there is none."""
        ...

    async def load(self, directory: Path) -> None:
        """Go on from what `save` wrote. Raises CheckpointError when it does not fit."""
        ...

    async def snapshot(self, *, optimizer: bool, export: bool) -> SavedState | None:
        """The state as it is now, to be written while training goes on: what a checkpoint needs (`optimizer`), what
        an export needs, or both. What the worker is asked afterwards does not change it.

        None where it can only be written while nothing changes it.
        """
        ...

    @property
    def weights(self) -> Any:
        """What a weight channel is bound to: a `WeightSource`, or weights that ranks write themselves."""
        ...

    async def close(self) -> None: ...


class WeightChannel(Protocol):
    """Bound to a worker's weights and to the engines."""

    async def publish(self, model_step: int) -> Published:
        """Bring the engines to the weights as they are now, as `model_step`.

        Raises WeightSyncError when none confirmed.
        """
        ...

    async def close(self) -> None: ...


class FinishedTurn(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A finished turn of a rollout that is being played, as it is kept."""

    task_name: str
    group_id: str
    rollout_id: str
    index: int
    """Its place in `rollout.turns`. One with an index that is already there replaces it and everything after it."""
    turn: Turn
    tokens: Tokens
    """Its own."""
    parent: int = ROOT
    start: int = WHOLE
    """Where its segment begins; of use when the turn is the first of its segment."""


class TurnLog(Protocol):
    """Where a task with partial rollout keeps the turns that a rollout has behind it; one without it has none."""

    async def append(self, turn: FinishedTurn, *, durable: bool = False) -> None:
        """Keep a finished turn; returns when it is on disk if `durable`, else at once."""
        ...


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be built and how large it is. It may travel to another machine, so it holds no live object."""

    name: str
    """For people."""
    build: Callable[..., Any]
    """A class or function that can be imported where the object will live."""
    arguments: Mapping[str, Any] = {}
    """Plain data."""
    ports: tuple[str, ...] = ()
    """Which of the ports offered to `place` it takes, as keyword arguments."""
    port: Literal["agent_loop", "judger", "engine", "engines", "tokenizer"]
    """What it implements."""
    num_actors: int = 0
    """0 here, 1 in an actor, n behind a router over n."""
    num_cpus: float = 1.0
    memory: int = GiB
    home: str = ""
    """Objects of one home live in the same actors; an empty one is shared with nobody."""
    environment: tuple[str, ...] = ()
    """Variables that its actors get, by name, besides those that every program needs."""


class Placement(Protocol):
    """Decides where an object lives. Consumers only ever see the port it implements; whoever places it closes it."""

    def place(self, description: Description, ports: Mapping[str, Any]) -> Any: ...


class Local:
    """Everything in this process, with the live ports."""

    def __init__(self, *, whatever_it_asks: bool = False) -> None:
        """`whatever_it_asks`: also what is to live in actors; for trying it before there are any."""
        self._whatever_it_asks = whatever_it_asks

    def place(self, description: Description, ports: Mapping[str, Any]) -> Any:
        if description.num_actors and not self._whatever_it_asks:
            raise ConfigError(f"{description.name}: num_ray_actors is {description.num_actors}; that needs Ray")
        return build_here(description, ports)


def build_here(description: Description, ports: Mapping[str, Any]) -> Any:
    return description.build(**description.arguments, **{name: ports[name] for name in description.ports})
