"""Groups to a train batch: the arrays of every segment, made once and with one length.

Groups that cannot be trained were stopped long before; meeting one here means that a stage let it through, and is an
error that names it. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.errors import RunError
from penstock.learn.advantages import AnswerTokens, DoubleArray, Scored, estimate
from penstock.learn.batch_metrics import batch_metrics
from penstock.learn.kl import KLConfig, kl_of_sampled
from penstock.learn.overlong import OverlongConfig
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

TokenColumns = Mapping[str, Sequence[FloatArray]]
"""One number per token: by rollout, one array per segment."""


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
    temperatures: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))
    """What each was sampled with: a logprob is log_softmax(logits / temperature). 1 when none are given."""
    reference_logprobs: FloatArray | None = None
    """Of the reference model."""
    proximal_logprobs: FloatArray | None = None
    """Of the trainer at the beginning of the step, where they were computed again."""

    def __post_init__(self) -> None:
        if not len(self.temperatures):
            object.__setattr__(self, "temperatures", np.ones(len(self.ids), np.float32))
        columns: list[npt.NDArray[Any]] = [self.ids, self.logprobs, self.advantages, self.mask, self.model_steps]
        columns.append(self.temperatures)
        columns += [column for column in (self.reference_logprobs, self.proximal_logprobs) if column is not None]
        if len({len(column) for column in columns}) != 1:
            raise ValueError(f"a segment's columns of {[len(column) for column in columns]} tokens must be equal")

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class TrainAnswer:
    """One rollout, with the score that its advantages are made of."""

    rollout_id: str
    score: float
    advantage: float
    """The mean over its trained tokens; for most estimators that of every token."""
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
    def is_idle(self) -> bool:
        """No trained token has an advantage: there is nothing to learn from."""
        return not any(segment.advantages[segment.mask == 1].any() for segment in self.segments)

    @property
    def on_policy(self) -> bool:
        """Every trained token was made by the weights just before this step."""
        return all((s.model_steps[s.mask == 1] == self.train_step - 1).all() for s in self.segments)


class BatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How groups become a train batch. What is by task has its name; a task that is not named has the default."""

    advantage: str = "grpo"
    gamma: float = 1.0
    temperatures: dict[str, float] = {}
    """Default 1."""
    token_stale_thresholds: dict[str, int | None] = {}
    """A token whose staleness reaches it stays as context and is not trained. Default None: all are."""
    max_tokens: dict[str, int] = {}
    """The budget of an answer; only `overlong` asks."""
    overlong: OverlongConfig | None = None
    kl: KLConfig | None = None
    distill_coef: float = 1.0

    @property
    def kl_in_reward(self) -> KLConfig | None:
        return self.kl if self.kl is not None and self.kl.place == "reward" else None


def prepare_batch(
    groups: Sequence[Group],
    *,
    train_step: int,
    settings: BatchSettings | None = None,
    reference: TokenColumns | None = None,
    teacher: TokenColumns | None = None,
) -> TrainBatch:
    """Advantages and columns of these groups for train step `train_step`.

    `reference` and `teacher` are logprobs of every token by the reference model and by a teacher; a KL in the reward
    needs the first, and the second adds -distill_coef * (log p - log q) to the advantage of each token.

    A batch of nothing but answers that the budget cut off, and that are not to be trained, is one without a trained
    token. Raises RunError for a group that cannot be trained, with its id and the rule, and when no token is left to
    train for any other reason;
    UserFunctionError when an estimator of the user's raises or does not answer with finite numbers.
    """
    settings = settings or BatchSettings()
    batch = bare_batch(groups, train_step=train_step, settings=settings)
    if reference is not None:
        batch = with_columns(batch, reference_logprobs=reference)
    scores = [[_score(rollout) for rollout in group] for group in groups]
    tokens, shaped = _rewards(groups, batch, scores, settings)
    lengths = [[int(answer.mask.sum()) for answer in group] for group in tokens]
    estimated = estimate(settings.advantage, Scored(shaped, lengths, tokens), gamma=settings.gamma)
    if teacher is not None:
        estimated = _with_teacher(estimated, batch, teacher, settings.distill_coef)
    given = [
        replace(group, answers=[_with_advantages(*each) for each in zip(group.answers, values, row, strict=True)])
        for group, values, row in zip(batch.groups, estimated, shaped, strict=True)
    ]
    batch = replace(batch, groups=given)
    metrics = _metrics(groups, batch, scores, shaped, settings)
    if teacher is not None and metrics["trained_tokens"]:
        metrics["distill/reverse_kl"] = _mean_over_trained(batch, teacher)
    return replace(batch, metrics=metrics)


