"""The two loops, each written once, over ports.

    colocated, step t:      produce_batch -> engines sleep -> learn -> commit -> checkpoint
                            -> engines wake -> every s steps: sync -> log -> evaluate
    disaggregated, step t:  get_batch || produce_loop -> learn -> commit -> checkpoint
                            -> every s steps or when expired: pause_produce -> sync -> continue_produce -> log
                            -> evaluation of model step t starts beside training; the next sync waits for it

Trainers and simulations hand in their ports and run these functions. There is no disk, no signal and no display here,
and time is the event loop's. What is waited for is bounded by whoever implements the port.

A train step that is refused gives its groups back and is not counted; three in a row stop the run. An evaluation that
falls due between two syncs takes place at the next one, of the weights that the engines serve then: looking never
changes what is trained.

A checkpoint is a snapshot here, written beside what follows. The next one waits until it is written; one that could not
be written ends the run before the next step is trained. Until it is written the groups since the one before are not
final: a restart gives them back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Protocol

import msgspec

from penstock.errors import RunError, StepRefused
from penstock.events import (
    BatchTaken,
    Note,
    Observer,
    StageBegan,
    StageEnded,
    StepGivenBack,
    StepTrained,
    WeightsPublished,
)
from penstock.ports import WeightChannel
from penstock.produce import ProduceBatchResult, ProduceBatchStatus

MAX_REFUSED_IN_A_ROW = 3

Metrics = dict[str, float]


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """When what is due, in train steps."""

    total_steps: int
    batch_size: int
    sync_weights_interval: int = 1
    eval_interval: int = 10
    checkpoint_interval: int = 10
    hf_interval: int | None = None
    exact: bool = False
    """Stop only where engines and trainer have the same weights, as a resumed run begins."""

    def syncs(self, step: int) -> bool:
        return step % self.sync_weights_interval == 0

    def checkpoints(self, step: int) -> bool:
        return step % self.checkpoint_interval == 0

    def exports(self, step: int) -> bool:
        return self.hf_interval is not None and step % self.hf_interval == 0

    def evaluates(self, model_step: int, *, since: int) -> bool:
        """Whether an evaluation fell due after `since`, up to these weights."""
        return model_step // self.eval_interval > since // self.eval_interval

    def last_sync_before(self, step: int) -> int:
        return max(0, (step - 1) // self.sync_weights_interval * self.sync_weights_interval)


class Producer(Protocol):
    """What a loop asks of the `AgentLoopManager`."""

    async def produce_batch(self, batch_size: int, train_step: int, *, model_step: int) -> ProduceBatchResult: ...

    async def produce_loop(self, batch_size: int) -> None: ...

    async def get_batch(self, batch_size: int, train_step: int) -> ProduceBatchResult: ...

    async def pause_produce(self) -> None: ...

    async def continue_produce(self, model_step: int) -> None: ...

    async def shutdown(self) -> None: ...

    async def commit(self, train_step: int) -> None: ...

    async def return_batch(self, train_step: int) -> None: ...


class Devices(Protocol):
    """What engines and trainer take turns on; the engine's own `sleep` and `wake`."""

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class Learner(Protocol):
    async def learn(self, result: ProduceBatchResult, train_step: int, stages: Stages) -> Metrics:
        """Prepare the batch, save its trajectories, train. Raises StepRefused, weights unchanged."""
        ...

    async def committed(self, train_step: int) -> None:
        """The step counts from now on; what is kept beside it may be written."""
        ...


class Checkpointer(Protocol):
    async def keep(self, train_step: int, metrics: Metrics, *, checkpoint: bool, export: bool) -> None:
        """What the weights are now, to be written beside training: a checkpoint, everything that a restart needs, with
        the metrics of the step, which a restart tells again; an export, the weights for others to read; or both.

        Waits until what was to be kept before is written.
        """
        ...

    def check(self) -> None:
        """Raises why what was to be kept could not be written, once that is known."""
        ...


class LoopEvaluator(Protocol):
    def evaluate(self, model_step: int) -> Coroutine[Any, Any, None]:
        """Ask everything of the weights that the engines serve, which are those of `model_step`, and tell it."""
        ...


class LoopPorts(msgspec.Struct, kw_only=True, frozen=True):
    producer: Producer
    learner: Learner
    channel: WeightChannel
    checkpointer: Checkpointer
    evaluator: LoopEvaluator | None
    devices: Devices | None = None
    """None where trainer and engines do not share any."""
    observer: Observer
    gauges: Callable[[], Awaitable[Metrics]]
    """Measured once per step, beside the step's own metrics."""
    stop: Callable[[], bool]
    """Whether the run is to end in order."""


