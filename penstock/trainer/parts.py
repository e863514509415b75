"""The parts of a run, built in the order in which they can fail: names, datasets, then models."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from penstock.data import PromptSet, check_same_prompts
from penstock.errors import ConfigError, RefusedError, StorageError
from penstock.events import Note, StageBegan, Warned
from penstock.judger import JudgerSet, RunEngine, check_judgers
from penstock.learn.batch import TrainBatch
from penstock.models import context_note, load_tokenizer, model_context, resolve_model
from penstock.ports import Engine, Engines, Local, Tokenizer, TrainWorker, WeightChannel
from penstock.produce import AgentLoopManager, World, check_templates, load_prompts
from penstock.replay import ReplayBuffer
from penstock.replay.disk import Disk
from penstock.trainer.arithmetic import Arithmetic, find_arithmetic, kernels_note
from penstock.trainer.checkpoints import Checkpoint, CheckpointStore
from penstock.trainer.config import RLTrainerConfig, plain_observers
from penstock.trainer.distillation import Teachers
from penstock.trainer.evaluator import Evaluator
from penstock.trainer.files import Files
from penstock.trainer.observers import Observers
from penstock.trainer.origin import ModelOrigin, model_origin, require_same_model
from penstock.trainer.printed import PRINTED_FILE, Printed, last_printed
from penstock.trainer.profile import Profile
from penstock.trainer.resume import Beginning, find_beginning, require_unchanged
from penstock.trainer.site import LocalSite, RunContext, Site, ends_with
from penstock.trainer.trajectories import Trajectories

TrainerT = TypeVar("TrainerT", covariant=True)

EVAL_SEED = 1_000_003
"""Added to the run's seed, so that evaluation does not replay the random numbers of training."""
SCAN_TOLD_EVERY_S = 1.0


class Closable(Protocol):
    async def close(self) -> None: ...


class Parts(msgspec.Struct, kw_only=True):
    """What a run is made of. Whoever has them closes them."""

    engine: Engines
    channel: WeightChannel
    judgers: JudgerSet
    worker: TrainWorker[TrainBatch]
    buffer: ReplayBuffer
    manager: AgentLoopManager
    evaluator: Evaluator | None
    teachers: Teachers | None
    checkpoints: CheckpointStore
    prompts: dict[str, PromptSet]
    tokenizer: Tokenizer
    made_from: ModelOrigin
    arithmetic: Arithmetic
    site: Site
    """Where they live."""

    async def close(self) -> None:
        """Everything, whatever one of them raises; the ledger last, because it holds what counts."""
        parts: list[Closable | None] = [
            self.buffer,
            self.worker,
            self.judgers,
            self.channel,
            self.engine,
            self.evaluator,
            self.teachers,
            self.manager,
        ]
        async with contextlib.AsyncExitStack() as stack:
            for part in parts:
                if part is not None:
                    stack.push_async_callback(part.close)


