"""Every metric of a run and what it means, for `docs/reference.md` and for whoever shows one.

A name in angle brackets stands for what differs: a task, a reason, a number. A metric that is not here is a user's own:
of a loss function (`train/<name>`), of `compute_metric_func` (`eval/<name>`), or of a judger.
"""

from __future__ import annotations

import re

METRICS = {
    # What the judges said.
    "reward/mean": "of all rollouts of the batch",
    "reward/std": "sample standard deviation of the same",
    "reward/raw_mean": "of all rollouts that were judged since the last batch, also of groups that were not trained",
    "reward/shaped_mean": "of the scores that advantages are made of, where a KL or over-long shaping changes them",
    "reward/equal_group_share": "groups whose rewards are all equal: they teach nothing",
    "reward/<task>/mean": "of one task, where there are several",
    "reward/parts/<part>": "of one part of a verdict, over the rollouts that have it",
    "judger/calls": "calls of reward functions since the run began",
    "judger/mean_latency_s": "of a call, the wait for a worker included",
    "judger/max_latency_s": "of the longest call",
    "judger/abstentions": "calls that were answered without a verdict",
    "judger/timeouts": "calls that met their deadline",
    "judger/worker_deaths": "worker processes that died or used too much memory during a call",
    "judger/workers_replaced": "worker processes that were replaced, for whatever reason",
    "judger/unjudged": "rollouts without a verdict",
    "judger/cache_hits": "rollouts whose verdict was remembered",
    "judger/circuit_opened": "times that calls were held back because the judge was down",
    "judger/<branch>/<figure>": "the same of one branch or part of a composed judger",
    # The batch.
    "length/mean": "tokens of an answer",
    "length/max": "of the longest",
    "length/truncated_share": "answers that `max_tokens` cut off",
    "length/masked_tokens": "tokens that are not trained because `max_tokens` cut their answer off",
    "distill/reverse_kl": "log p of the student less log q of its teacher, mean over the trained tokens",
    "staleness/mean": "of the tokens that the model wrote",
    "staleness/max": "of the oldest token",
    "staleness/masked_tokens": "tokens of the model that are not trained because they are too stale",
    "staleness/tokens_<n>": "tokens of staleness n",
    "turns/mean": "answers of the model in a rollout, for loops of several turns",
    "turns/per_segment": "answers of the model in a segment: how much of a conversation is one row",
    "tools/calls_mean": "calls of tools in a rollout",
    "tools/failed_share": "calls of tools that failed",
    "tools/<outcome>_share": "the same by what went wrong",
    "trained_tokens": "tokens that have a gradient",
    # Producing.
    "produce/groups": "groups of the batch",
    "produce/rollouts": "rollouts that were played since the last batch",
    "produce/failed": "rollouts that failed since the last batch",
    "produce/filtered": "rollouts of groups that `is_valid_sample_fn` did not let pass",
    "produce/pause_s": "seconds in pauses since the last batch",
    "produce/<task>/group_time_mean_s": "seconds from the first request of a group to its last verdict",
    "produce/<task>/group_time_p50_s": "the median of the same",
    "produce/<task>/group_time_p99_s": "the 99th percentile",
    "produce/<task>/group_time_p99_to_p50": "how much longer the slow ones take: over-sampling helps against it",
    "produce/<task>/leftover/<status>": "groups that wait after the batch was taken",
    "produce/<task>/discarded/<reason>": "groups that were discarded since the last batch",
    "tokens/generated": "by all engines for training, since the last batch",
    "tokens/generated_per_s": "of the seconds in which something was produced",
    "tokens/wasted": "tokens that will not be trained",
    "tokens/wasted/<reason>": "the same by reason",
    "tokens/trained_per_s": "trained tokens per second of training",
    # Training. What a loss function reports of its own is `train/<name>` too.
    "train/loss": "mean over the updates of the step",
    "train/grad_norm": "before it is clipped",
    "train/lr": "of the step",
    "train/tokens": "trained tokens, those of every update",
    "train/micro_batches": "pieces that the batch was computed in",
    "train/padding_share": "cells of the micro-batches that hold nothing",
    "train/entropy": "of the model's distribution, mean over the trained tokens",
    "train/clip_fraction_low": "share of the trained tokens whose ratio is below its bound, and which it holds",
    "train/clip_fraction_high": "share of those whose ratio is above it",
    "train/clip_fraction_dual": "share of those with a negative advantage that `ratio_cap` bounds",
    "train/correction/truncated": "share of the trained tokens whose importance weight is truncated",
    "train/correction/outside_band": "share of those whose weight is outside its band, and so 0",
    "train/rejected/<reason>": "share of those that are rejected: by one of `rollout_rs`, by `off_policy`, by `any`",
    "train/reference_kl": "KL to the reference model by the estimator of `train.kl`, mean over the trained tokens",
    "train/ratio/min": "smallest ratio of a token to the old policy, where that is not the current one",
    "train/ratio/max": "the largest",
    "train/ratio/kl": "estimate (k1) of the KL of the old and the current policy",
    "train/mismatch/mean_abs": "mean difference of the trainer's and the engine's logprob of the same token",
    "train/mismatch/max_abs": "the largest",
    "train/mismatch/kl": "estimate (k1) of the KL divergence of engine and trainer",
    "train/mismatch/k3_kl": "the same by k3, which is never negative",
    "train/mismatch/ratio_min": "smallest ratio of the trainer's probability of a token to the engine's",
    "train/mismatch/ratio_max": "the largest",
    "train/mismatch/ess": "effective sample size of the batch under the trainer's probabilities, as a share",
    "train/seconds/<part>": "of rounding, forward, backward, clipping, the optimiser, the passes of the reference "
    "and of the old policy (`proximal`), and all together (`total`)",
    "train/tokens_per_s": "trained tokens per second of the whole step",
    "train/shared_prompts": "1 where a common context is computed once",
    "train/fused": "1 where the passes written for this family are used",
    "train/bfloat16": "1 where products are computed from bfloat16",
    "train/threads": "CPU threads that the trainer computed with, at the end of the step; of each rank",
    # Where the time goes.
    "time/step_s": "a train step from beginning to end, evaluation not included",
    "time/<stage>_s": "of it: produce, prepare, train, commit, checkpoint, sync; and eval of an evaluation",
    "share/trainer_wait": "of a step, in which the trainer waited for its batch (disaggregated)",
    "share/engine_idle": "of the time since the last step, in which the engines computed nothing (disaggregated)",
    # Evaluation. `eval/greedy_...` is the same at temperature 0.
    "eval/accuracy": "answers that reach `success_score`",
    "eval/score": "mean reward",
    "eval/pass@<k>": "prompts of which at least one of k answers is right",
    "eval/avg@<k>": "mean share of right answers among k",
    "eval/length": "tokens of an answer",
    "eval/truncated_share": "answers that `max_tokens` cut off",
    "eval/failed_prompts": "prompts that could not be played or judged; they are in no other figure",
    "eval/<source>/<figure>": "the same of one data source, where there are several",
}


