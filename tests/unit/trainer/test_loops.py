"""The two loops over scripted ports, on the virtual clock: what is called, in which order, and how a run ends."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import InfrastructureFailure, RunError, StepRefused, StorageError, WeightSyncError
from penstock.events import BatchTaken, Event, Note, StageEnded, StepGivenBack, StepTrained, WeightsPublished
from penstock.ports import Published
from penstock.produce import ProduceBatchResult, ProduceBatchStatus
from penstock.rollout import new_rollout
from penstock.testing import run_virtual
from penstock.trainer.loops import LoopPorts, Schedule, Stages, colocated_loop, disaggregated_loop
from penstock.trainer.writer import CheckpointWriter

EXPIRED = ProduceBatchStatus.EXPIRED_BATCH
LOOPS = {"colocated": colocated_loop, "disaggregated": disaggregated_loop}


class World:
    """All ports of a loop in one object. `story` tells what happened, in order."""

    def __init__(
        self,
        *,
        stale_threshold: int = 1000,
        refused: tuple[int, ...] = (),
        fails: dict[str, tuple[int, BaseException]] | None = None,
        stop_after: int | None = None,
        eval_s: float = 0.0,
        expired_batches: tuple[int, ...] = (),
        write_s: float = 0.0,
        unwritten: int | None = None,
    ) -> None:
        """`refused` are numbers of calls of `learn`, from 1; `fails` says at which step which port raises what;
        `unwritten` is the checkpoint that takes `write_s` and then cannot be written."""
        self.story: list[tuple[str, int]] = []
        self.events: list[Event] = []
        self.served = 0
        self.leased: int | None = None
        self._stale_threshold = stale_threshold
        self._refused = refused
        self._fails = fails or {}
        self._stop_after = stop_after
        self._eval_s = eval_s
        self._expired_batches = expired_batches
        self._write_s = write_s
        self._unwritten = unwritten
        self._writer = CheckpointWriter(self)
        self._learned = 0
        self._finished = asyncio.Event()
        self._paused = True

    def run(self, loop: Any, schedule: Schedule, *, begin: int = 0) -> int:
        self.served = begin
        ports = LoopPorts(
            producer=self,
            learner=self,
            channel=self,
            checkpointer=self,
            evaluator=self,
            devices=self if loop is colocated_loop else None,
            observer=self,
            gauges=self.gauges,
            stop=lambda: self._stop_after is not None and self._steps("commit")[-1:] >= [self._stop_after],
        )

        async def main() -> int:
            async with self._writer:
                step: int = await loop(schedule, ports, begin=begin)
            return step

        return run_virtual(self._alone(main()), deadline=1e6)

    async def _alone(self, main: Coroutine[Any, Any, int]) -> int:
        try:
            return await main
        finally:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            assert not others, f"left running: {others}"

    def _steps(self, name: str) -> list[int]:
        return [step for told, step in self.story if told == name]

    def tell(self, name: str, step: int) -> None:
        self.story.append((name, step))
        at, error = self._fails.get(name, (None, None))
        if at == step:
            assert error is not None
            raise error

    # Producer.

    async def produce_batch(self, batch_size: int, train_step: int, *, model_step: int) -> ProduceBatchResult:
        assert model_step == self.served
        self.tell("produce", train_step)
        await asyncio.sleep(3)
        return self._batch(train_step)

    async def produce_loop(self, batch_size: int) -> None:
        self.tell("produce loop", 0)
        await self._finished.wait()
        self.tell("producer ends", 0)

    async def get_batch(self, batch_size: int, train_step: int) -> ProduceBatchResult:
        assert not self._paused
        self.tell("get", train_step)
        await asyncio.sleep(1)
        if train_step - self.served - 1 >= self._stale_threshold:
            return ProduceBatchResult(status=EXPIRED)
        return self._batch(train_step)

    def _batch(self, train_step: int) -> ProduceBatchResult:
        self.leased = train_step
        status = EXPIRED if train_step in self._expired_batches else ProduceBatchStatus.NORMAL
        return ProduceBatchResult(groups=[[new_rollout("?")]], status=status)

    async def pause_produce(self) -> None:
        self._paused = True
        self.tell("pause", self.served)

    async def continue_produce(self, model_step: int) -> None:
        assert model_step == self.served
        self._paused = False

    async def shutdown(self) -> None:
        self._finished.set()

    async def commit(self, train_step: int) -> None:
        assert self.leased == train_step
        self.leased = None
        self.tell("commit", train_step)

    async def return_batch(self, train_step: int) -> None:
        assert self.leased == train_step
        self.leased = None
        self.tell("return", train_step)

    # Devices.

    async def sleep(self) -> None:
        self.tell("sleep", 0)

    async def wake(self) -> None:
        self.tell("wake", 0)

    # Learner.

    async def learn(self, result: ProduceBatchResult, train_step: int, stages: Stages) -> dict[str, float]:
        self._learned += 1
        with stages("train"):
            await asyncio.sleep(2)
        self.tell("learn", train_step)
        if self._learned in self._refused:
            raise StepRefused("the loss is not finite")
        return {"reward/mean": 0.5, "trained_tokens": 10.0}

    async def committed(self, train_step: int) -> None:
        assert self.leased is None

    # Channel, checkpointer, evaluator, observer.

    async def publish(self, model_step: int) -> Published:
        self.tell("publish", model_step)
        self.served = model_step
        return Published(model_step=model_step, num_bytes=8, seconds=0.5)

    async def close(self) -> None:
        raise AssertionError("whoever builds a part closes it")

    async def keep(self, train_step: int, metrics: dict[str, float], *, checkpoint: bool, export: bool) -> None:
        assert metrics["reward/mean"] == 0.5 and (checkpoint or export)
        await self._writer.wait(f"step {train_step}")
        if checkpoint:
            self.tell("checkpoint", train_step)
        if export:
            self.tell("export", train_step)
        self._writer.begin(f"checkpoint {train_step}", lambda: self._write(train_step))

    def check(self) -> None:
        self._writer.check()

    async def _write(self, train_step: int) -> None:
        await asyncio.sleep(self._write_s)
        if train_step == self._unwritten:
            raise StorageError("the disk is full")
        self.tell("written", train_step)

    async def evaluate(self, model_step: int) -> None:
        self.tell("evaluate", model_step)
        assert self.served == model_step
        await asyncio.sleep(self._eval_s)
        assert self.served == model_step
        self.tell("evaluated", model_step)

    def notice(self, event: Event) -> None:
        self.events.append(event)

    async def gauges(self) -> dict[str, float]:
        return {"judger/calls": 7.0}


def schedule(total_steps: int = 6, **fields: Any) -> Schedule:
    return Schedule(**({"total_steps": total_steps, "batch_size": 4, "checkpoint_interval": 100} | fields))


def only(story: list[tuple[str, int]], *names: str) -> list[tuple[str, int]]:
    return [entry for entry in story if entry[0] in names]


def test_a_colocated_step_reads_as_the_sentence() -> None:
    world = World()
    assert world.run(colocated_loop, schedule(1, checkpoint_interval=1, hf_interval=1)) == 1
    steps = ["produce", "sleep", "learn", "commit", "checkpoint", "export", "wake", "publish", "written"]
    assert [name for name, _ in world.story] == steps


def test_a_disaggregated_step_reads_as_the_sentence() -> None:
    world = World()
    assert world.run(disaggregated_loop, schedule(2, checkpoint_interval=1, hf_interval=2)) == 2
    assert [entry for entry in world.story if entry[0] not in ("produce loop", "written")] == [
        ("get", 1),
        ("learn", 1),
        ("commit", 1),
        ("checkpoint", 1),
        ("pause", 0),
        ("publish", 1),
        ("get", 2),
        ("learn", 2),
        ("commit", 2),
        ("checkpoint", 2),
        ("export", 2),
        ("producer ends", 0),
        ("publish", 2),
    ]


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_weights_go_to_the_engines_every_so_many_steps_and_after_the_last(loop: Any) -> None:
    world = World()
    world.run(loop, schedule(7, sync_weights_interval=3))
    assert only(world.story, "publish") == [("publish", 3), ("publish", 6), ("publish", 7)]
    told = [event.model_step for event in world.events if isinstance(event, WeightsPublished)]
    assert told == [3, 6, 7]


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_run_that_goes_on_from_a_checkpoint_trains_the_steps_after_it(loop: Any) -> None:
    world = World()
    assert world.run(loop, schedule(6, sync_weights_interval=2), begin=3) == 6
    assert only(world.story, "commit") == [("commit", 4), ("commit", 5), ("commit", 6)]
    assert world.served == 6


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_an_evaluation_that_falls_due_between_two_syncs_takes_place_at_the_next_sync(loop: Any) -> None:
    world = World()
    world.run(loop, schedule(12, sync_weights_interval=3, eval_interval=4))
    # Due after 4, 8 and 12; the weights 6 and 9 answer, and what comes after the last step is the trainer's.
    assert only(world.story, "evaluate") == [("evaluate", 6), ("evaluate", 9)]


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("sync_weights_interval", [1, 2, 3])
def test_how_often_is_evaluated_changes_nothing_else(loop: Any, sync_weights_interval: int) -> None:
    stories = []
    for eval_interval in (1, 2, 5, 100):
        world = World(eval_s=7.0, refused=(2, 5))
        world.run(loop, schedule(9, sync_weights_interval=sync_weights_interval, eval_interval=eval_interval))
        stories.append([entry for entry in world.story if "evaluate" not in entry[0]])
    assert stories[0] == stories[1] == stories[2] == stories[3]


def test_an_evaluation_runs_beside_training_and_the_next_sync_waits_for_it() -> None:
    world = World(eval_s=8.0)
    world.run(disaggregated_loop, schedule(6, sync_weights_interval=3, eval_interval=3))
    told = only(world.story, "evaluate", "evaluated", "commit", "publish")
    begins, ends = told.index(("evaluate", 3)), told.index(("evaluated", 3))
    assert told[begins + 1 : ends] == [("commit", 4), ("commit", 5)]
    assert told.index(("publish", 6)) > ends


def test_a_checkpoint_waits_for_the_evaluation_of_weights_that_a_restart_could_not_ask() -> None:
    world = World(eval_s=100.0)
    world.run(disaggregated_loop, schedule(9, sync_weights_interval=4, eval_interval=4, checkpoint_interval=6))
    assert only(world.story, "evaluated", "checkpoint")[:2] == [("evaluated", 4), ("checkpoint", 6)]


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_checkpoint_is_written_beside_the_steps_that_follow_it(loop: Any) -> None:
    world = World(write_s=7.0)
    world.run(loop, schedule(5, checkpoint_interval=4, sync_weights_interval=100))
    told = only(world.story, "checkpoint", "commit", "written")
    assert told[-3:] == [("checkpoint", 4), ("commit", 5), ("written", 4)]
    assert not [event for event in world.events if isinstance(event, Note)]


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_the_next_checkpoint_waits_until_the_one_before_is_written_and_says_so(loop: Any) -> None:
    world = World(write_s=100.0)
    world.run(loop, schedule(4, checkpoint_interval=2))
    told = only(world.story, "checkpoint", "commit", "written")
    assert told[1:-1] == [
        ("commit", 2),
        ("checkpoint", 2),
        ("commit", 3),
        ("commit", 4),
        ("written", 2),
        ("checkpoint", 4),
    ]
    assert [e.text for e in world.events if isinstance(e, Note)] == ["step 4 waits until checkpoint 2 is written"]


@pytest.mark.parametrize("write_s", [0.0, 0.5, 1.5, 2.5, 3.5, 100.0])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_no_step_is_trained_after_it_is_known_that_a_checkpoint_could_not_be_written(loop: Any, write_s: float) -> None:
    world = World(write_s=write_s, unwritten=2)
    with pytest.raises(StorageError, match="the disk is full"):
        world.run(loop, schedule(9, checkpoint_interval=2))
    # A step takes seconds: the one that is under way is finished, and the next checkpoint waits for this one.
    last = {0.0: 2, 0.5: 2, 1.5: 3 if loop is disaggregated_loop else 2, 2.5: 3 if loop is disaggregated_loop else 2}
    assert world._steps("commit")[-1] == last.get(write_s, 3 if write_s < 100 else 4)
    assert world._steps("learn") == world._steps("commit") and world.leased is None


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_what_was_begun_is_written_also_when_the_run_fails_elsewhere(loop: Any) -> None:
    world = World(write_s=50.0, fails={"learn": (3, RunError("a bad batch"))})
    with pytest.raises(RunError, match="a bad batch"):
        world.run(loop, schedule(4, checkpoint_interval=2))
    assert ("written", 2) in world.story


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_refused_step_gives_its_groups_back_and_is_tried_again(loop: Any) -> None:
    world = World(refused=(2, 3))
    assert world.run(loop, schedule(3)) == 3
    attempts = only(world.story, "learn", "commit", "return")
    second = [("learn", 2), ("return", 2), ("learn", 2), ("return", 2), ("learn", 2), ("commit", 2)]
    assert attempts == [("learn", 1), ("commit", 1), *second, ("learn", 3), ("commit", 3)]
    given_back = [event for event in world.events if isinstance(event, StepGivenBack)]
    assert [(event.train_step, event.reason) for event in given_back] == [(2, "the loss is not finite")] * 2


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_three_refused_steps_in_a_row_stop_the_run(loop: Any) -> None:
    world = World(refused=(1, 3, 4, 5))
    with pytest.raises(StepRefused, match="train step 2 was refused 3 times in a row: the loss is not finite"):
        world.run(loop, schedule(3))
    assert only(world.story, "commit") == [("commit", 1)] and world.leased is None
    assert ("checkpoint", 2) not in world.story and ("publish", 2) not in world.story


def test_weights_that_are_too_old_are_replaced_and_the_same_step_is_asked_again() -> None:
    world = World(stale_threshold=2)
    world.run(disaggregated_loop, schedule(5, sync_weights_interval=100))
    assert only(world.story, "get", "publish") == [
        ("get", 1),
        ("get", 2),
        ("get", 3),
        ("publish", 2),
        ("get", 3),
        ("get", 4),
        ("get", 5),
        ("publish", 4),
        ("get", 5),
        ("publish", 5),
    ]


def test_a_batch_that_came_with_old_weights_is_trained_and_then_synced() -> None:
    world = World(expired_batches=(2,))
    world.run(disaggregated_loop, schedule(5, sync_weights_interval=100))
    assert only(world.story, "commit", "publish")[1:3] == [("commit", 2), ("publish", 2)]


def test_an_empty_batch_although_the_engines_have_the_newest_weights_stops_the_run() -> None:
    world = World(stale_threshold=0)
    with pytest.raises(RunError, match=r"train step 1: the batch is empty .*nothing to sync"):
        world.run(disaggregated_loop, schedule(2))


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_stop_lets_the_step_finish(loop: Any) -> None:
    world = World(stop_after=2)
    assert world.run(loop, schedule(6, sync_weights_interval=3, eval_interval=1)) == 2
    assert world.story[-1] == (("producer ends", 0) if loop is disaggregated_loop else ("wake", 0))
    assert only(world.story, "publish", "evaluate") == []


def test_an_exact_run_stops_where_engines_and_trainer_have_the_same_weights() -> None:
    world = World(stop_after=2)
    assert world.run(colocated_loop, schedule(6, sync_weights_interval=3, exact=True)) == 3
    assert world.served == 3


FAILURES = [
    (loop, name, error)
    for loop, names in (
        ("colocated", ("produce", "sleep", "learn", "commit", "checkpoint", "wake", "publish", "evaluate", "export")),
        ("disaggregated", ("get", "learn", "commit", "checkpoint", "pause", "publish", "evaluate", "export")),
    )
    for name, error in ((name, StorageError(f"{name} failed")) for name in names)
]


@pytest.mark.parametrize(("loop", "name", "error"), FAILURES, ids=[f"{loop}-{name}" for loop, name, _ in FAILURES])
def test_what_fails_ends_the_run_as_itself_and_leaves_nothing_running(loop: str, name: str, error: Exception) -> None:
    at = {"sleep": 0, "wake": 0, "pause": 1}.get(name, 2)
    world = World(fails={name: (at, error)}, eval_s=0.5)
    with pytest.raises(StorageError, match=f"{name} failed"):
        world.run(LOOPS[loop], schedule(4, eval_interval=1, checkpoint_interval=1, hf_interval=1))
    if name == "learn":
        assert world.story[-1] == ("return", 2)


def test_engines_that_take_no_weights_end_the_run_on_the_old_ones() -> None:
    world = World(fails={"publish": (2, WeightSyncError("no engine confirmed them"))})
    with pytest.raises(WeightSyncError):
        world.run(disaggregated_loop, schedule(4))
    assert world.served == 1


def test_a_producer_that_fails_after_the_last_batch_is_told_and_the_run_ends_well() -> None:
    world = World(fails={"producer ends": (0, RunError("a late group failed"))})
    assert world.run(disaggregated_loop, schedule(2)) == 2
    notes = [event.text for event in world.events if isinstance(event, Note)]
    assert notes == ["the producer ended with RunError: a late group failed"]


def test_a_failure_that_is_not_the_runs_own_is_not_swallowed_at_the_end() -> None:
    world = World(fails={"producer ends": (0, InfrastructureFailure("the engine died"))})
    with pytest.raises(InfrastructureFailure):
        world.run(disaggregated_loop, schedule(2))


def test_every_step_is_told_with_its_times_and_gauges() -> None:
    world = World()
    world.run(disaggregated_loop, schedule(2))
    trained = [event for event in world.events if isinstance(event, StepTrained)]
    assert [event.train_step for event in trained] == [1, 2]
    metrics = trained[0].metrics
    assert metrics["time/produce_s"] == 1.0 and metrics["time/train_s"] == 2.0 and metrics["time/step_s"] == 3.0
    assert metrics["share/trainer_wait"] == pytest.approx(1 / 3)
    assert metrics["tokens/trained_per_s"] == 5.0 and metrics["judger/calls"] == 7.0
    assert [event.train_step for event in world.events if isinstance(event, BatchTaken)] == [1, 2]
    stages = [(event.stage, event.train_step) for event in world.events if isinstance(event, StageEnded)]
    assert stages[:5] == [("produce", 1), ("train", 1), ("commit", 1), ("sync", 1), ("step", 1)]


def test_a_stage_inside_another_is_told_and_not_counted_twice() -> None:
    world = World()

    async def main() -> Stages:
        stages = Stages(world)
        with stages("prepare"), stages("ledger flush"):
            await asyncio.sleep(1)
        return stages

    assert run_virtual(main()).seconds == {"prepare": 1.0}
    assert len([event for event in world.events if isinstance(event, StageEnded)]) == 2


def test_each_loop_is_written_once() -> None:
    """Whoever else asks a manager for batches would be a second loop."""
    root = Path(penstock.__file__).parent
    places: dict[str, set[str]] = {"produce_loop": set(), "get_batch": set(), "produce_batch": set()}
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            name = node.func.attr
            # A strategy's `produce_batch` takes its context alone.
            if name in places and (len(node.args) > 1 or name == "produce_loop"):
                places[name].add(str(path.relative_to(root)))
    # The simulation's producer pauses the real one while it waits, and passes the call on.
    assert places.pop("get_batch") == {"trainer/loops.py", "testing/simulation.py"}
    assert places == {"produce_loop": {"trainer/loops.py"}, "produce_batch": {"trainer/loops.py"}}
