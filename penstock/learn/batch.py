"""Groups to a train batch: the arrays of every answer, made once and with one length.

Groups that cannot be trained were stopped long before; meeting one here means that a stage let it through, and is an
error that names it. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from penstock.errors import RunError
from penstock.learn.advantages import all_equal, get_estimator
from penstock.rollout import UNKNOWN_STEP, FinishReason, FloatArray, Group, IntArray, MaskArray, RolloutState, Status


@dataclass(frozen=True, eq=False)
class TrainAnswer:
    """One answer's columns, one entry per token."""

    rollout_id: str
    ids: IntArray
    logprobs: FloatArray
    """As the engine recorded them when it sampled."""
    advantages: FloatArray
    mask: MaskArray
    """1 where the token is trained."""
    model_steps: IntArray
    score: float

    def __post_init__(self) -> None:
        columns = (self.ids, self.logprobs, self.advantages, self.mask, self.model_steps)
        if len({len(column) for column in columns}) != 1:
            raise ValueError(
                f"{self.rollout_id}: columns of {[len(column) for column in columns]} tokens must be equal"
            )

    @property
    def num_trained(self) -> int:
        return int(self.mask.sum())


@dataclass(frozen=True, eq=False)
class TrainGroup:
    group_id: str
    prompt_ids: IntArray
    answers: list[TrainAnswer]


@dataclass(frozen=True, eq=False)
class TrainBatch:
    train_step: int
    groups: list[TrainGroup]
    temperature: float = 1.0
    """What the answers were sampled with: a logprob is log_softmax(logits / temperature)."""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def answers(self) -> list[TrainAnswer]:
        return [answer for group in self.groups for answer in group.answers]

    @property
    def on_policy(self) -> bool:
        """Every trained token was made by the weights just before this step."""
        return all((a.model_steps[a.mask == 1] == self.train_step - 1).all() for a in self.answers)


def prepare_batch(
    groups: Sequence[Group],
    *,
    train_step: int,
    advantage: str = "grpo",
    max_token_staleness_threshold: int | None = None,
    temperature: float = 1.0,
) -> TrainBatch:
    """Advantages and columns of these groups for train step `train_step`.

    A token whose staleness reaches the threshold stays as context and is not trained. Raises RunError for a group that
    cannot be trained, with its id and the rule, and when no token is left to train.
    """
    if not temperature > 0 or not math.isfinite(temperature):
        raise RunError(f"temperature is {temperature}; logprobs to train on need one above 0")
    if not groups:
        raise RunError(f"train step {train_step}: the batch has no groups")
    scores = [[_check(rollout, group, train_step) for rollout in group] for group in groups]
    try:
        advantages = get_estimator(advantage)(scores)
    except ValueError as error:
        sizes = sorted({len(group) for group in groups})
        raise RunError(f"train step {train_step}, advantage {advantage}, groups of {sizes}: {error}") from error
    if [len(row) for row in advantages] != [len(row) for row in scores]:
        raise RunError(f"advantage {advantage}: the estimator did not answer with one number per score")
    oldest = None if max_token_staleness_threshold is None else train_step - max_token_staleness_threshold
    train_groups = [
        TrainGroup(
            group_id=group[0].group_id,
            prompt_ids=group[0].prompt_ids,
            answers=[
                _answer(rollout, value, score, oldest)
                for rollout, value, score in zip(group, group_advantages, group_scores, strict=True)
            ],
        )
        for group, group_advantages, group_scores in zip(groups, advantages, scores, strict=True)
    ]
    metrics = _metrics(groups, scores, train_groups, train_step)
    if not metrics["trained_tokens"]:
        raise RunError(f"train step {train_step}: no token of {len(groups)} groups may be trained")
    return TrainBatch(train_step, train_groups, temperature, metrics)


def _check(rollout: RolloutState, group: Group, train_step: int) -> float:
    """The rollout's score, when everything about it can be trained."""
    trained = rollout.response_mask == 1
    steps = rollout.model_steps[trained]
    score = rollout.reward.score if rollout.reward is not None else None
    first = group[0]
    wrong = [
        problem
        for fine, problem in (
            (rollout.status is Status.COMPLETED, f"its status is {rollout.status}, not completed"),
            (score is not None and math.isfinite(score), f"its score is {score}, not a finite number"),
            (rollout.num_tokens > 0, "its answer is empty"),
            (len(rollout.prompt.ids) > 0, "its prompt has no ids"),
            (rollout.group_id == first.group_id, f"it belongs to group {rollout.group_id!r}"),
            (rollout.prompt.ids == first.prompt.ids, "its prompt is not that of its group"),
            (bool(np.isfinite(rollout.logprobs[trained]).all()), "a trained token's logprob is not finite"),
            (UNKNOWN_STEP not in steps, "a trained token has no model step"),
        )
        if not fine
    ]
    if wrong or score is None:
        where = f"group {first.group_id!r}, rollout {rollout.rollout_id!r}"
        raise RunError(f"{where} cannot be trained at step {train_step}: {'; '.join(wrong)}")
    return score


def _answer(rollout: RolloutState, advantage: float, score: float, oldest: int | None) -> TrainAnswer:
    mask = rollout.response_mask
    steps = rollout.model_steps
    if oldest is not None:
        mask = np.where(steps >= oldest, mask, 0).astype(np.uint8)
    return TrainAnswer(
        rollout_id=rollout.rollout_id,
        ids=rollout.response_ids,
        logprobs=rollout.logprobs,
        advantages=np.full(len(mask), advantage, dtype=np.float32),
        mask=mask,
        model_steps=steps,
        score=score,
    )


def _metrics(
    groups: Sequence[Group], scores: list[list[float]], trained: list[TrainGroup], train_step: int
) -> dict[str, float]:
    flat_scores = np.asarray([score for row in scores for score in row])
    lengths = np.asarray([rollout.num_tokens for group in groups for rollout in group])
    cut = [rollout.finish_reason is FinishReason.LENGTH for group in groups for rollout in group]
    answers = [answer for group in trained for answer in group.answers]
    written = [rollout.response_mask == 1 for group in groups for rollout in group]
    steps = np.concatenate([a.model_steps[own] for a, own in zip(answers, written, strict=True)])
    # A version not older than this step comes from a lineage that a restart left behind; it counts as fresh.
    staleness: npt.NDArray[np.int64] = np.maximum(0, train_step - steps.astype(np.int64) - 1)
    values, counts = np.unique(staleness, return_counts=True)
    num_trained = sum(answer.num_trained for answer in answers)
    return {
        "reward/mean": float(flat_scores.mean()),
        "reward/std": float(flat_scores.std(ddof=1)) if len(flat_scores) > 1 else 0.0,
        "reward/equal_group_share": float(np.mean([all_equal(row) for row in scores])),
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "length/truncated_share": float(np.mean(cut)),
        "staleness/mean": float(staleness.mean()) if len(staleness) else 0.0,
        "staleness/max": float(staleness.max()) if len(staleness) else 0.0,
        "staleness/masked_tokens": float(len(staleness) - num_trained),
        "trained_tokens": float(num_trained),
        **{f"staleness/tokens_{value}": float(count) for value, count in zip(values, counts, strict=True)},
    }