async def colocated_loop(schedule: Schedule, ports: LoopPorts, *, begin: int = 0) -> int:
    """Train the steps after `begin`, whose weights the engines serve. Returns the last step that was trained."""
    run = _Run(schedule, ports, begin)
    while run.goes_on():
        with run.next_step() as stages:
            metrics = None
            while metrics is None:  # refused; three in a row end the run
                with stages("produce"):
                    step, served = run.step + 1, run.served
                    result = await ports.producer.produce_batch(schedule.batch_size, step, model_step=served)
                    run.tell(result)
                    if ports.devices is not None:
                        await ports.devices.sleep()
                metrics = await run.learn(result, stages)
                with stages("sync"):
                    if ports.devices is not None:
                        await ports.devices.wake()
                    if metrics is not None and schedule.syncs(run.step):
                        await run.publish()
            await run.report(metrics, stages)
        if ports.evaluator is not None and run.takes_evaluation():
            await ports.evaluator.evaluate(run.served)
    if run.is_done and run.served != run.step:
        await run.publish()
    return run.step


async def disaggregated_loop(schedule: Schedule, ports: LoopPorts, *, begin: int = 0) -> int:
    """As `colocated_loop`, with a producer beside it. Nothing is left running when it returns or raises."""
    run = _Run(schedule, ports, begin)
    producing = asyncio.create_task(ports.producer.produce_loop(schedule.batch_size), name="produce loop")
    try:
        await ports.producer.continue_produce(begin)
        while run.goes_on():
            with run.next_step() as stages:
                metrics = None
                while metrics is None:  # refused, or after a sync
                    with stages("produce"):
                        result = await ports.producer.get_batch(schedule.batch_size, run.step + 1)
                    if result.groups:
                        run.tell(result)
                        metrics = await run.learn(result, stages)
                    else:
                        run.require_newer_weights(result)
                        await run.sync(stages)
                expired = result.status is ProduceBatchStatus.EXPIRED_BATCH
                if not run.is_done and (expired or schedule.syncs(run.step)):
                    await run.sync(stages)
                metrics["share/trainer_wait"] = stages.seconds["produce"] / (sum(stages.seconds.values()) or 1.0)
                await run.report(metrics, stages)
            await run.begin_evaluation()
        await run.finish_evaluation()
        await _end_production(ports, producing)
        if run.is_done and run.served != run.step:
            await run.publish()
    finally:
        for task in filter(None, (producing, run.evaluating)):
            task.cancel()
        await asyncio.gather(*filter(None, (producing, run.evaluating)), return_exceptions=True)
    return run.step


async def _end_production(ports: LoopPorts, producing: asyncio.Task[None]) -> None:
    """What fails now failed in groups that no step of this run needs; they wait in the ledger."""
    try:
        await ports.producer.shutdown()
        await producing
    except RunError as error:
        ports.observer.notice(Note(text=f"the producer ended with {type(error).__name__}: {error}"))


