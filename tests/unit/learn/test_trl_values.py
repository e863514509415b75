"""Losses, gradients and advantages where TRL defines the same, against what TRL itself computed.

The figures were recorded by `benchmarks/peers/trl_values.py`, which runs TRL's own lines on what is given.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loss_tokens import make_tokens

from penstock.learn import CISPOLossConfig, CorrectionConfig, GSPOLossConfig, KLConfig, PPOLossConfig, TrainWorkerConfig
from penstock.learn.advantages import AnswerTokens, Scored, estimate
from penstock.learn.losses import answer_weights
from penstock.learn.objective import Objective

RECORDED = json.loads((Path(__file__).parent / "data" / "trl_values.json").read_text())


def weights(level: Any, threshold: float | str) -> CorrectionConfig:
    return CorrectionConfig(bypass_mode=False, rollout_is=level, rollout_is_threshold=threshold)


OURS: dict[str, dict[str, Any]] = {
    "grpo, sequence-mean": {"loss": PPOLossConfig(aggregation="sequence-mean", ratio_cap=None)},
    "grpo, sequence-mean, dual clip": {"loss": PPOLossConfig(aggregation="sequence-mean", ratio_cap=3.0)},
    "dapo, token-mean, clip-higher": {"loss": PPOLossConfig(clip_high=0.28, ratio_cap=None)},
    "dr_grpo, constant": {"loss": PPOLossConfig(aggregation="constant", constant_length=9, ratio_cap=None)},
    "gspo": {"loss": GSPOLossConfig(clip_low=0.05, clip_high=0.06)},
    "cispo": {"loss": CISPOLossConfig()},
    "cispo, low cap": {"loss": CISPOLossConfig(ratio_cap=1.2)},
    "dapo with KL (k3) in the loss": {"loss": PPOLossConfig(ratio_cap=None), "kl": KLConfig(coef=0.1)},
    "grpo with the off-policy sequence mask": {
        "loss": PPOLossConfig(aggregation="sequence-mean", ratio_cap=None),
        "correction": CorrectionConfig(off_policy_mask_threshold=0.1),
    },
    "dapo with an entropy bonus": {"loss": PPOLossConfig(ratio_cap=None, entropy_coef=0.02)},
    "dapo with weights, token_truncate": {"loss": PPOLossConfig(ratio_cap=None), "correction": weights("token", 1.1)},
    "dapo with weights, token_mask": {"loss": PPOLossConfig(ratio_cap=None), "correction": weights("token", "0.9_1.1")},
    "dapo with weights, sequence_truncate": {
        "loss": PPOLossConfig(ratio_cap=None),
        "correction": weights("sequence", 1.1),
    },
    "dapo with weights, sequence_mask": {
        "loss": PPOLossConfig(ratio_cap=None),
        "correction": weights("sequence", "0.8_1.2"),
    },
}


def test_every_recorded_case_is_compared() -> None:
    assert RECORDED["trl"] == "1.16.0"
    assert OURS.keys() == RECORDED["cases"].keys()


@pytest.mark.parametrize("name", sorted(OURS))
def test_the_loss_and_its_gradient_are_those_of_trl(name: str) -> None:
    inputs = {key: np.asarray(value) for key, value in RECORDED["inputs"].items()}
    mask = inputs["mask"] == 1
    rows = np.broadcast_to(np.arange(len(mask))[:, None], mask.shape)
    tokens = make_tokens(
        inputs["logprobs"][mask],
        inputs["old_logprobs"][mask],
        inputs["advantages"][rows[mask]],
        rows[mask].astype(np.float64),
        engine=inputs["sampling_logprobs"][mask],
        reference=inputs["reference_logprobs"][mask] if "KL" in name else None,
        proximal=inputs["old_logprobs"][mask],
        entropy=inputs["entropies"][mask],
    )
    config = TrainWorkerConfig(**OURS[name])
    weights = answer_weights(mask.sum(1), config.loss)[rows[mask]]
    terms = Objective(config)(tokens, "proximal")
    loss = (terms.loss * torch.from_numpy(weights)).sum()
    theirs = RECORDED["cases"][name]
    assert loss.item() == pytest.approx(theirs["loss"], rel=1e-6)
    [gradient] = torch.autograd.grad(loss, tokens.logprobs)
    np.testing.assert_allclose(gradient, np.asarray(theirs["gradient"])[mask], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["dr_grpo", "rloo"])
def test_the_advantages_are_those_of_trl_also_where_one_was_not_judged(name: str) -> None:
    judged = [[score for score in row if score is not None] for row in RECORDED["scores"]]
    tokens = [[AnswerTokens(*(np.ones(1) for _ in range(5))) for _ in row] for row in judged]
    found = estimate(name, Scored(judged, [[1] * len(row) for row in judged], tokens))
    for row, scores, theirs in zip(found, RECORDED["scores"], RECORDED["advantages"][name], strict=True):
        expected = [value for value, score in zip(theirs, scores, strict=True) if score is not None]
        np.testing.assert_allclose([float(advantage[0]) for advantage in row], expected, rtol=1e-6, atol=1e-9)
