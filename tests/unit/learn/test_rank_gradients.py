"""However a step is divided among ranks, its gradient is that of one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_program
from rank_program import Case, Made

from penstock.learn.batch import TrainBatch, prepare_batch
from penstock.learn.kl import KLConfig
from penstock.learn.lora import LoRAConfig
from penstock.learn.losses import GSPOLossConfig, PPOLossConfig
from penstock.learn.step_metrics import outcome
from penstock.rollout import Group

WAYS: dict[str, dict[str, Any]] = {
    "fused": {},
    "plain": {"fused": False},
    "sharded": {"sharding": "fsdp2"},
    "sharded, prompts not shared, recomputed": {
        "sharding": "fsdp2", "share_prompts": False, "activation_checkpointing": True
    },
}  # fmt: skip
AGGREGATIONS: dict[str, dict[str, Any]] = {
    "token-mean": {},
    "sequence-mean": {"loss": PPOLossConfig(aggregation="sequence-mean")},
    "constant": {"loss": PPOLossConfig(aggregation="constant", constant_length=9)},
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "gspo": {"loss": GSPOLossConfig(clip_low=0.5, clip_high=0.5)},
    "reference and entropy": {"loss": PPOLossConfig(entropy_coef=0.01), "kl": KLConfig(coef=0.1, estimator="k2")},
    "adapter": {"lora": LoRAConfig(rank=4), "correction": "seq_tis"},
    "decoupled": {"correction": "decoupled", "updates_per_batch": 2},
}
"""Off-policy, with quantities of whole answers and columns that other models computed."""
SMALL = {"max_tokens_per_micro_batch": 48}
"""Several micro-batches, of which ranks have different numbers."""
SIZES = (2, pytest.param(4, marks=pytest.mark.long_tier))

OfRanks = Callable[[int], dict[str, list[Made]]]
"""What so many ranks made of each case."""


@pytest.fixture(scope="module")
def cases(random_trees: Callable[..., list[Group]]) -> dict[str, Case]:
    trees = prepare_batch(random_trees(3, num_groups=3), train_step=1)
    lonely = rank_program.masked(trees, keep=[4])
    exploding = _with_advantage_of_first(trees, 1000.0)
    cases = {f"{name}, trees": Case(batch=trees, config={**way, **SMALL}) for name, way in WAYS.items()}
    cases |= {
        f"{name}, {kind}": Case(batch=trees, config={**WAYS[name], **aggregation})
        for name in ("fused", "sharded")
        for kind, aggregation in AGGREGATIONS.items()
    }
    stale = replace(trees, train_step=3)
    cases |= {
        f"{name}, {kind}": Case(batch=stale, config={**WAYS[name], **SMALL, **objective})
        for name in ("fused", "sharded")
        for kind, objective in OBJECTIVES.items()
        if name == "fused" or kind in ("adapter", "reference and entropy")
    }
    for name in ("fused", "sharded"):
        way = WAYS[name]
        cases[f"{name}, one answer trained"] = Case(batch=lonely, config=way)
        cases[f"{name}, two updates"] = Case(batch=trees, config={**way, "updates_per_batch": 2})
        cases[f"{name}, infinite on one rank"] = Case(
            batch=exploding, config={**way, **SMALL, "loss": "rank_program.nothing_finite"}
        )
        cases[f"{name}, raised on one rank"] = Case(
            batch=exploding, config={**way, **SMALL, "loss": "rank_program.raises_on_one"}
        )
        cases[f"{name}, one rank stopped"] = Case(batch=trees, config={**way, **SMALL}, stopped_rank=1)
    return cases


def _with_advantage_of_first(batch: TrainBatch, advantage: float) -> TrainBatch:
    first, *others = batch.groups[0].answers
    segments = [replace(s, advantages=np.full_like(s.advantages, advantage)) for s in first.segments]
    changed = replace(batch.groups[0], answers=[replace(first, segments=segments), *others])
    return replace(batch, groups=[changed, *batch.groups[1:]])


@pytest.fixture(scope="module")
def made(cases: dict[str, Case], model_dir: Path) -> OfRanks:
    lone = {name: cases[name] for name in ("sharded, trees", "sharded, one answer trained")}
    return functools.cache(lambda size: rank_program.together(size, lone if size == 1 else cases, model_dir))


@pytest.fixture(scope="module")
def expected(cases: dict[str, Case], model_dir: Path) -> dict[str, Made]:
    """By one process, without sharding, all in one micro-batch."""
    whole = {"sharding": "none", "max_tokens_per_micro_batch": 1024}
    return {
        name: rank_program.alone(Case(batch=case.batch, config={**case.config, **whole}), model_dir)
        for name, case in cases.items()
        if "on one rank" not in name and "stopped" not in name
    }


@pytest.mark.parametrize("size", (1, *SIZES))
def test_the_gradient_is_that_of_one_process(made: OfRanks, expected: dict[str, Made], size: int) -> None:
    for name, one in [(name, one) for name, one in expected.items() if name in made(size)]:
        for rank in made(size)[name]:
            assert rank.error == ""
            assert rank.gradient.keys() == one.gradient.keys()
            for key, gradient in one.gradient.items():
                np.testing.assert_allclose(rank.gradient[key], gradient, atol=1e-6, rtol=1e-5, err_msg=f"{name}, {key}")


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_has_the_same_weights_to_the_bit_afterwards(made: OfRanks, size: int) -> None:
    for ranks in made(size).values():
        for other in ranks[1:]:
            assert all(np.array_equal(ranks[0].weights[key], other.weights[key]) for key in ranks[0].weights)


@pytest.mark.parametrize("size", SIZES)
def test_metrics_and_logprobs_are_those_of_one_process(made: OfRanks, expected: dict[str, Made], size: int) -> None:
    for name, one in expected.items():
        reports = [rank.report for rank in made(size)[name] if rank.report is not None]
        assert one.report is not None
        ranks, single = outcome(reports), outcome([one.report])
        assert ranks.metrics.keys() == single.metrics.keys()
        for key in ("loss", "grad_norm", "tokens", "entropy", "mismatch/max_abs", "mismatch/ess", "lr"):
            assert ranks.metrics[key] == pytest.approx(single.metrics[key], rel=1e-4, abs=1e-6), (name, key)
        assert ranks.logprobs.keys() == single.logprobs.keys()
        for rollout, segments in single.logprobs.items():
            for found, segment in zip(ranks.logprobs[rollout], segments, strict=True):
                np.testing.assert_allclose(found, segment, atol=1e-4)
        scores = {rollout: found for rank in made(size)[name] for rollout, found in rank.scores.items()}
        assert scores.keys() == one.scores.keys()
        for rollout, segments in one.scores.items():
            for found, segment in zip(scores[rollout], segments, strict=True):
                np.testing.assert_allclose(found, segment, atol=1e-4)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("what", "errors"),
    [
        ("infinite on one rank", {"StepRefused"}),
        ("raised on one rank", {"UserFunctionError", "PeerFailed"}),
        ("one rank stopped", {"Stopped", "PeerFailed"}),
    ],
)
def test_a_step_that_one_rank_cannot_make_is_refused_on_all_and_changes_nothing(
    made: OfRanks,
    expected: dict[str, Made],
    model_dir: Path,
    size: int,
    what: str,
    errors: set[str],
) -> None:
    from safetensors.torch import load_file

    before = load_file(model_dir / "model.safetensors")
    for name in ("fused", "sharded"):
        ranks = made(size)[f"{name}, {what}"]
        assert {rank.error for rank in ranks} == errors
        for rank in ranks:
            assert all(np.array_equal(rank.weights[key], before[key].numpy()) for key in rank.weights)


@pytest.mark.parametrize("size", SIZES)
def test_some_rank_had_no_token_to_train(made: OfRanks, size: int) -> None:
    """Otherwise the cases above would not show what they are there for."""
    tokens = [rank.report.tokens for rank in made(size)["sharded, one answer trained"] if rank.report is not None]
    assert sorted(tokens)[: size - 1] == [0] * (size - 1)
    assert max(tokens) > 0
