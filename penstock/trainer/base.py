"""What both trainers share: the run directory, one train step, evaluation, logging, and how a run ends.

A step, after its groups are there:  prepare -> save trajectories -> train -> commit -> checkpoint

A run begins with checkpoint 0, before the first draw, or with the checkpoint it is resumed from. A train step that is
refused (loss or gradient not finite) gives its groups back and is not counted; three in a row stop the run. The first
SIGINT or SIGTERM lets the step finish and ends the run in order; the second stops it now. Both can be resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from penstock.data import remember_prompts
from penstock.errors import CheckpointError, PenstockError, RefusedError, StepRefused, StorageError
from penstock.learn.batch import TrainBatch, prepare_batch
from penstock.produce import ProduceBatchResult
from penstock.rollout import Group
from penstock.trainer.checkpoints import Checkpoint, weights_sums
from penstock.trainer.config import RLTrainerConfig
from penstock.trainer.display import Display
from penstock.trainer.parts import Parts
from penstock.trainer.profile import EVALUATION, TRAINER, Profile
from penstock.trainer.resume import Beginning
from penstock.trainer.rng import restore_rng, rng_state
from penstock.trainer.trackers import Tracker
from penstock.trainer.trajectories import Trajectories

MAX_REFUSED_IN_A_ROW = 3


class Summary(msgspec.Struct, kw_only=True):
    """`summary.json`: what a run came to."""

    steps: int = 0
    interrupted: bool = False
    eval_accuracy_before: float | None = None
    eval_accuracy_after: float | None = None
    eval_greedy_before: float | None = None
    eval_greedy_after: float | None = None
    eval_after_step: int | None = None
    """The model step of the `after` figures; None when nothing was evaluated after training."""
    eval_failed_prompts: int = 0
    """Of the last evaluation; they are in none of its figures."""
    error: str | None = None
    """Why the run stopped early."""
    train_seconds: float = 0.0
    """In train steps, evaluation not included."""
    wall_seconds: float = 0.0
    hf_dir: str = ""


class StageTimes:
    """Seconds per stage of one step."""

    def __init__(self, display: Display, profile: Profile, *, lane: str = TRAINER) -> None:
        self._display = display
        self._profile = profile
        self._lane = lane
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._display.stage(name)
        started = time.perf_counter()
        try:
            with self._profile.span(name, lane=self._lane):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def metrics(self) -> dict[str, float]:
        return {f"time/{name}_s": seconds for name, seconds in self.seconds.items()}


class RLTrainer:
    """Subclasses write `_run_steps`."""

    def __init__(
        self, config: RLTrainerConfig, parts: Parts, run_dir: Path, display: Display, beginning: Beginning
    ) -> None:
        self.config = config
        self.parts = parts
        self.run_dir = run_dir
        self.summary = Summary()
        self._beginning = beginning
        self._display = display
        self._trajectories = Trajectories(run_dir / "trajectories")
        self._trackers: list[Tracker] = []
        self._stop_requested = False
        self._refused_in_a_row = 0
        self._last_metrics: dict[str, float] = {}
        self._profile = parts.profile
        self._since = time.perf_counter()
        temperature = config.manager.task_list[0].agent_loop_config.sample_params.temperature
        rule = config.manager.task_list[0].produce_strategy_config.stale_rule(config.sync_weights_interval)
        self._temperature = temperature
        self._token_stale_threshold = rule.token_stale_threshold

    def fit(self) -> Summary:
        """Train. Returns the summary, also in the run directory; `interrupted` says whether it was cut short."""
        return asyncio.run(self._fit())

    async def _run_steps(self) -> None:
        """All train steps, until done or until a stop is requested."""
        raise TypeError(f"{type(self).__name__} must define _run_steps")

    async def _fit(self) -> Summary:
        self._since = time.perf_counter()
        with self._signals(), self._warnings():
            try:
                self._open_run_dir()
                self._display.start(f"{self.run_dir.name}: {self.config.model}", self.config.total_steps)
                await self._begin()
                await self._run_steps()
                self.summary.interrupted = self._stop_requested and self.summary.steps < self.config.total_steps
                if self.summary.steps not in self.parts.checkpoints.steps():
                    await self._checkpoint(self.summary.steps, self._last_metrics)
                if not self.summary.interrupted and self.summary.eval_after_step != self.summary.steps:
                    await self._evaluate(self.summary.steps)
                if self.summary.steps:
                    await self._export_hf()
                self._count_wall_time()
                self._write("summary.json", self.summary)
                self._display.finish(msgspec.to_builtins(self.summary))
                return self.summary
            except PenstockError as error:
                self.summary.error = f"{type(error).__name__}: {error}"
                self._count_wall_time()
                with contextlib.suppress(StorageError):
                    self._write("summary.json", self.summary)
                raise
            finally:
                await self._close()

    async def _close(self) -> None:
        """Everything, whatever one of them raises; the ledger last, because it holds what counts."""
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._write_profile)
            stack.push_async_callback(self.parts.close)
            for tracker in self._trackers:
                stack.callback(tracker.close)

    def _count_wall_time(self) -> None:
        now = time.perf_counter()
        self.summary.wall_seconds += now - self._since
        self._since = now

    # Beginning and going on.

    async def _begin(self) -> None:
        for note in self._beginning.notes:
            self._display.note(note)
        # Before the first draw: what a later resume is compared with.
        await asyncio.to_thread(remember_prompts, self.run_dir, self.parts.prompts)
        if self._beginning.checkpoint is None:
            if self.parts.buffer.position:
                raise CheckpointError(f"{self.run_dir}: its ledger holds groups, but there is no checkpoint left")
            await self._checkpoint(0, {})
            await self._evaluate(0)
        else:
            await self._restore(self._beginning.checkpoint)

    async def _checkpoint(self, train_step: int, metrics: dict[str, float]) -> None:
        """Everything a restart needs beside the ledger. `metrics` are those of the step, which a restart logs again."""
        self._display.stage("checkpoint")
        self._count_wall_time()
        # The producer goes on recording: what the checkpoint names must be durable before it is.
        position = self.parts.buffer.position
        await self._flush_ledger()
        rng_tensors, rng = rng_state()
        state = {
            "ledger_position": position,
            "rng": rng,
            "summary": msgspec.to_builtins(self.summary),
            "metrics": metrics,
        }
        tensors = {"rng": rng_tensors}
        if train_step == 0:
            state["weights"] = await asyncio.to_thread(weights_sums, self.parts.model_dir)
        else:
            tensors |= {"model": dict(self.parts.worker.tensors()), "optimizer": self.parts.worker.state_dict()}
        store = self.parts.checkpoints
        with self._profile.span("write checkpoint"):
            await asyncio.to_thread(store.save, train_step, tensors=tensors, state=state, config=self.config.describe())
        await self.parts.buffer.prune(min(store.steps()))

    async def _restore(self, checkpoint: Checkpoint) -> None:
        """Weights, optimiser and random numbers of the checkpoint; every group from the ledger."""
        state, step, worker = checkpoint.state, checkpoint.step, self.parts.worker
        if step == 0:
            if state["weights"] != await asyncio.to_thread(weights_sums, self.parts.model_dir):
                raise CheckpointError(f"the weights in {self.parts.model_dir} are not those the run began with")
        else:
            worker.load_tensors(checkpoint.tensors("model"))
            worker.load_state_dict(checkpoint.tensors("optimizer"))
        rules = {name: task.runtime.stale_rule for name, task in self.parts.manager.tasks.items()}
        restored = self.parts.buffer.restore(
            step,
            rules,
            position=state["ledger_position"],
            # Before the ledger goes back: a later checkpoint must not be the newest of a lineage that was left.
            accepted=lambda: self.parts.checkpoints.abandon_after(step),
        )
        self.parts.manager.resume(step, restored)
        restore_rng(checkpoint.tensors("rng"), state["rng"])
        self.summary = msgspec.convert(state["summary"], Summary)
        self.summary.steps = step
        self.summary.error = None
        self._last_metrics = state["metrics"]
        if step:
            await self.parts.channel.publish(worker, step)
        for tracker in self._trackers:
            tracker.resume(step)
            if state["metrics"]:
                tracker.log(step, state["metrics"])
        returned = {found.value: n for found, n in restored.returned.items()}
        self._display.note(f"at step {step}; groups given back: {returned or 'none'}")
        if step % self.config.eval_interval == 0:
            await self._evaluate(step)

    # One step.

    async def _train(self, result: ProduceBatchResult, train_step: int, times: StageTimes) -> dict[str, float] | None:
        """Prepare, save trajectories, train, commit, checkpoint. None when refused: the groups were given back."""
        with times.stage("prepare"):
            batch = self._prepare(result.groups, train_step)
            advantages = {answer.rollout_id: float(answer.advantages[0]) for answer in batch.answers}
            await asyncio.to_thread(
                self._trajectories.save, f"step-{train_step}", result.groups, train_step, advantages
            )
        try:
            with times.stage("train"):
                # What is trained must survive this process first.
                await self._flush_ledger()
                started = time.perf_counter()
                metrics = await asyncio.to_thread(self.parts.worker.train, batch)
                self._profile.parts_of(started, metrics)
        except StepRefused as refused:
            await self._give_back(train_step, refused)
            return None
        except BaseException:
            await self.parts.manager.return_batch(train_step)
            raise
        with self._profile.span("commit"):
            await self.parts.manager.commit(train_step)
        self._refused_in_a_row = 0
        self.summary.steps = train_step
        metrics = batch.metrics | result.metrics() | {f"train/{name}": value for name, value in metrics.items()}
        if train_step % self.config.checkpoint_interval == 0:
            with times.stage("checkpoint"):
                await self._checkpoint(train_step, metrics)
        return metrics

    async def _flush_ledger(self) -> None:
        with self._profile.span("ledger flush"):
            await self.parts.buffer.flush()

    def _prepare(self, groups: list[Group], train_step: int) -> TrainBatch:
        if self.config.deterministic:
            # Groups finish in an order that depends on timing; sums of floats depend on that order.
            groups = sorted(groups, key=lambda group: (group[0].task_name, group[0].draw))
        return prepare_batch(
            groups,
            train_step=train_step,
            advantage=self.config.train.advantage,
            max_token_staleness_threshold=self._token_stale_threshold,
            temperature=self._temperature,
        )

    async def _give_back(self, train_step: int, refused: StepRefused) -> None:
        await self.parts.manager.return_batch(train_step)
        self._refused_in_a_row += 1
        self._display.note(f"train step {train_step} refused: {refused}")
        if self._refused_in_a_row >= MAX_REFUSED_IN_A_ROW:
            raise StepRefused(f"train step {train_step} was refused {self._refused_in_a_row} times in a row: {refused}")

    async def _log(self, train_step: int, metrics: dict[str, float], times: StageTimes) -> None:
        seconds = times.seconds
        step_s = sum(seconds.values())
        self.summary.train_seconds += step_s
        judging = {f"judger/{name}": value for name, value in (await self.parts.judgers.metrics()).items()}
        metrics = metrics | judging | times.metrics() | {"time/step_s": step_s}
        if seconds.get("train"):
            metrics["tokens/trained_per_s"] = metrics["trained_tokens"] / seconds["train"]
        self._last_metrics = metrics
        for tracker in self._trackers:
            tracker.log(train_step, metrics)
        self._display.step(train_step, metrics)

    async def _after_step(self, train_step: int) -> None:
        """Evaluate and export when it is time."""
        last = train_step == self.config.total_steps
        if train_step % self.config.eval_interval == 0 and not self._stop_requested and not last:
            await self._evaluate_between_steps(train_step)
        if self.config.hf_interval is not None and train_step % self.config.hf_interval == 0:
            await self._export_hf(train_step)

    async def _evaluate_between_steps(self, model_step: int) -> None:
        await self._evaluate(model_step)

    async def _evaluate(self, model_step: int, *, shares_engine: bool = False) -> None:
        if self.parts.evaluator is None:
            return
        if await self.parts.engine.model_step() != model_step:
            # Between two syncs the engine is behind; what is measured must be what is named.
            await self.parts.channel.publish(self.parts.worker, model_step)
        times = StageTimes(self._display, self._profile, lane=EVALUATION)
        with times.stage("eval"):
            evaluation = await self.parts.evaluator.evaluate(model_step, shares_engine=shares_engine)
            await asyncio.to_thread(self._trajectories.save, f"eval-{model_step}", evaluation.groups, model_step + 1)
        metrics = evaluation.metrics | times.metrics()
        for tracker in self._trackers:
            tracker.log(model_step, metrics)
        self._display.evaluated(model_step, metrics)
        accuracy, greedy = metrics.get("eval/accuracy"), metrics.get("eval/greedy_accuracy")
        failed = metrics.get("eval/failed_prompts", 0.0) + metrics.get("eval/greedy_failed_prompts", 0.0)
        self.summary.eval_failed_prompts = int(failed)
        if model_step == 0:
            self.summary.eval_accuracy_before, self.summary.eval_greedy_before = accuracy, greedy
        else:
            self.summary.eval_accuracy_after, self.summary.eval_greedy_after = accuracy, greedy
            self.summary.eval_after_step = model_step

    # The run directory.

    def _open_run_dir(self) -> None:
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RefusedError(f"run directory {self.run_dir} cannot be used: {error}") from error
        self._write("config.json", self.config.describe())
        self._trackers = [tracker.build(self.run_dir, run_name=self.run_dir.name) for tracker in self.config.trackers]

    def _write(self, name: str, content: Any) -> None:
        path = self.run_dir / name
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(content, enc_hook=repr), indent=2) + b"\n")
        except OSError as error:
            raise StorageError(f"{path} could not be written: {error}") from error

    def _write_profile(self) -> None:
        """Also of a run that failed. What shows where time went must not be what ends it."""
        try:
            self._profile.write(self.run_dir / "profile.json")
        except OSError as error:
            self._display.note(f"the profile could not be written: {error}")

    async def _export_hf(self, train_step: int | None = None) -> None:
        directory = self.run_dir / "hf" / ("final" if train_step is None else f"step-{train_step}")
        self._display.stage("export")
        with self._profile.span("export"):
            await asyncio.to_thread(self.parts.worker.save_hf, str(directory))
        self.summary.hf_dir = str(directory)

    @contextlib.contextmanager
    def _warnings(self) -> Iterator[None]:
        """What parts of Penstock warn of is shown where the run is shown."""
        handler = _ToDisplay(self._display)
        logger = logging.getLogger("penstock")
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)

    # Signals.

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The first signal asks for an orderly end, the second cancels the run."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        main = asyncio.current_task()
        assert main is not None

        def stop(name: str) -> None:
            if self._stop_requested:
                self._display.note(f"{name}: stopping now; the run can be resumed.")
                main.cancel()
                return
            self._stop_requested = True
            self._display.note(f"{name}: finishing the step and writing a checkpoint. Once more to stop now.")

        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, stop, number.name)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


class _ToDisplay(logging.Handler):
    def __init__(self, display: Display) -> None:
        super().__init__(logging.WARNING)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        self._display.note(f"{record.levelname.lower()}: {record.getMessage()}")
