"""A trainer: hands the parts of a run to a loop, and does what comes before and after it.

    begin     checkpoint 0 and the first evaluation, or everything from the checkpoint that is resumed
    loop      `loops.py`; the trainers differ in which of the two it is
    end       the last checkpoint and the export, the last evaluation beside them, `summary.json`

The run directory is held by this process (its ledger's lock) before anything is written into it.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgspec

from penstock.data import remember_prompts
from penstock.errors import PenstockError, StorageError
from penstock.events import Note, RunBegan, RunEnded, StepTrained, Warned
from penstock.learn.batch import BatchSettings
from penstock.rollout import storable
from penstock.trainer.checkpointing import RunCheckpointer
from penstock.trainer.config import RLTrainerConfig
from penstock.trainer.control import EngineControl
from penstock.trainer.evaluation import RunEvaluator, StandingEvaluator
from penstock.trainer.gauges import Gauges
from penstock.trainer.heartbeat import Heartbeat
from penstock.trainer.index import RolloutIndex
from penstock.trainer.loops import Devices, LoopPorts, Schedule
from penstock.trainer.observers import EVENTS_FILE, EventFile, Observers
from penstock.trainer.parts import Parts
from penstock.trainer.printed import PRINTED_FILE, Printed
from penstock.trainer.resume import Beginning
from penstock.trainer.signals import Stop, stopped_by_signals
from penstock.trainer.site import ends_with
from penstock.trainer.step import TrainStep
from penstock.trainer.summary import Summary, SummarySink
from penstock.trainer.trajectories import Trajectories

STALLED_FILE = "stalled.txt"
"""Where the event loop hangs, when it does."""


class RLTrainer(abc.ABC):
    """Subclasses choose the loop."""

    def __init__(
        self, config: RLTrainerConfig, parts: Parts, run_dir: Path, observers: Observers, beginning: Beginning
    ) -> None:
        self.config = config
        self.parts = parts
        self.run_dir = run_dir
        self._observers = observers
        self._beginning = beginning
        self._stop = Stop()
        self._accepted = beginning.checkpoint is None
        """Whether the run directory is this run's to write: what is resumed may still turn out not to fit."""
        self._summary = SummarySink()
        self._schedule = Schedule(
            total_steps=config.total_steps,
            batch_size=config.train_batch_size,
            sync_weights_interval=config.sync_weights_interval,
            eval_interval=config.eval_interval,
            checkpoint_interval=config.checkpoint_interval,
            hf_interval=config.hf_interval,
            exact=config.deterministic,
        )
        self._checkpointer = RunCheckpointer(
            parts.checkpoints,
            parts.worker,
            parts.buffer,
            parts.manager,
            self._summary,
            observers,
            run_dir=run_dir,
            made_from=parts.made_from,
            arithmetic=parts.arithmetic,
            config=config.describe(),
        )
        index = RolloutIndex(run_dir, observer=observers)
        trajectories = Trajectories(run_dir / "trajectories", parts.tokenizer, index)
        self._learner = TrainStep(
            parts.worker,
            parts.buffer,
            trajectories,
            _batch_settings(config),
            observers,
            deterministic=config.deterministic,
            teachers=parts.teachers,
        )
        self._evaluator: RunEvaluator | None = None
        self._standing: StandingEvaluator | None = None
        if parts.evaluator is not None:
            self._evaluator = RunEvaluator(parts.evaluator, trajectories, observers)
            self._standing = StandingEvaluator(self._evaluator, self._stop, observers)

    @property
    def summary(self) -> Summary:
        return self._summary.summary

    @property
    def told_to_end(self) -> bool:
        """Whether a signal asked for the end, also of a run that then failed."""
        return self._stop.requested

    def fit(self) -> Summary:
        """Train. Returns the summary, also in the run directory; `interrupted` says whether it was cut short."""
        return asyncio.run(self._fit())

    @abc.abstractmethod
    async def _loop(self, ports: LoopPorts, begin: int) -> int:
        """All train steps after `begin`, until done or until a stop is requested. Returns the last one trained."""

    def _devices(self) -> Devices | None:
        """What engines and trainer take turns on, if they do."""
        return None

    def _control(self) -> EngineControl:
        fixed = "engines come and go in a disaggregated run; in a colocated one they share the trainer's devices"
        engines = self.parts.engine
        return EngineControl(self.run_dir, engines, self._observers, fixed=fixed if self._devices() else "")

    async def _fit(self) -> Summary:
        heartbeat = Heartbeat(asyncio.get_running_loop(), self.run_dir / STALLED_FILE)
        with self._observers.warnings(), stopped_by_signals(self._stop, self._observers), heartbeat:
            control = self._control()
            try:
                self._open_run_dir()
                await control.open()
                async with ends_with(self.parts.site, "; resume the run when there is one again"):
                    await self._run()
                self._end(error=None)
                return self.summary
            except PenstockError as error:
                with contextlib.suppress(StorageError):
                    self._end(error=storable(f"{type(error).__name__}: {error}"))
                raise
            finally:
                # The parts first: what they say while they end is worth showing.
                async with contextlib.AsyncExitStack() as stack:
                    # In a thread: a tracker that sends what it has may take minutes.
                    stack.push_async_callback(asyncio.to_thread, self._observers.close)
                    stack.push_async_callback(self.parts.close)
                    stack.push_async_callback(control.close)

    async def _run(self) -> None:
        async with self._checkpointer.writing():
            begin = await self._begin()
            step = await self._loop(self._ports(), begin)
            self.summary.interrupted = self._stop.requested and step < self.config.total_steps
            self._checkpointer.keep_last(step, self._summary.last_metrics)
            if self._standing is not None and not self.summary.interrupted and self.summary.eval_after_step != step:
                await self._standing.evaluate(step)
                # Given up: that is still to be done.
                self.summary.interrupted = self._stop.requested and self.summary.eval_after_step != step

    def _ports(self) -> LoopPorts:
        devices = self._devices()
        return LoopPorts(
            producer=self.parts.manager,
            learner=self._learner,
            channel=self.parts.channel,
            checkpointer=self._checkpointer,
            evaluator=self._standing if devices is not None else self._evaluator,
            devices=devices,
            observer=self._observers,
            gauges=Gauges(self.parts.judgers, self.parts.engine if devices is None else None),
            stop=self._stop,
        )

    # Beginning.

    async def _begin(self) -> int:
        """The step to go on from, whose weights the engines serve."""
        for note in self._beginning.notes:
            self._observers.notice(Note(text=note))
        if self.parts.teachers is not None:
            await self.parts.teachers.check()
        checkpoint = self._beginning.checkpoint
        if checkpoint is None:
            await self._began(resumed_from=None)
            await self._checkpointer.keep(0, {}, checkpoint=True, export=False)
            if self._standing is not None:
                await self._standing.evaluate(0)
            return 0
        step = checkpoint.step
        # First: until then the files of the run that is resumed stay as they are.
        metrics = await self._checkpointer.restore(checkpoint)
        self._accepted = True
        await self._began(resumed_from=step)
        if step:
            await self.parts.channel.publish(step)
        if metrics:
            # Trackers forgot this step: it may have been logged, or not.
            self._observers.notice(StepTrained(train_step=step, metrics=metrics))
        since = self._schedule.last_sync_before(step)
        # The trackers forgot what was measured of these weights: by the schedule, or because they were the last.
        looked_at = checkpoint.config["total_steps"] == step or self._schedule.evaluates(step, since=since)
        if self._standing is not None and (not step or looked_at):
            await self._standing.evaluate(step)
        if step and self._schedule.exports(step):
            await self._checkpointer.make_up_export(step)
        return step

    async def _began(self, resumed_from: int | None) -> None:
        self._write("config.json", self.config.describe())
        # Before the first draw: what a later resume is compared with.
        await asyncio.to_thread(remember_prompts, self.run_dir, self.parts.prompts)
        self._observers.notice(
            RunBegan(
                run_name=self.run_dir.name,
                model=self.config.model,
                total_steps=self.config.total_steps,
                resumed_from=resumed_from,
            )
        )

    def _open_run_dir(self) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._observers.add("summary", self._summary)
        try:
            self._observers.add(EVENTS_FILE, EventFile(self.run_dir / EVENTS_FILE))
        except OSError as error:
            raise StorageError(f"{self.run_dir / EVENTS_FILE} cannot be opened: {error}") from error
        self._observers.add(PRINTED_FILE, Printed(self.run_dir, self._observers))
        for number, tracker in enumerate(self.config.trackers):
            name = f"tracker {number} ({type(tracker).__name__})"
            try:
                self._observers.add(name, tracker.sink(self.run_dir, run_name=self.run_dir.name))
            except StorageError:
                raise
            except Exception as error:  # a service may raise anything; what shows a run never ends it
                text = f"{name} cannot be used; the run goes on without it. {type(error).__name__}: {error}"
                self._observers.notice(Warned(text=text, source=name))

    # Ending.

    def _end(self, error: str | None) -> None:
        self.summary.error = error
        summary = self._summary.plain()
        if self._accepted:
            self._write("summary.json", summary)
        steps, interrupted = self.summary.steps, self.summary.interrupted
        self._observers.notice(RunEnded(steps=steps, interrupted=interrupted, error=error, summary=summary))

    def _write(self, name: str, content: Any) -> None:
        path = self.run_dir / name
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(content, enc_hook=repr), indent=2) + b"\n")
        except OSError as error:
            raise StorageError(f"{path} could not be written: {error}") from error


def _batch_settings(config: RLTrainerConfig) -> BatchSettings:
    train, interval = config.train, config.sync_weights_interval
    tasks = {task.task_name: task for task in config.manager.task_list}
    params = {name: task.agent_loop_config.sample_params for name, task in tasks.items()}
    rules = {name: task.produce_strategy_config.stale_rule(interval) for name, task in tasks.items()}
    return BatchSettings(
        advantage=train.advantage,
        gamma=train.gamma,
        temperatures={name: param.temperature for name, param in params.items()},
        token_stale_thresholds={name: rule.token_stale_threshold for name, rule in rules.items()},
        max_tokens={name: param.max_tokens for name, param in params.items()},
        overlong=train.overlong,
        kl=train.kl,
        distill_coef=config.distillation.coef if config.distillation is not None else 1.0,
    )
