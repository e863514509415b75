"""The parts of a run, built in the order in which they can fail: names, datasets, then models."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from penstock.data import PromptSet, check_same_prompts
from penstock.engine.controller import RolloutController
from penstock.errors import RefusedError, StorageError
from penstock.events import Note, StageBegan
from penstock.judger import JudgerSet, check_judgers
from penstock.learn.worker import TorchTrainWorker
from penstock.models import context_note, load_tokenizer, model_context, resolve_model
from penstock.ports import Engine, Tokenizer, WeightChannel
from penstock.produce import AgentLoopManager, World, load_prompts
from penstock.replay import ReplayBuffer
from penstock.replay.disk import Disk
from penstock.trainer.checkpoints import CheckpointStore
from penstock.trainer.config import RLTrainerConfig, plain_observers
from penstock.trainer.evaluator import Evaluator
from penstock.trainer.files import Files
from penstock.trainer.observers import Observers
from penstock.trainer.profile import Profile
from penstock.trainer.resume import Beginning, find_beginning, require_unchanged
from penstock.trainer.trajectories import Trajectories

TrainerT = TypeVar("TrainerT", covariant=True)

EVAL_SEED = 1_000_003
"""Added to the run's seed, so that evaluation does not replay the random numbers of training."""


class Closable(Protocol):
    async def close(self) -> None: ...


class Parts(msgspec.Struct, kw_only=True):
    """What a run is made of. Whoever has them closes them."""

    engine: RolloutController
    channel: WeightChannel
    judgers: JudgerSet
    worker: TorchTrainWorker
    buffer: ReplayBuffer
    manager: AgentLoopManager
    evaluator: Evaluator | None
    checkpoints: CheckpointStore
    prompts: dict[str, PromptSet]
    tokenizer: Tokenizer
    model_dir: Path

    async def close(self) -> None:
        """Everything, whatever one of them raises; the ledger last, because it holds what counts."""
        parts: list[Closable | None] = [
            self.buffer,
            self.worker,
            self.judgers,
            self.channel,
            self.engine,
            self.evaluator,
            self.manager,
        ]
        async with contextlib.AsyncExitStack() as stack:
            for part in parts:
                if part is not None:
                    stack.push_async_callback(part.close)


class _Opened:
    """The model's directory and what is known without loading its weights."""

    def __init__(self, config: RLTrainerConfig, observers: Observers, profile: Profile | None = None) -> None:
        observers.notice(StageBegan(stage="load"))
        self.config = config
        self.observers = observers
        self.model_dir = resolve_model(config.model)
        self.tokenizer: Tokenizer = load_tokenizer(self.model_dir)
        self.context = model_context(self.model_dir)
        if (note := context_note(self.model_dir)) is not None:
            observers.notice(Note(text=note))
        self.judgers: JudgerSet = profile.judgers() if profile is not None else JudgerSet()
        tasks = config.evaluator.eval_tasks if config.evaluator is not None else []
        self.eval_prompts = load_prompts([task.spec() for task in tasks], self.tokenizer, context=self.context)

    def scanned(self, rows: int) -> None:
        self.observers.notice(StageBegan(stage=f"scan, {rows:,} rows"))

    def engine(self) -> RolloutController:
        config = self.config
        return config.engines.build(
            str(self.model_dir),
            self.tokenizer,
            deterministic=config.deterministic,
            threads=config.threads()[1],
            observer=self.observers,
        )

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
            observer=self.observers,
        )


class NewTrainer(Protocol[TrainerT]):
    """A trainer's class."""

    def __call__(
        self, config: RLTrainerConfig, parts: Parts, run_dir: Path, observers: Observers, beginning: Beginning
    ) -> TrainerT: ...


def build_trainer(
    config: RLTrainerConfig,
    trainer: NewTrainer[TrainerT],
    run_dir: Path,
    observers: Observers | None,
    resume: str | None,
    *,
    disk: Disk | None = None,
    files: Files | None = None,
    profile: bool = False,
) -> TrainerT:
    """Check everything, find where to begin, scan the datasets, load the model, take the run directory; in that order.

    Without `observers` the run is told in lines on standard output. `disk` is how the ledger reaches the disk and
    `files` how checkpoints do, for fault injection. With `profile` the run writes `profile.json`.

    Raises RefusedError; until the datasets are scanned nothing is written, and no weight is loaded. What was built
    when something is refused is closed again.
    """
    config.check()
    observers = observers or plain_observers()
    checkpoints = CheckpointStore(run_dir / "checkpoints", keep=config.keep_checkpoints, files=files)
    beginning = find_beginning(run_dir, resume, config.describe(), checkpoints)
    recorded = Profile(run_dir / "profile.json") if profile else None
    with contextlib.ExitStack() as undo:
        parts = _build_parts(
            config, run_dir, observers, checkpoints, disk, recorded, undo, resumed=beginning.checkpoint is not None
        )
        # Somebody else may have begun, and even ended, a run there while the model was loaded.
        require_unchanged(beginning, run_dir, parts.buffer, checkpoints)
        if recorded is not None:
            observers.add("profile", recorded)
        built = trainer(config, parts, run_dir, observers, beginning)
        undo.pop_all()
    return built