def bare_batch(groups: Sequence[Group], *, train_step: int, settings: BatchSettings | None = None) -> TrainBatch:
    """The columns alone: every advantage is 0. For models that score the tokens before there are advantages."""
    settings = settings or BatchSettings()
    if not groups:
        raise RunError(f"train step {train_step}: the batch has no groups")
    for name, temperature in settings.temperatures.items():
        if not temperature > 0 or not math.isfinite(temperature):
            raise RunError(f"task {name!r}: temperature is {temperature}; logprobs to train on need one above 0")
    for group in groups:
        for rollout in group:
            _check(rollout, group, train_step)
    batch = TrainBatch(
        train_step,
        [
            TrainGroup(group[0].group_id, group[0].prompt_ids, [_answer(r, train_step, settings) for r in group])
            for group in groups
        ],
    )
    left_out = any(_is_left_out(rollout, settings) for group in groups for rollout in group)
    if not left_out and not any(answer.num_trained for answer in batch.answers):
        raise RunError(f"train step {train_step}: no token of {len(groups)} groups may be trained")
    return batch


def with_columns(
    batch: TrainBatch, *, reference_logprobs: TokenColumns | None = None, proximal_logprobs: TokenColumns | None = None
) -> TrainBatch:
    """The batch with these columns; one that is not given stays as it is."""

    def filled(answer: TrainAnswer) -> TrainAnswer:
        segments = answer.segments
        if reference_logprobs is not None:
            found = reference_logprobs[answer.rollout_id]
            segments = [replace(s, reference_logprobs=column) for s, column in zip(segments, found, strict=True)]
        if proximal_logprobs is not None:
            found = proximal_logprobs[answer.rollout_id]
            segments = [replace(s, proximal_logprobs=column) for s, column in zip(segments, found, strict=True)]
        return replace(answer, segments=segments)

    return replace(batch, groups=[replace(g, answers=[filled(a) for a in g.answers]) for g in batch.groups])


def _check(rollout: RolloutState, group: Group, train_step: int) -> None:
    """Raises RunError unless everything about it can be trained."""
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
    if wrong:
        where = f"group {first.group_id!r}, rollout {rollout.rollout_id!r}"
        raise RunError(f"{where} cannot be trained at step {train_step}: {'; '.join(wrong)}")


def _score(rollout: RolloutState) -> float:
    assert rollout.reward is not None, "it was checked"
    return rollout.reward.score


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


def _is_left_out(rollout: RolloutState, settings: BatchSettings) -> bool:
    """Whether none of it is trained because the budget cut it off."""
    masks = settings.overlong is not None and settings.overlong.mask_truncated
    return masks and rollout.finish_reason is FinishReason.LENGTH


def _answer(rollout: RolloutState, train_step: int, settings: BatchSettings) -> TrainAnswer:
    threshold = settings.token_stale_thresholds.get(rollout.task_name)
    dropped = _is_left_out(rollout, settings)
    temperature = settings.temperatures.get(rollout.task_name, 1.0)
    segments = []
    for segment in rollout.segments:
        tokens = segment.tokens
        mask, steps = np.frombuffer(tokens.mask, dtype=np.uint8), tokens.model_steps
        if threshold is not None:
            mask = np.where(steps >= train_step - threshold, mask, 0).astype(np.uint8)
        segments.append(
            TrainSegment(
                ids=unpack_ids(tokens.ids),
                logprobs=np.frombuffer(tokens.logprobs, dtype=np.float32),
                advantages=np.zeros(len(mask), dtype=np.float32),
                mask=np.zeros_like(mask) if dropped else mask,
                model_steps=steps,
                parent=segment.parent,
                start=_start(rollout, segment),
                temperatures=np.full(len(mask), temperature, dtype=np.float32),
            )
        )
    return TrainAnswer(rollout.rollout_id, 0.0, 0.0, segments)


def _rewards(
    groups: Sequence[Group], batch: TrainBatch, scores: list[list[float]], settings: BatchSettings
) -> tuple[list[list[AnswerTokens]], list[list[float]]]:
    """What estimators see of each answer: its tokens with their rewards, and their sum, which is its score."""
    tokens: list[list[AnswerTokens]] = []
    for group, trained, row in zip(groups, batch.groups, scores, strict=True):
        tokens.append(
            [
                _answer_tokens(rollout, answer, score, settings)
                for rollout, answer, score in zip(group, trained.answers, row, strict=True)
            ]
        )
    # The score itself where nothing was added to it: a sum would leave roundings.
    plain = settings.overlong is None and settings.kl_in_reward is None
    return tokens, scores if plain else [[float(math.fsum(t.rewards)) for t in row] for row in tokens]