UNITS = (
    (r"(.*/)?(tokens|masked_tokens|trained_tokens|generated|tokens_<n>)", "tokens"),
    (r"tokens/wasted(/.*)?", "tokens"),
    (r".*tokens(_trained)?_per_s|tokens/.*_per_s", "tokens a second"),
    (r"length/(mean|max)|eval/length", "tokens"),
    (r".*_s|train/seconds/.*", "seconds"),
    (
        r".*(share|_share|clip_fraction_\w+|padding_share)|share/.*|train/(correction|rejected)/.*|.*/ess",
        "share, 0 to 1",
    ),
    (r"eval/(accuracy|pass@<k>|avg@<k>)", "share, 0 to 1"),
    (r"reward/.*|eval/score", "score"),
    (r".*(kl|KL|mean_abs|max_abs|entropy)", "nats a token"),
    (r"staleness/(mean|max)", "train steps"),
    (r".*(ratio\w*|ratio/\w+|p99_to_p50)", "ratio"),
    (r"train/(shared_prompts|fused|bfloat16)", "0 or 1"),
    (r"train/(loss|grad_norm|lr)", "number"),
    (r".*/(leftover|discarded)/.*|produce/groups", "groups"),
    (r"produce/(rollouts|failed|filtered)|judger/(unjudged|cache_hits)", "rollouts"),
    (r"eval/failed_prompts", "prompts"),
    (r".*<figure>", "as the figure"),
    (r"judger/\w+|turns/\w+|tools/\w+|train/(micro_batches|threads)", "count"),
)
"""The first pattern that fits a name of `METRICS` says what it is counted in."""


def unit(name: str) -> str:
    """Of a name of `METRICS`. Raises KeyError for one that no pattern of `UNITS` fits: add one."""
    for pattern, found in UNITS:
        if re.fullmatch(pattern, name):
            return found
    raise KeyError(f"{name} has no unit; add a pattern to UNITS")


def meaning(metric: str) -> str | None:
    """What a metric of a run is; None for one that is not known here."""
    metric = metric.replace("eval/greedy_", "eval/", 1)
    if metric in METRICS:
        return METRICS[metric]
    return next((text for name, text in METRICS.items() if "<" in name and _pattern(name).fullmatch(metric)), None)


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("".join("[^/]+" if part.startswith("<") else re.escape(part) for part in _parts(name)))


def _parts(name: str) -> list[str]:
    return [part for part in re.split(r"(<[^>]+>)", name) if part]
