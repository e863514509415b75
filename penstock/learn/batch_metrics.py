"""What a train batch says about itself before it is trained: rewards, lengths, staleness, what is masked."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.learn.advantages import all_equal
from penstock.rollout import FinishReason, Group, RolloutState


def batch_metrics(
    groups: Sequence[Group],
    scores: list[list[float]],
    num_trained: list[int],
    train_step: int,
    *,
    masks_truncated: bool,
) -> dict[str, float]:
    """`scores` are the judges' own; `num_trained` counts the trained tokens of every rollout."""
    rollouts = [rollout for group in groups for rollout in group]
    flat_scores = np.asarray([score for row in scores for score in row])
    lengths = np.asarray([rollout.num_tokens for rollout in rollouts])
    cut = [rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts]
    written = [_written_steps(rollout) for rollout in rollouts]
    steps = np.concatenate(written)
    # A version not older than this step comes from a lineage that a restart left behind; it counts as fresh.
    staleness: npt.NDArray[np.int64] = np.maximum(0, train_step - steps.astype(np.int64) - 1)
    values, counts = np.unique(staleness, return_counts=True)
    truncated = sum(len(w) for w, is_cut in zip(written, cut, strict=True) if is_cut) if masks_truncated else 0
    return {
        "reward/mean": float(flat_scores.mean()),
        "reward/std": float(flat_scores.std(ddof=1)) if len(flat_scores) > 1 else 0.0,
        "reward/equal_group_share": float(np.mean([all_equal(row) for row in scores])),
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "length/truncated_share": float(np.mean(cut)),
        "length/masked_tokens": float(truncated),
        "staleness/mean": float(staleness.mean()) if len(staleness) else 0.0,
        "staleness/max": float(staleness.max()) if len(staleness) else 0.0,
        "staleness/masked_tokens": float(len(staleness) - truncated - sum(num_trained)),
        "trained_tokens": float(sum(num_trained)),
        **{f"staleness/tokens_{value}": float(count) for value, count in zip(values, counts, strict=True)},
        **_reward_means(rollouts),
        **_turn_metrics(rollouts),
    }


def _written_steps(rollout: RolloutState) -> npt.NDArray[np.int32]:
    """The model step of every token that the model wrote."""
    return np.concatenate(
        [s.tokens.model_steps[np.frombuffer(s.tokens.mask, dtype=np.uint8) == 1] for s in rollout.segments]
    )


def _turn_metrics(rollouts: Sequence[RolloutState]) -> dict[str, float]:
    """Of rollouts with several turns: answers of each, answers per segment (1 row for each linear conversation), and
    how many calls of tools there were and which failed."""
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    if len(turns) <= len(rollouts):
        return {}
    answers = sum(turn.kind == "generate" for turn in turns)
    calls = Counter(turn.outcome for turn in turns if turn.kind == "tool")
    found = {
        "turns/mean": answers / len(rollouts),
        "turns/per_segment": answers / max(1, sum(len(rollout.segments) for rollout in rollouts)),
    }
    if total := calls.total():
        failed = {name: count for name, count in calls.items() if name}
        found["tools/calls_mean"] = total / len(rollouts)
        found["tools/failed_share"] = sum(failed.values()) / total
        found |= {f"tools/{name}_share": count / total for name, count in failed.items()}
    return found


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