def _answer_tokens(rollout: RolloutState, answer: TrainAnswer, score: float, settings: BatchSettings) -> AnswerTokens:
    written = [segment.tokens for segment in rollout.segments]
    mask = np.frombuffer(b"".join(tokens.mask for tokens in written), dtype=np.uint8)
    logprobs = np.concatenate([segment.logprobs for segment in answer.segments])
    rewards: DoubleArray = np.zeros(len(mask))
    if (kl := settings.kl_in_reward) is not None:
        references = [s.reference_logprobs for s in answer.segments if s.reference_logprobs is not None]
        if len(references) != len(answer.segments):
            raise RunError(f"rollout {rollout.rollout_id!r}: a KL in the reward needs the reference's logprobs")
        spent = kl.coef * kl_of_sampled(logprobs, np.concatenate(references), kl.estimator)
        rewards = np.where(mask == 1, -spent, 0.0)
    if settings.overlong is not None:
        budget = settings.max_tokens.get(rollout.task_name, len(mask))
        score += settings.overlong.shaping(int(mask.sum()), budget)
    # A rollout in which the model wrote nothing is not trained; its score counts for its siblings.
    rewards[np.flatnonzero(mask)[-1] if mask.any() else -1] += score
    return AnswerTokens(
        ids=np.concatenate([segment.ids for segment in answer.segments]),
        logprobs=logprobs,
        mask=mask,
        model_steps=np.concatenate([segment.model_steps for segment in answer.segments]),
        rewards=rewards,
    )


def _with_teacher(
    estimated: list[list[DoubleArray]], batch: TrainBatch, teacher: TokenColumns, coef: float
) -> list[list[DoubleArray]]:
    """Orthogonal to the estimator: -coef * (log p - log q) of each token on top of what it says."""

    def added(values: DoubleArray, answer: TrainAnswer) -> DoubleArray:
        logprobs = np.concatenate([segment.logprobs for segment in answer.segments]).astype(np.float64)
        of_teacher = np.concatenate(list(teacher[answer.rollout_id])).astype(np.float64)
        trained = np.concatenate([segment.mask for segment in answer.segments]) == 1
        if not np.isfinite(of_teacher[trained]).all():
            raise RunError(f"rollout {answer.rollout_id!r}: the teacher's logprob of a trained token is not finite")
        return np.where(trained, values - coef * (logprobs - of_teacher), values)

    return [
        [added(values, answer) for values, answer in zip(row, group.answers, strict=True)]
        for row, group in zip(estimated, batch.groups, strict=True)
    ]


def _mean_over_trained(batch: TrainBatch, teacher: TokenColumns) -> float:
    """Of log p - log q: how far the student is from its teacher, where it went."""
    differences = [
        (segment.logprobs - column)[segment.mask == 1]
        for answer in batch.answers
        for segment, column in zip(answer.segments, teacher[answer.rollout_id], strict=True)
    ]
    return float(np.concatenate(differences).mean(dtype=np.float64))


def _with_advantages(answer: TrainAnswer, values: DoubleArray, score: float) -> TrainAnswer:
    ends = np.cumsum([len(segment) for segment in answer.segments])
    trained = np.concatenate([segment.mask for segment in answer.segments]) == 1
    # The one number that most estimators give stays what it is; a mean of equal ones may round.
    same = values[trained] if trained.any() else values
    mean = float(same[0]) if (same == same[0]).all() else float(same.mean())
    segments = [
        replace(segment, advantages=piece.astype(np.float32))
        for segment, piece in zip(answer.segments, np.split(values, ends[:-1]), strict=True)
    ]
    return replace(answer, score=score, advantage=mean, segments=segments)


def _metrics(
    groups: Sequence[Group],
    batch: TrainBatch,
    scores: list[list[float]],
    shaped: list[list[float]],
    settings: BatchSettings,
) -> dict[str, float]:
    masks_truncated = settings.overlong is not None and settings.overlong.mask_truncated
    num_trained = [answer.num_trained for answer in batch.answers]
    metrics = batch_metrics(groups, scores, num_trained, batch.train_step, masks_truncated=masks_truncated)
    if shaped is not scores:
        metrics["reward/shaped_mean"] = float(np.mean([score for row in shaped for score in row]))
    return metrics
