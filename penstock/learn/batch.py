"""Groups to a train batch: the arrays of every segment, made once and with one length.

Groups that cannot be trained were stopped long before; meeting one here means that a stage let it through, and is an
error that names it. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from penstock.errors import RunError
from penstock.learn.advantages import all_equal, estimate
from penstock.rollout import (
    ROOT,
    UNKNOWN_STEP,
    WHOLE,
    FinishReason,
    FloatArray,
    Group,
    IntArray,
    MaskArray,
    RolloutState,
    Segment,
    Status,
    unpack_ids,
)


@dataclass(frozen=True, eq=False)
class TrainSegment:
    """A segment's columns, one entry per token, and what comes before it."""

    ids: IntArray
    logprobs: FloatArray
    """As the engine recorded them when it sampled."""
    advantages: FloatArray
    mask: MaskArray
    """1 where the token is trained."""
    model_steps: IntArray
    parent: int
    """Which earlier segment of the answer it goes on from; ROOT is the prompt."""
    start: int
    """How many tokens of that one come before it."""

    def __post_init__(self) -> None:
        columns = (self.ids, self.logprobs, self.advantages, self.mask, self.model_steps)
        if len({len(column) for column in columns}) != 1:
            raise ValueError(f"a segment's columns of {[len(column) for column in columns]} tokens must be equal")

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class TrainAnswer:
    """One rollout: one score and one advantage, whatever the number of its segments."""

    rollout_id: str
    score: float
    advantage: float
    segments: list[TrainSegment]

    @property
    def num_trained(self) -> int:
        return sum(int(segment.mask.sum()) for segment in self.segments)


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
    def segments(self) -> list[TrainSegment]:
        """Of all answers, in their order."""
        return [segment for answer in self.answers for segment in answer.segments]

    @property
    def advantages(self) -> dict[str, float]:
        """By rollout id."""
        return {answer.rollout_id: answer.advantage for answer in self.answers}

    @property
    def on_policy(self) -> bool:
        """Every trained token was made by the weights just before this step."""
        return all((s.model_steps[s.mask == 1] == self.train_step - 1).all() for s in self.segments)


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
    cannot be trained, with its id and the rule, and when no token is left to train; UserFunctionError when an estimator
    of the user's raises or does not answer with one finite number per score.
    """
    if not temperature > 0 or not math.isfinite(temperature):
        raise RunError(f"temperature is {temperature}; logprobs to train on need one above 0")
    if not groups:
        raise RunError(f"train step {train_step}: the batch has no groups")
    scores = [[_check(rollout, group, train_step) for rollout in group] for group in groups]
    advantages = estimate(advantage, scores)
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
        )
        if not fine
    ]
    wrong += _segment_problems(rollout)
    if wrong or score is None:
        where = f"group {first.group_id!r}, rollout {rollout.rollout_id!r}"
        raise RunError(f"{where} cannot be trained at step {train_step}: {'; '.join(wrong)}")
    return score


def _segment_problems(rollout: RolloutState) -> Iterator[str]:
    context: list[int] = []
    """Tokens before each segment."""
    for index, segment in enumerate(rollout.segments):
        trained = np.frombuffer(segment.tokens.mask, dtype=np.uint8) == 1
        if not np.isfinite(np.frombuffer(segment.tokens.logprobs, dtype=np.float32)[trained]).all():
            yield "a trained token's logprob is not finite"
        if UNKNOWN_STEP in segment.tokens.model_steps[trained]:
            yield "a trained token has no model step"
        if segment.parent >= index:
            yield f"segment {index} goes on from segment {segment.parent}, which is not an earlier one"
            return
        start, available = _start(rollout, segment), _length(rollout, segment.parent)
        if start > available:
            yield f"segment {index} goes on from token {start} of {available}"
        context.append(start + (0 if segment.parent == ROOT else context[segment.parent]))
        if not context[-1] and trained[:1].any():
            yield f"segment {index} begins with a trained token and has nothing before it"


def _length(rollout: RolloutState, parent: int) -> int:
    return len(rollout.prompt.ids) // 4 if parent == ROOT else len(rollout.segments[parent].tokens)


def _start(rollout: RolloutState, segment: Segment) -> int:
    return _length(rollout, ROOT) if segment.start == WHOLE else segment.start


def _answer(rollout: RolloutState, advantage: float, score: float, oldest: int | None) -> TrainAnswer:
    segments = []
    for segment in rollout.segments:
        tokens = segment.tokens
        mask, steps = np.frombuffer(tokens.mask, dtype=np.uint8), tokens.model_steps
        if oldest is not None:
            mask = np.where(steps >= oldest, mask, 0).astype(np.uint8)
        segments.append(
            TrainSegment(
                ids=unpack_ids(tokens.ids),
                logprobs=np.frombuffer(tokens.logprobs, dtype=np.float32),
                advantages=np.full(len(mask), advantage, dtype=np.float32),
                mask=mask,
                model_steps=steps,
                parent=segment.parent,
                start=_start(rollout, segment),
            )
        )
    return TrainAnswer(rollout.rollout_id, score, advantage, segments)


def _metrics(
    groups: Sequence[Group], scores: list[list[float]], trained: list[TrainGroup], train_step: int
) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group]
    flat_scores = np.asarray([score for row in scores for score in row])
    lengths = np.asarray([rollout.num_tokens for rollout in rollouts])
    cut = [rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts]
    written = [segment.tokens for rollout in rollouts for segment in rollout.segments]
    steps = np.concatenate([tokens.model_steps[np.frombuffer(tokens.mask, dtype=np.uint8) == 1] for tokens in written])
    # A version not older than this step comes from a lineage that a restart left behind; it counts as fresh.
    staleness: npt.NDArray[np.int64] = np.maximum(0, train_step - steps.astype(np.int64) - 1)
    values, counts = np.unique(staleness, return_counts=True)
    num_trained = sum(answer.num_trained for group in trained for answer in group.answers)
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
        **_reward_means(rollouts),
    }


def _reward_means(rollouts: Sequence[RolloutState]) -> dict[str, float]:
    """Of each task where there are several, and of each named part, over the rollouts that have it."""
    rewards: dict[str, list[float]] = defaultdict(list)
    several = len({rollout.task_name for rollout in rollouts}) > 1
    for rollout in rollouts:
        if rollout.reward is None:
            continue
        if several:
            rewards[f"reward/{rollout.task_name}/mean"].append(rollout.reward.score)
        for name, value in rollout.reward.parts.items():
            rewards[f"reward/parts/{name}"].append(value)
    return {name: float(np.mean(values)) for name, values in rewards.items()}
