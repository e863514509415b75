"""One train step over a scripted worker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import StepRefused
from penstock.events import Event, Nobody, Warned
from penstock.learn.batch import BatchSettings, TrainBatch
from penstock.learn.overlong import OverlongConfig
from penstock.ports import TrainOutcome
from penstock.produce import ProduceBatchResult
from penstock.replay import ReplayBuffer
from penstock.rollout import NO_TOKENS, FinishReason, FloatArray, Group, Status, Verdict, new_rollout, pack_ids
from penstock.testing import CharTokenizer
from penstock.trainer.loops import Stages
from penstock.trainer.step import TrainStep
from penstock.trainer.trajectories import Trajectories, read_trajectories, step_path


class Worker:
    """Learns nothing; remembers its batches and what was saved before."""

    def __init__(self, directory: Path) -> None:
        self.batches: list[TrainBatch] = []
        self.saved_before: list[bool] = []
        self.refuses = False
        self._directory = directory

    async def train(self, batch: TrainBatch) -> TrainOutcome:
        self.batches.append(batch)
        self.saved_before.append(step_path(self._directory, batch.train_step).exists())
        if self.refuses:
            raise StepRefused("the loss is nan")
        logprobs: dict[str, list[FloatArray]] = {
            answer.rollout_id: [np.full(len(segment), -0.5, dtype=np.float32) for segment in answer.segments]
            for answer in batch.answers
        }
        return TrainOutcome(metrics={"loss": 0.25}, logprobs=logprobs)


class Told:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def notice(self, event: Event) -> None:
        self.events.append(event)


def group(draw: int, scores: tuple[float, float], task: str = "sums") -> Group:
    rollouts = []
    for number, score in enumerate(scores):
        rollout = new_rollout("2+2")
        rollout.prompt = type(rollout.prompt)(messages=rollout.messages, ids=pack_ids([1, 2]))
        rollout.task_name, rollout.group_id, rollout.draw = task, f"{task}:{draw}", draw
        rollout.rollout_id, rollout.status = f"{task}:{draw}:{number}", Status.COMPLETED
        rollout.reward = Verdict(score, {"right": score, "short": 0.5})
        rollout.response = NO_TOKENS.append([5, 6], [-0.5, -0.25], model_step=0)
        rollouts.append(rollout)
    return rollouts


def build(
    directory: Path,
    observer: Told | None = None,
    *,
    deterministic: bool = False,
    settings: BatchSettings | None = None,
) -> tuple[TrainStep, Worker]:
    worker = Worker(directory)
    trajectories = Trajectories(directory, CharTokenizer())
    step = TrainStep(
        worker,  # type: ignore[arg-type]
        ReplayBuffer(),
        trajectories,
        settings or BatchSettings(),
        observer or Nobody(),
        deterministic=deterministic,
    )
    return step, worker


def learn(step: TrainStep, groups: list[Group], train_step: int = 1) -> dict[str, float]:
    return asyncio.run(step.learn(ProduceBatchResult(groups=groups), train_step, Stages(Nobody())))


def test_trajectories_are_saved_before_training_and_logprobs_when_the_step_counts(tmp_path: Path) -> None:
    step, worker = build(tmp_path)
    metrics = learn(step, [group(0, (0.0, 1.0))])
    assert worker.saved_before == [True] and metrics["train/loss"] == 0.25
    first, second = read_trajectories(step_path(tmp_path, 1))
    assert first.advantage is not None and second.advantage is not None and first.advantage < 0 < second.advantage
    assert first.segments[0].token_trainer_logprobs is None
    asyncio.run(step.committed(1))
    logprobs = read_trajectories(step_path(tmp_path, 1))[0].segments[0].token_trainer_logprobs
    assert logprobs is not None and logprobs.tolist() == [-0.5, -0.5]


def test_a_refused_step_leaves_its_trajectories_and_no_logprobs(tmp_path: Path) -> None:
    step, worker = build(tmp_path)
    worker.refuses = True
    with pytest.raises(StepRefused):
        learn(step, [group(0, (0.0, 1.0))])
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001.jsonl"]


def test_an_exact_run_trains_groups_in_the_order_of_their_drawing(tmp_path: Path) -> None:
    groups = [group(draw, (0.0, 1.0)) for draw in (2, 0, 1)]
    for deterministic, order in ((True, [0, 1, 2]), (False, [2, 0, 1])):
        step, worker = build(tmp_path, deterministic=deterministic)
        learn(step, groups)
        assert [g.group_id for g in worker.batches[0].groups] == [f"sums:{draw}" for draw in order]


def test_three_steps_without_anything_to_learn_from_are_said_once(tmp_path: Path) -> None:
    told = Told()
    step, _ = build(tmp_path, told)
    for train_step in range(1, 6):
        learn(step, [group(train_step, (1.0, 1.0))], train_step)
    [warning] = [event for event in told.events if isinstance(event, Warned)]
    assert "train steps 1 to 3 had nothing to learn from: in 100 % of their groups" in warning.text
    assert "Look at the rewards in trajectories/" in warning.text


def test_steps_of_nothing_but_cut_off_answers_are_said_as_such(tmp_path: Path) -> None:
    told = Told()
    step, worker = build(tmp_path, told, settings=BatchSettings(overlong=OverlongConfig(mask_truncated=True)))
    for train_step in range(1, 4):
        groups = [group(train_step, (0.0, 1.0))]
        for rollout in groups[0]:
            rollout.finish_reason = FinishReason.LENGTH
        learn(step, groups, train_step)
    assert len(worker.batches) == 3
    [warning] = [event for event in told.events if isinstance(event, Warned)]
    assert "reached the token budget" in warning.text and "max_tokens" in warning.text
