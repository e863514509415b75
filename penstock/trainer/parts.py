"""The parts of a run, built in the order in which they can fail: names, datasets, then models."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from penstock.data import PromptSet, check_same_prompts
from penstock.judger import JudgerSet, check_judgers
from penstock.learn.worker import TorchTrainWorker
from penstock.models import load_tokenizer, model_context, resolve_model
from penstock.ports import Engine, Tokenizer, WeightChannel
from penstock.produce import AgentLoopManager, World, load_prompts
from penstock.produce.watchdog import OnProgress
from penstock.replay import ReplayBuffer
from penstock.replay.disk import Disk
from penstock.trainer.checkpoints import CheckpointStore
from penstock.trainer.config import RLTrainerConfig
from penstock.trainer.display import Display, make_display
from penstock.trainer.evaluator import Evaluator
from penstock.trainer.files import Files
from penstock.trainer.profile import OFF, Profile
from penstock.trainer.resume import Beginning, find_beginning
from penstock.weights import InProcessChannel, SharedMemoryChannel

TrainerT = TypeVar("TrainerT", covariant=True)

EVAL_SEED = 1_000_003
"""Added to the run's seed, so that evaluation does not replay the random numbers of training."""


class Parts(msgspec.Struct, kw_only=True):
    engine: Engine
    channel: WeightChannel
    judgers: JudgerSet
    worker: TorchTrainWorker
    buffer: ReplayBuffer
    manager: AgentLoopManager
    evaluator: Evaluator | None
    checkpoints: CheckpointStore
    prompts: dict[str, PromptSet]
    model_dir: Path
    profile: Profile = OFF

    async def close(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for part in (self.buffer, self.judgers, self.channel, self.engine):
                stack.push_async_callback(part.close)


class _Opened:
    """The model's directory and what is known without loading its weights."""

    def __init__(self, config: RLTrainerConfig, display: Display, profile: Profile = OFF) -> None:
        display.stage("load")
        self.config = config
        self.display = display
        self.profile = profile
        self.model_dir = resolve_model(config.model)
        self.tokenizer: Tokenizer = load_tokenizer(self.model_dir)
        self.context = model_context(self.model_dir)
        self.judgers: JudgerSet = profile.judgers()
        eval_tasks = config.evaluator.tasks if config.evaluator is not None else []
        self.eval_prompts = load_prompts(eval_tasks, self.tokenizer, context=self.context)

    def engine(self) -> Engine:
        return self.config.build_engine(self.model_dir, self.tokenizer)

    def evaluator(self, engine: Engine, dead_letters: Path | None = None) -> Evaluator | None:
        if self.config.evaluator is None:
            return None
        return Evaluator(
            self.config.evaluator,
            self.eval_prompts,
            engine=engine,
            tokenizer=self.tokenizer,
            judgers=self.judgers,
            seed=self.config.seed + EVAL_SEED,
            dead_letters=dead_letters,
            on_progress=self.on_progress,
        )

    @property
    def on_progress(self) -> OnProgress:
        return lambda task, done, target, details: self.display.progress(task, done, target, **details)


class NewTrainer(Protocol[TrainerT]):
    """A trainer's class."""

    def __call__(
        self, config: RLTrainerConfig, parts: Parts, run_dir: Path, display: Display, beginning: Beginning
    ) -> TrainerT: ...


def build_trainer(
    config: RLTrainerConfig,
    trainer: NewTrainer[TrainerT],
    run_dir: Path,
    display: Display | None,
    resume: str | None,
    *,
    disk: Disk | None = None,
    files: Files | None = None,
    profile: bool = False,
) -> TrainerT:
    """Check everything, find where to begin, scan the datasets, load the model, open the run directory; in that order.

    `disk` is how the ledger reaches the disk and `files` how checkpoints do, for fault injection. With `profile` the
    run writes `profile.json`.
    Raises RefusedError; until the datasets are scanned nothing is written, and no weight is loaded.
    """
    config.check()
    display = display or make_display(terminal=False)
    checkpoints = CheckpointStore(run_dir / "checkpoints", keep=config.keep_checkpoints, files=files)
    beginning = find_beginning(run_dir, resume, config.describe(), checkpoints)
    opened = _Opened(config, display, Profile() if profile else OFF)
    prompts = load_prompts(config.manager.task_list, opened.tokenizer, context=opened.context)
    if beginning.checkpoint is not None:
        check_same_prompts(run_dir, prompts)
    parts = _build_parts(opened, prompts, run_dir, checkpoints, disk)
    return trainer(config, parts, run_dir, display, beginning)


def _build_parts(
    opened: _Opened, prompts: dict[str, PromptSet], run_dir: Path, checkpoints: CheckpointStore, disk: Disk | None
) -> Parts:
    config, profile = opened.config, opened.profile
    for task, loaded in (prompts | opened.eval_prompts).items():
        if loaded.dropped or loaded.quarantined:
            left_out = f"{loaded.dropped} over-long prompts dropped, {loaded.quarantined} bad rows set aside"
            opened.display.note(f"task {task!r}: {len(loaded)} prompts; {left_out}")
    _try_judgers(opened, prompts)
    worker = config.train.build(
        opened.model_dir,
        total_steps=config.total_steps,
        deterministic=config.deterministic,
        threads=config.threads()[0],
    )
    engine = opened.engine()
    buffer = config.replay_buffer.build(run_dir, disk=disk)
    # Those who ask for answers; the weight channel and the trainer have the engine itself.
    asked = profile.wrap_engine(engine)
    world = World(
        engine=asked,
        tokenizer=opened.tokenizer,
        judgers=opened.judgers,
        buffer=buffer,
        prompts=prompts,
        run_seed=config.seed,
        sync_weights_interval=config.sync_weights_interval,
        dead_letters=run_dir / "dead_letters.jsonl",
        on_progress=opened.on_progress,
    )
    return Parts(
        engine=engine,
        channel=(SharedMemoryChannel if config.engine.process else InProcessChannel)(
            engine, timeout_s=config.sync_timeout_s
        ),
        judgers=opened.judgers,
        worker=worker,
        buffer=buffer,
        manager=config.manager.build(world),
        evaluator=opened.evaluator(asked, run_dir / "eval_dead_letters.jsonl"),
        checkpoints=checkpoints,
        prompts=prompts,
        model_dir=opened.model_dir,
        profile=profile,
    )


def _try_judgers(opened: _Opened, prompts: dict[str, PromptSet]) -> None:
    evaluator = opened.config.evaluator
    tasks = [(task, prompts[task.task_name]) for task in opened.config.manager.task_list]
    tasks += [(task, opened.eval_prompts[task.task_name]) for task in (evaluator.tasks if evaluator else [])]
    check_judgers(
        (task.task_name, opened.judgers.get(task.judger), found.unrendered)
        for task, found in tasks
        if task.judger is not None
    )


def evaluate_once(config: RLTrainerConfig, display: Display) -> dict[str, float]:
    """The evaluator alone, on the weights that `config.model` names."""
    opened = _Opened(config, display)
    engine = opened.engine()
    evaluator = opened.evaluator(engine)
    assert evaluator is not None, "nothing to evaluate"

    async def evaluate() -> dict[str, float]:
        try:
            display.stage("evaluate")
            return (await evaluator.evaluate(0)).metrics
        finally:
            await engine.close()
            await opened.judgers.close()

    return asyncio.run(evaluate())