class _Opened:
    """The model's directory and what is known without loading its weights."""

    def __init__(
        self,
        config: RLTrainerConfig,
        observers: Observers,
        site: Site,
        directory: Path | None,
        *,
        trains: bool,
        profile: Profile | None = None,
        resumed: Checkpoint | None = None,
    ) -> None:
        """`directory` is where the run, or what an evaluation comes to, is kept."""
        self.config = config
        self.observers = observers
        self.site = site
        self.loading("the tokenizer")
        self.model_dir = resolve_model(config.model)
        self.tokenizer: Tokenizer = load_tokenizer(self.model_dir)
        self.context = model_context(self.model_dir)
        saved = None if resumed is None else resumed.state
        self.arithmetic, chosen = find_arithmetic(config, self.model_dir, saved, trains=trains)
        if chosen is not None:
            observers.notice(chosen)
        self.run = RunContext(
            config=self.arithmetic.settle(config),
            model_dir=self.model_dir,
            tokenizer=self.tokenizer,
            observer=observers,
            run_dir=directory if trains else None,
        )
        for note in (kernels_note(config), context_note(self.model_dir)):
            if note is not None:
                observers.notice(Note(text=note))
        printed = str(directory / PRINTED_FILE) if directory is not None else None
        self._run_engine = RunEngine()
        self.judger_ports = {"engine": self._run_engine, "tokenizer": self.tokenizer}
        new_judgers = JudgerSet if profile is None else profile.judgers
        self.judgers: JudgerSet = new_judgers(site.placement, output=printed, ports=self.judger_ports)
        tasks = [task.spec() for task in (config.evaluator.eval_tasks if config.evaluator is not None else [])]
        for text in check_templates([*config.manager.task_list, *tasks], self.tokenizer):
            observers.notice(Warned(text=text, source="chat template"))
        self._told_of_scan = -SCAN_TOLD_EVERY_S
        self.eval_prompts = load_prompts(tasks, self.tokenizer, context=self.context, on_progress=self.scanned)

    def scanned(self, rows: int) -> None:
        """Now and then: millions of rows would fill what is kept of the events before a run begins."""
        now = time.monotonic()
        if now - self._told_of_scan >= SCAN_TOLD_EVERY_S:
            self._told_of_scan = now
            self.observers.notice(StageBegan(stage="scan", detail=f"{rows:,} rows"))

    def loading(self, what: str) -> None:
        self.observers.notice(StageBegan(stage="load", detail=f"{what} of {self.config.model}"))

    def origin(self) -> ModelOrigin:
        self.loading("the checksums")
        kl, distillation = self.config.train.kl, self.config.distillation
        beside = (
            {f"the teacher {teacher.model}": teacher.model for teacher in distillation.teacher_list}
            if distillation
            else {}
        )
        if kl is not None and kl.reference is not None:
            beside["the reference"] = kl.reference
        return model_origin(self.model_dir, {name: resolve_model(model) for name, model in beside.items()})

    def engines(self) -> Engines:
        self.loading("the engine")
        engines = self.site.build_engines(self.run)
        self._run_engine.bind(engines)
        return engines

    def evaluator(self, engine: Engine, dead_letters: Path | None = None) -> Evaluator | None:
        if self.config.evaluator is None:
            return None
        return Evaluator(
            self.config.evaluator,
            self.eval_prompts,
            engine=engine,
            tokenizer=self.tokenizer,
            judgers=self.judgers,
            placement=self.site.placement,
            seed=self.config.seed + EVAL_SEED,
            dead_letters=dead_letters,
            observer=self.observers,
            context=self.context,
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
    allow_change: Sequence[str] = (),
    site: Site | None = None,
    disk: Disk | None = None,
    files: Files | None = None,
    profile: bool = False,
) -> TrainerT:
    """Check everything, find where to begin, scan the datasets, load the model, take the run directory; in that order.

    Without `observers` the run is told in lines on standard output, without a `site` it is on this machine. `disk` is
    how the ledger reaches the disk and `files` how checkpoints do, for fault injection. With `profile` the run writes
    `profile.json`.

    Raises RefusedError; until the datasets are scanned nothing is written, and no weight is loaded. What was built
    when something is refused is closed again.
    """
    site = site or LocalSite()
    _check(config, site)
    observers = observers or plain_observers()
    checkpoints = CheckpointStore(run_dir / "checkpoints", keep=config.keep_checkpoints, files=files)
    beginning = find_beginning(run_dir, resume, config.describe(), checkpoints, allow_change=allow_change)
    site.prepare(config)
    recorded = Profile(run_dir / "profile.json") if profile else None
    with observers.warnings(), contextlib.ExitStack() as undo:
        parts = _build_parts(
            _Opened(config, observers, site, run_dir, trains=True, profile=recorded, resumed=beginning.checkpoint),
            checkpoints,
            disk,
            recorded,
            undo,
            resumed=beginning.checkpoint,
        )
        # Somebody else may have begun, and even ended, a run there while the model was loaded.
        require_unchanged(beginning, run_dir, parts.buffer, checkpoints)
        if recorded is not None:
            observers.add("profile", recorded)
        built = trainer(config, parts, run_dir, observers, beginning)
        undo.pop_all()
    return built


