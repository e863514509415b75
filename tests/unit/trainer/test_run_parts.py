"""What stands around a loop: the summary, signals, gauges, and the look at a run directory that is held at last."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.config_file import load_config
from penstock.data import DatasetConfig, remember_prompts
from penstock.errors import CheckpointError, PenstockError, RefusedError
from penstock.events import EvaluationDone, Event, Exported, Note, StageBegan, StepTrained, Warned
from penstock.judger import JudgerSet
from penstock.learn.rng import rng_state
from penstock.models import load_tokenizer, resolve_model
from penstock.ports import EngineStats
from penstock.produce import AgentLoopManager, load_prompts
from penstock.replay import ReplayBuffer
from penstock.replay.ledger import LEDGER_FILE
from penstock.testing import ScriptedEngine, run_virtual
from penstock.trainer.arithmetic import Arithmetic
from penstock.trainer.checkpointing import RunCheckpointer
from penstock.trainer.checkpoints import Checkpoint, CheckpointStore
from penstock.trainer.gauges import Gauges
from penstock.trainer.observers import Observers
from penstock.trainer.origin import ModelOrigin
from penstock.trainer.parts import Parts, build_trainer
from penstock.trainer.resume import Beginning, require_unchanged
from penstock.trainer.signals import Stop, stopped_by_signals
from penstock.trainer.summary import SummarySink
from penstock.trainer.trajectories import read_trajectories


class Told:
    def __init__(self) -> None:
        self.events: list[Event] = []

    @property
    def notes(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Note)]

    def notice(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


def test_a_summary_adds_up_what_the_run_told() -> None:
    sink = SummarySink()
    sink.notice(EvaluationDone(model_step=0, metrics={"eval/accuracy": 0.25, "eval/failed_prompts": 2.0}))
    for step, reward in ((1, 0.5), (2, 0.75)):
        sink.notice(StepTrained(train_step=step, metrics={"reward/mean": reward, "time/step_s": 2.0}))
    sink.notice(EvaluationDone(model_step=2, metrics={"eval/accuracy": 0.5}))
    sink.notice(Exported(train_step=2, directory="runs/x/hf/final"))
    summary = sink.plain()
    assert summary["steps"] == 2 and summary["train_seconds"] == 4.0 and summary["hf_dir"] == "runs/x/hf/final"
    assert (summary["reward_first"], summary["reward_last"]) == (0.5, 0.75)
    assert (summary["eval_accuracy_before"], summary["eval_accuracy_after"]) == (0.25, 0.5)
    assert summary["eval_after_step"] == 2 and summary["eval_failed_prompts"] == 0
    assert sink.last_metrics == {"reward/mean": 0.75, "time/step_s": 2.0}


def test_a_summary_goes_on_from_that_of_the_checkpoint() -> None:
    before = SummarySink()
    before.notice(StepTrained(train_step=1, metrics={"reward/mean": 0.5, "time/step_s": 2.0}))
    before.summary.error, before.summary.interrupted = "out of memory", True
    after = SummarySink()
    after.restart(before.plain(), 4)
    assert after.summary.steps == 4 and after.summary.reward_first == 0.5 and after.summary.train_seconds == 2.0
    assert after.summary.error is None and not after.summary.interrupted


@pytest.mark.parametrize("saved_after", [True, False])
def test_the_seconds_of_a_step_that_is_told_again_after_a_resume_count_once(saved_after: bool) -> None:
    """A checkpoint at an orderly end is written after its step was told, one of the schedule before."""
    before, second = SummarySink(), StepTrained(train_step=2, metrics={"time/step_s": 3.0})
    before.notice(StepTrained(train_step=1, metrics={"time/step_s": 2.0}))
    if saved_after:
        before.notice(second)
    after = SummarySink()
    after.restart(before.plain(), 2)
    after.notice(second)
    assert after.summary.train_seconds == 5.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks_for_an_end_and_the_second_cancels(number: signal.Signals) -> None:
    stop, told = Stop(), Told()

    async def run() -> None:
        with stopped_by_signals(stop, told):
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.01)
            assert stop()
            os.kill(os.getpid(), number)
            await asyncio.sleep(10)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    first, second = told.notes
    assert first.startswith(f"{number.name}: finishing the step") and second.startswith(f"{number.name}: stopping now")


def test_a_hang_up_that_is_ignored_stays_ignored() -> None:
    stop, told = Stop(), Told()

    async def run() -> None:
        with stopped_by_signals(stop, told):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.01)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asyncio.run(run())
        assert not stop() and told.notes == []
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


class Busy(ScriptedEngine):
    """Two engines; one of them works all the time."""

    async def stats(self) -> EngineStats:
        return EngineStats(engines=2, busy_seconds=asyncio.get_running_loop().time())


def test_the_idle_share_is_that_of_all_engines_since_the_last_look() -> None:
    async def main() -> list[dict[str, float]]:
        gauges = Gauges(JudgerSet(), Busy())
        looks = [await gauges()]
        for seconds in (3.0, 5.0):
            await asyncio.sleep(seconds)
            looks.append(await gauges())
        return looks

    assert run_virtual(main()) == [{}, {"share/engine_idle": 0.5}, {"share/engine_idle": 0.5}]


def checkpoint(step: int, path: Path) -> Checkpoint:
    return Checkpoint(path=path, step=step, state={}, config={}, config_hash="", tensor_names=())


def test_a_directory_that_another_process_used_meanwhile_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    fresh, empty, used = Beginning(), ReplayBuffer(), Recorded()
    require_unchanged(fresh, tmp_path, empty, store)
    with pytest.raises(CheckpointError, match="its ledger holds groups, but there is no checkpoint left"):
        require_unchanged(fresh, tmp_path, used, store)
    asyncio.run(store.save(0, state={}, config={}))
    with pytest.raises(CheckpointError, match="another process began a run there meanwhile"):
        require_unchanged(fresh, tmp_path, used, store)

    resumed = Beginning(checkpoint(0, tmp_path), [], newest=0)
    require_unchanged(resumed, tmp_path, used, store)
    asyncio.run(store.save(5, state={}, config={}))
    with pytest.raises(CheckpointError, match="another process went on with the run meanwhile"):
        require_unchanged(resumed, tmp_path, used, store)


class Recorded(ReplayBuffer):
    """One with a past."""

    @property
    def position(self) -> int:
        return 7


NOWHERE = ModelOrigin(directory="", weights={}, tokenizer={}, config={})


class Exporter:
    """A worker that only exports; what it loads is all the same to it."""

    async def save_hf(self, directory: Path) -> None:
        await asyncio.to_thread(directory.mkdir, parents=True)

    async def snapshot(self, *, optimizer: bool, export: bool) -> None:
        """It has none to give."""

    async def load(self, directory: Path) -> None:
        pass


def test_an_export_that_a_killed_process_still_owed_is_made_up_once(tmp_path: Path) -> None:
    told = Told()
    checkpointer = RunCheckpointer(
        CheckpointStore(tmp_path / "checkpoints"),
        Exporter(),  # type: ignore[arg-type]
        ReplayBuffer(),
        AgentLoopManager([], engine=None, buffer=ReplayBuffer()),
        SummarySink(),
        told,
        run_dir=tmp_path,
        made_from=NOWHERE,
        arithmetic=Arithmetic(),
        config={},
    )
    asyncio.run(checkpointer.make_up_export(4))
    asyncio.run(checkpointer.make_up_export(4))
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["step-4"]
    assert [event.train_step for event in told.events if isinstance(event, Exported)] == [4]


def test_an_export_of_a_lineage_that_was_left_is_not_taken_for_one_of_the_run(tmp_path: Path) -> None:
    for name in ("step-2", "step-4", "step-6", "step-best", "final"):
        (tmp_path / "hf" / name).mkdir(parents=True)
    store = CheckpointStore(tmp_path / "checkpoints")
    worker, buffer, summary = Exporter(), ReplayBuffer(), SummarySink()
    checkpointer = RunCheckpointer(
        store,
        worker,  # type: ignore[arg-type]
        buffer,
        AgentLoopManager([], engine=None, buffer=buffer),
        summary,
        Told(),
        run_dir=tmp_path,
        made_from=NOWHERE,
        arithmetic=Arithmetic(),
        config={},
    )
    rng_tensors, rng = rng_state()
    state = {"ledger_position": buffer.position, "rng": rng, "summary": summary.plain(), "metrics": {}}
    asyncio.run(store.save(4, tensors={"rng": rng_tensors}, state=state, config={}))
    asyncio.run(checkpointer.restore(store.newest()))
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["final", "step-2", "step-4", "step-best"]


def test_an_evaluation_that_could_not_be_written_is_refused_before_the_model_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = load_config("tiny").replace("model", "no-such-model")
    with pytest.raises(RefusedError, match="cannot be written to"):
        config.evaluate(out_dir=tmp_path / "file" / "out")


def test_an_evaluation_that_is_refused_leaves_the_result_of_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{}")
    config = load_config("tiny").replace("model", "no-such-model")
    with pytest.raises(PenstockError):
        config.evaluate(out_dir=tmp_path)
    assert (tmp_path / "result.json").read_text() == "{}"


def test_a_resume_with_other_rows_is_refused_with_what_differs(tmp_path: Path) -> None:
    """The place in the sequence is a number of draws: a row that is gone would shift all that follow."""
    rows, run_dir = tmp_path / "rows.jsonl", tmp_path / "run"
    config = load_config("tiny").replace("evaluator", None)
    config = config.replace("manager.tasks.0.sampler_config.dataset", DatasetConfig(path=rows))

    def write(*words: str) -> None:
        lines = [{"prompt": w, "reward_model": {"ground_truth": w[::-1]}, "data_source": "reverse"} for w in words]
        rows.write_text("".join(json.dumps(line) + "\n" for line in lines))

    write("abc", "def", "fed", "cba")
    tokenizer = load_tokenizer(resolve_model("tiny"))
    run_dir.mkdir()
    (run_dir / LEDGER_FILE).touch()
    remember_prompts(run_dir, load_prompts(config.manager.task_list, tokenizer, context=64))
    asyncio.run(CheckpointStore(run_dir / "checkpoints").save(0, state={}, config=config.describe()))
    write("abc", "fed", "cba")
    gone = r"it had 4 prompts when the run began and has 3 now; what stood before .*rows\.jsonl:2 is gone"
    told = Told()
    with pytest.raises(CheckpointError, match=gone):
        config.build(run_dir=run_dir, resume="newest", observers=Observers(told=told))
    assert StageBegan(stage="scan", detail="3 rows") in told.events


def test_an_evaluation_leaves_its_answers_and_its_figures(tmp_path: Path) -> None:
    config = load_config("tiny", ["cpu_threads=1", "evaluator.eval_sample_num=2"])
    told = Told()
    metrics = config.evaluate(out_dir=tmp_path / "out", observers=Observers(told=told))
    assert [event.stage for event in told.events if isinstance(event, StageBegan)].count("scan") >= 1
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result == {"model": "tiny", "metrics": metrics}
    answers = read_trajectories(tmp_path / "out" / "answers.jsonl")
    judged = [answer.reward.score for answer in answers if answer.reward is not None]
    assert len(judged) == len(answers) >= 2
    assert all(answer.rendered_prompt and answer.turns for answer in answers)


def test_what_parts_warn_of_while_they_are_built_is_told(tmp_path: Path) -> None:
    def refuses(*parts: Any) -> None:
        raise RefusedError("seen enough")

    told, setting = Told(), "manager.tasks.0.produce_strategy_config.max_token_staleness=9"
    with pytest.raises(RefusedError, match="seen enough"):
        config = load_config("tiny-async", ["cpu_threads=2", setting])
        build_trainer(config, refuses, tmp_path / "run", Observers(told=told), None)
    [warning] = [event.text for event in told.events if isinstance(event, Warned)]
    assert warning.startswith("max_token_staleness=9 above max_staleness=")


def test_everything_that_was_built_is_closed_when_the_run_is_refused_at_last(tmp_path: Path) -> None:
    closed: list[str] = []

    def refuses(config: Any, built: Parts, run_dir: Path, observers: Any, beginning: Beginning) -> None:
        for name in ("engine", "channel", "judgers", "worker", "buffer", "manager", "evaluator"):
            part = getattr(built, name)
            part.close = _noting(closed, name, part.close)
        raise RefusedError("another process began a run there meanwhile")

    with pytest.raises(RefusedError):
        build_trainer(load_config("tiny", ["cpu_threads=1"]), refuses, tmp_path / "run", None, None)
    assert sorted(closed) == ["buffer", "channel", "engine", "evaluator", "judgers", "manager", "worker"]


def _noting(closed: list[str], name: str, close: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    async def noted() -> None:
        closed.append(name)
        await close()

    return noted