class _Run:
    """Where a loop stands, and what both do alike."""

    def __init__(self, schedule: Schedule, ports: LoopPorts, begin: int) -> None:
        self.schedule = schedule
        self.ports = ports
        self.step = begin
        """The last step that was trained."""
        self.served = begin
        """The weights of the engines."""
        self.evaluating: asyncio.Task[None] | None = None
        self._evaluated = begin
        self._refused_in_a_row = 0

    @property
    def is_done(self) -> bool:
        return self.step >= self.schedule.total_steps

    def goes_on(self) -> bool:
        may_stop = self.served == self.step or not self.schedule.exact
        return not self.is_done and not (self.ports.stop() and may_stop)

    @contextlib.contextmanager
    def next_step(self) -> Iterator[Stages]:
        self.ports.checkpointer.check()
        stages = Stages(self.ports.observer, train_step=self.step + 1)
        with stages.whole():
            yield stages

    def tell(self, result: ProduceBatchResult) -> None:
        self.ports.observer.notice(
            BatchTaken(
                train_step=self.step + 1,
                groups=len(result.groups),
                status=result.status.value,
                staleness={name: task.staleness for name, task in result.tasks.items() if task.staleness},
            )
        )

    async def learn(self, result: ProduceBatchResult, stages: Stages) -> Metrics | None:
        """Train the next step and make it count. None when it was refused: its groups were given back."""
        step, producer = self.step + 1, self.ports.producer
        try:
            # A disk that failed meanwhile: no step is trained on what could not be kept.
            self.ports.checkpointer.check()
            metrics = await self.ports.learner.learn(result, step, stages)
        except StepRefused as refused:
            await producer.return_batch(step)
            self._count_refused(step, refused)
            return None
        except BaseException:
            await producer.return_batch(step)
            raise
        with stages("commit"):
            await producer.commit(step)
            await self.ports.learner.committed(step)
        self.step, self._refused_in_a_row = step, 0
        await self._keep(metrics, stages)
        return metrics

    async def _keep(self, metrics: Metrics, stages: Stages) -> None:
        checkpoint, export = self.schedule.checkpoints(self.step), self.schedule.exports(self.step)
        if checkpoint:
            # First what runs beside: nobody could ask these weights again after a restart.
            await self.finish_evaluation()
        if checkpoint or export:
            with stages("checkpoint"):
                await self.ports.checkpointer.keep(self.step, metrics, checkpoint=checkpoint, export=export)

    def _count_refused(self, step: int, refused: StepRefused) -> None:
        self._refused_in_a_row += 1
        self.ports.observer.notice(StepGivenBack(train_step=step, reason=str(refused)))
        if self._refused_in_a_row >= MAX_REFUSED_IN_A_ROW:
            raise StepRefused(f"train step {step} was refused {self._refused_in_a_row} times in a row: {refused}")

    # Weights.

    async def publish(self) -> None:
        published = await self.ports.channel.publish(self.step)
        self.served = self.step
        self.ports.observer.notice(
            WeightsPublished(model_step=published.model_step, num_bytes=published.num_bytes, seconds=published.seconds)
        )

    async def sync(self, stages: Stages) -> None:
        """Bring the engines to the newest weights; what is in flight is stored first, and goes on under them."""
        with stages("sync"):
            await self.finish_evaluation()
            await self.ports.producer.pause_produce()
            await self.publish()
            await self.ports.producer.continue_produce(self.served)

    def require_newer_weights(self, result: ProduceBatchResult) -> None:
        if result.status is not ProduceBatchStatus.EXPIRED_BATCH or self.served >= self.step:
            raise RunError(
                f"train step {self.step + 1}: the batch is empty ({result.status}), and the engines have the newest "
                f"weights, {self.served}; there is nothing to train and nothing to sync"
            )

    # Evaluation.

    def takes_evaluation(self) -> bool:
        """Whether one is due and the engines serve what was trained last. The one after the last step is not ours."""
        synced = self.served == self.step and not self.is_done and not self.ports.stop()
        if not synced or not self.schedule.evaluates(self.served, since=self._evaluated):
            return False
        self._evaluated = self.served
        return True

    async def begin_evaluation(self) -> None:
        """Beside training; the engines serve exactly these weights until it has ended."""
        if self.ports.evaluator is None or not self.takes_evaluation():
            return
        await self.finish_evaluation()
        evaluation = self.ports.evaluator.evaluate(self.served)
        self.evaluating = asyncio.create_task(evaluation, name=f"evaluation of {self.served}")

    async def finish_evaluation(self) -> None:
        if self.evaluating is not None:
            await self.evaluating
            self.evaluating = None

    # After a step.

    async def report(self, metrics: Metrics, stages: Stages) -> None:
        whole = sum(stages.seconds.values())
        metrics = metrics | await self.ports.gauges() | stages.metrics() | {"time/step_s": whole}
        if stages.seconds.get("train") and "trained_tokens" in metrics:
            metrics["tokens/trained_per_s"] = metrics["trained_tokens"] / stages.seconds["train"]
        self.ports.observer.notice(StepTrained(train_step=self.step, metrics=metrics))


class Stages:
    """What a run does, told as it begins and ends; and the seconds of each stage that stands in no other."""

    def __init__(self, observer: Observer, *, train_step: int | None = None, lane: str = "trainer") -> None:
        self.seconds: dict[str, float] = {}
        self._observer = observer
        self._train_step = train_step
        self._lane = lane
        self._depth = 0

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._depth += 1
        try:
            with self._timed(name):
                yield
        finally:
            self._depth -= 1

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """All of a step; the stages stand in it."""
        with self._timed("step", counted=False):
            yield

    def metrics(self) -> Metrics:
        return {f"time/{name}_s": seconds for name, seconds in self.seconds.items()}

    @contextlib.contextmanager
    def _timed(self, name: str, *, counted: bool = True) -> Iterator[None]:
        clock = asyncio.get_running_loop().time
        self._observer.notice(StageBegan(stage=name, train_step=self._train_step, lane=self._lane))
        started = clock()
        try:
            yield
        finally:
            seconds = clock() - started
            if counted and self._depth == 1:
                self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            self._observer.notice(StageEnded(stage=name, seconds=seconds, train_step=self._train_step, lane=self._lane))