def _check(config: RLTrainerConfig, site: Site) -> None:
    """Raises ConfigError with the problems of the configuration, and with what the site does not have."""
    problems: list[str] = []
    try:
        config.check()
    except ConfigError as error:
        problems += error.problems
    problems += site.problems(config)
    if problems:
        raise ConfigError(problems)


def _build_parts(
    opened: _Opened,
    checkpoints: CheckpointStore,
    disk: Disk | None,
    profile: Profile | None,
    undo: contextlib.ExitStack,
    *,
    resumed: Checkpoint | None,
) -> Parts:
    config, observers, run, site = opened.config, opened.observers, opened.run, opened.site
    run_dir = run.run_dir
    assert run_dir is not None
    made_from = opened.origin()
    if resumed is not None:
        require_same_model(resumed.state, resumed.step, made_from)
    prompts = _load_prompts(opened, run_dir, resumed=resumed is not None)
    if config.distillation is not None:
        answers = [task.agent_loop_config.sample_params.max_tokens for task in config.manager.task_list]
        config.distillation.require_room(zip(prompts.values(), answers, strict=True), opened.context)
    observers.notice(StageBegan(stage="load", detail="the judges, and try them"))
    _try_judgers(opened, prompts)
    opened.loading("the weights")
    worker = site.build_worker(run)
    undo.callback(_close_now, worker)
    engine = opened.engines()
    undo.callback(_close_now, engine)
    teachers = _build_teachers(opened, prompts, undo)
    buffer = config.replay_buffer.build(run_dir, disk=disk)
    undo.callback(_close_now, buffer)
    # Those who ask for answers; the weight channel and the trainer have the engine itself.
    asked = profile.wrap_engine(engine) if profile is not None else engine
    channel = site.build_channel(run, worker, engine)
    undo.callback(_close_now, channel)
    undo.callback(_close_now, opened.judgers)
    manager = config.manager.build(_world(opened, asked, buffer, prompts, run_dir))
    undo.callback(_close_now, manager)
    evaluator = opened.evaluator(asked, run_dir / "eval_dead_letters.jsonl")
    if evaluator is not None:
        undo.callback(_close_now, evaluator)
    return Parts(
        engine=engine,
        channel=channel,
        judgers=opened.judgers,
        worker=worker,
        buffer=buffer,
        manager=manager,
        evaluator=evaluator,
        teachers=teachers,
        checkpoints=checkpoints,
        prompts=prompts,
        tokenizer=opened.tokenizer,
        made_from=made_from,
        arithmetic=opened.arithmetic,
        site=site,
    )


def _load_prompts(opened: _Opened, run_dir: Path, *, resumed: bool) -> dict[str, PromptSet]:
    """Of the tasks that are trained; those left out are told. Raises RefusedError when a run goes on with others."""
    tasks = opened.config.manager.task_list
    prompts = load_prompts(tasks, opened.tokenizer, context=opened.context, on_progress=opened.scanned)
    if resumed:
        check_same_prompts(run_dir, prompts)
    for task, loaded in (prompts | opened.eval_prompts).items():
        if loaded.dropped or loaded.quarantined:
            left_out = f"{loaded.dropped} over-long prompts dropped, {loaded.quarantined} bad rows set aside"
            opened.observers.notice(Note(text=f"task {task!r}: {len(loaded)} prompts; {left_out}"))
    return prompts