def _build_parts(
    config: RLTrainerConfig,
    run_dir: Path,
    observers: Observers,
    checkpoints: CheckpointStore,
    disk: Disk | None,
    profile: Profile | None,
    undo: contextlib.ExitStack,
    *,
    resumed: bool,
) -> Parts:
    opened = _Opened(config, observers, profile)
    prompts = load_prompts(
        config.manager.task_list, opened.tokenizer, context=opened.context, on_progress=opened.scanned
    )
    if resumed:
        check_same_prompts(run_dir, prompts)
    for task, loaded in (prompts | opened.eval_prompts).items():
        if loaded.dropped or loaded.quarantined:
            left_out = f"{loaded.dropped} over-long prompts dropped, {loaded.quarantined} bad rows set aside"
            observers.notice(Note(text=f"task {task!r}: {len(loaded)} prompts; {left_out}"))
    _try_judgers(opened, prompts)
    worker = config.train.build(
        opened.model_dir,
        total_steps=config.total_steps,
        deterministic=config.deterministic,
        threads=config.threads()[0],
    )
    undo.callback(_close_now, worker)
    engine = opened.engine()
    undo.callback(_close_now, engine)
    buffer = config.replay_buffer.build(run_dir, disk=disk)
    undo.callback(_close_now, buffer)
    # Those who ask for answers; the weight channel and the trainer have the engine itself.
    asked = profile.wrap_engine(engine) if profile is not None else engine
    world = World(
        engine=asked,
        tokenizer=opened.tokenizer,
        judgers=opened.judgers,
        buffer=buffer,
        prompts=prompts,
        run_seed=config.seed,
        sync_weights_interval=config.sync_weights_interval,
        dead_letters=run_dir / "dead_letters.jsonl",
        observer=observers,
        turn_log=buffer,
    )
    return Parts(
        engine=engine,
        channel=config.engines.build_channel(worker.weights, engine, run_dir=run_dir, timeout_s=config.sync_timeout_s),
        judgers=opened.judgers,
        worker=worker,
        buffer=buffer,
        manager=config.manager.build(world),
        evaluator=opened.evaluator(asked, run_dir / "eval_dead_letters.jsonl"),
        checkpoints=checkpoints,
        prompts=prompts,
        tokenizer=opened.tokenizer,
        model_dir=opened.model_dir,
    )


def _try_judgers(opened: _Opened, prompts: dict[str, PromptSet]) -> None:
    evaluator = opened.config.evaluator
    tasks = [(task, prompts[task.task_name]) for task in opened.config.manager.task_list]
    tasks += [
        (task.spec(), opened.eval_prompts[task.task_name]) for task in (evaluator.eval_tasks if evaluator else [])
    ]
    check_judgers(
        (task.task_name, opened.judgers.get(task.judger), found.unrendered)
        for task, found in tasks
        if task.judger is not None
    )


def _close_now(part: Closable) -> None:
    """Of a part that no event loop has used yet; a thread of its own, because the caller's may run one."""
    closing = threading.Thread(target=lambda: asyncio.run(part.close()), name="closing what was refused")
    closing.start()
    closing.join()


def evaluate_once(config: RLTrainerConfig, observers: Observers, out_dir: Path | None) -> dict[str, float]:
    """The evaluator alone, on the weights that `config.model` names. See `RLTrainerConfig.evaluate`."""
    if out_dir is not None:
        _require_writable(out_dir)
    opened = _Opened(config, observers)
    engine = opened.engine()
    evaluator = opened.evaluator(engine)
    assert evaluator is not None, "nothing to evaluate"

    async def evaluate() -> dict[str, float]:
        async with contextlib.AsyncExitStack() as stack:
            for part in (opened.judgers, engine, evaluator):
                stack.push_async_callback(part.close)
            observers.notice(StageBegan(stage="evaluate"))
            evaluation = await evaluator.evaluate(0)
            if out_dir is not None:
                Trajectories(out_dir, opened.tokenizer).save_as(ANSWERS_FILE, evaluation.groups)
                _write_result(out_dir / RESULT_FILE, config.model, evaluation.metrics)
            return evaluation.metrics

    return asyncio.run(evaluate())


ANSWERS_FILE, RESULT_FILE = "answers.jsonl", "result.json"


def _require_writable(directory: Path) -> None:
    """Now, not when the figures of an hour are there. Raises RefusedError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / RESULT_FILE
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise RefusedError(f"{directory} cannot be written to: {error}; name another directory") from error


def _write_result(path: Path, model: str, metrics: dict[str, float]) -> None:
    try:
        path.write_bytes(
            msgspec.json.format(msgspec.json.encode({"model": model, "metrics": metrics}), indent=2) + b"\n"
        )
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error}") from error