def _world(
    opened: _Opened, engine: Engine, buffer: ReplayBuffer, prompts: dict[str, PromptSet], run_dir: Path
) -> World:
    """What the manager of the tasks that are trained works with."""
    config = opened.config
    return World(
        engine=engine,
        tokenizer=opened.tokenizer,
        judgers=opened.judgers,
        buffer=buffer,
        prompts=prompts,
        run_seed=config.seed,
        sync_weights_interval=config.sync_weights_interval,
        dead_letters=run_dir / "dead_letters.jsonl",
        observer=opened.observers,
        turn_log=buffer,
        placement=opened.site.placement,
        context=opened.context,
    )


def _build_teachers(opened: _Opened, prompts: dict[str, PromptSet], undo: contextlib.ExitStack) -> Teachers | None:
    config = opened.config
    if config.distillation is None:
        return None
    teachers = config.distillation.build(
        opened.tokenizer,
        deterministic=config.deterministic,
        threads=config.threads()[1],
        observer=opened.observers,
    )
    undo.callback(_close_now, teachers)
    teachers.require_pupils(prompts.values())
    return teachers


def _try_judgers(opened: _Opened, prompts: dict[str, PromptSet]) -> None:
    """With judgers of their own: what is printed now has no run yet, and is shown when one is refused."""
    evaluator = opened.config.evaluator
    tasks = [(task, prompts[task.task_name]) for task in opened.config.manager.task_list]
    tasks += [
        (task.spec(), opened.eval_prompts[task.task_name]) for task in (evaluator.eval_tasks if evaluator else [])
    ]
    # In this process, whether they will live here or in actors, and judgers of their own.
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        printed = Path(directory) / PRINTED_FILE
        judgers = JudgerSet(Local(whatever_it_asks=True), output=str(printed), ports=opened.judger_ports)
        try:
            check_judgers(
                (task.task_name, judgers.get(task.judger), found.unrendered)
                for task, found in tasks
                if task.judger is not None
            )
        except ConfigError as error:
            raise ConfigError([*error.problems, *last_printed(printed)]) from None
        finally:
            _close_now(judgers)


def _close_now(part: Closable) -> None:
    """Of a part that no event loop has used yet; a thread of its own, because the caller's may run one."""
    closing = threading.Thread(target=lambda: asyncio.run(part.close()), name="closing what was refused")
    closing.start()
    closing.join()


def evaluate_once(
    config: RLTrainerConfig, observers: Observers, out_dir: Path | None, site: Site | None = None
) -> dict[str, float]:
    """The evaluator alone, on the weights that `config.model` names. See `RLTrainerConfig.evaluate`."""
    if out_dir is not None:
        _require_writable(out_dir)
    site = site or LocalSite()
    if problems := list(site.problems(config, trains=False)):
        raise ConfigError(problems)
    site.prepare(config, trains=False)
    opened = _Opened(config, observers, site, out_dir, trains=False)
    engine = opened.engines()
    evaluator = opened.evaluator(engine)
    assert evaluator is not None, "nothing to evaluate"

    async def evaluate() -> dict[str, float]:
        async with contextlib.AsyncExitStack() as stack:
            for part in (opened.judgers, engine, evaluator):
                stack.push_async_callback(part.close)
            observers.notice(StageBegan(stage="evaluate"))
            async with ends_with(site):
                evaluation = await evaluator.evaluate(0)
            if out_dir is not None:
                Printed(out_dir, observers).look()
                Trajectories(out_dir, opened.tokenizer).save_as(ANSWERS_FILE, evaluation.groups)
                _write_result(out_dir / RESULT_FILE, config.model, evaluation.metrics)
            return evaluation.metrics

    return asyncio.run(evaluate())


ANSWERS_FILE, RESULT_FILE = "answers.jsonl", "result.json"


def _require_writable(directory: Path) -> None:
    """Now, not when the figures of an hour are there. Raises RefusedError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise RefusedError(f"{directory} cannot be written to: {error}; name another directory") from error


def _write_result(path: Path, model: str, metrics: dict[str, float]) -> None:
    try:
        path.write_bytes(
            msgspec.json.format(msgspec.json.encode({"model": model, "metrics": metrics}), indent=2) + b"\n"
        )
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error}") from error
