"""TRL's own losses, gradients and advantages on a made-up batch, for tests to compare with. Runs in TRL's environment.

    python -m peers        (in benchmarks/, makes the environment once)
    .peers/trl/bin/python benchmarks/peers/trl_values.py tests/unit/learn/data/trl_values.json

What is computed is TRL's `GRPOTrainer._compute_loss`, with logprobs that are given instead of a model's. Importance
weights and advantages are made in the middle of a method that also generates: of that one, the lines that make them are
run. The file says what went in, what came out, and by which version.
"""

from __future__ import annotations

import inspect
import json
import sys
import textwrap
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import trl
from trl import GRPOTrainer, RLOOTrainer

ROWS, LENGTH, K = 7, 9, 5

CASES: dict[str, dict[str, Any]] = {
    "grpo, sequence-mean": {"loss_type": "grpo"},
    "grpo, sequence-mean, dual clip": {"loss_type": "grpo", "delta": 3.0},
    "dapo, token-mean, clip-higher": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dr_grpo, constant": {"loss_type": "dr_grpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.06},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "cispo, low cap": {"loss_type": "cispo", "epsilon_high": 1.2},
    "dapo with KL (k3) in the loss": {"loss_type": "dapo", "beta": 0.1},
    "grpo with the off-policy sequence mask": {"loss_type": "grpo", "off_policy_mask_threshold": 0.1},
    "dapo with an entropy bonus": {"loss_type": "dapo", "entropy_coef": 0.02, "_entropy_bonus_enabled": True},
    "dapo with weights, token_truncate": {"loss_type": "dapo", "weights": ("token_truncate", None, 1.1)},
    "dapo with weights, token_mask": {"loss_type": "dapo", "weights": ("token_mask", 0.9, 1.1)},
    "dapo with weights, sequence_truncate": {"loss_type": "dapo", "weights": ("sequence_truncate", None, 1.1)},
    "dapo with weights, sequence_mask": {"loss_type": "dapo", "weights": ("sequence_mask", 0.8, 1.2)},
}


def make_inputs() -> dict[str, Any]:
    """Rows of several lengths with text of tools in them, one of a single token; one row whose advantage is 0."""
    rng = np.random.default_rng(17)
    lengths = np.asarray([1, 9, 4, 7, 9, 2, 5])
    mask = (np.arange(LENGTH) < lengths[:, None]) & (rng.random((ROWS, LENGTH)) < 0.8)
    mask[:, 0] = True
    logprobs = -rng.exponential(size=(ROWS, LENGTH))
    old = logprobs + 0.4 * rng.normal(size=(ROWS, LENGTH))
    old[1, 0] = logprobs[1, 0] - 4.0
    advantages = rng.normal(size=ROWS)
    advantages[2] = 0.0
    advantages[1] = -abs(advantages[1])
    return {
        "mask": mask.astype(int).tolist(),
        "logprobs": logprobs.tolist(),
        "old_logprobs": old.tolist(),
        "sampling_logprobs": (old + 0.1 * rng.normal(size=(ROWS, LENGTH))).tolist(),
        "reference_logprobs": (logprobs + 0.5 * rng.normal(size=(ROWS, LENGTH))).tolist(),
        "advantages": advantages.tolist(),
        "entropies": rng.exponential(size=(ROWS, LENGTH)).tolist(),
    }


def make_scores() -> list[list[float | None]]:
    """Groups; one of equal scores, one with an answer that nobody judged."""
    scores: list[list[float | None]] = np.random.default_rng(18).normal(size=(4, K)).round(3).tolist()
    scores[1] = [0.5] * K
    scores[2][3] = None
    return scores


def run_lines(trainer: Any, begin: str, end: str, names: dict[str, Any]) -> dict[str, Any]:
    """TRL's own lines, from the one with `begin` to before the one with `end`; what they made of `names`."""
    lines = inspect.getsource(trainer._generate_and_score_completions).splitlines()
    first = next(number for number, line in enumerate(lines) if begin in line)
    last = next(number for number in range(first, len(lines)) if end in lines[number])
    scope = {**vars(inspect.getmodule(trainer)), **names}  # type: ignore[arg-type]
    exec(textwrap.dedent("\n".join(lines[first:last])), scope)
    return scope


def importance_weights(mode: str, low: float | None, high: float, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    settings = SimpleNamespace(
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )
    names = {
        "self": settings,
        "old_per_token_logps": tensors["old_logprobs"],
        "sampling_per_token_logps": tensors["sampling_logprobs"],
        "mask": tensors["mask"],
    }
    begin, end = "per_token_logps_diff = (old", "# Compute the per-token log probabilities for the reference"
    found: torch.Tensor = run_lines(GRPOTrainer, begin, end, names)["vllm_importance_sampling_ratio"]
    return found


def advantages(scores: list[list[float | None]]) -> dict[str, list[list[float]]]:
    rewards = torch.tensor([[np.nan if s is None else s for s in row] for row in scores], dtype=torch.float64).flatten()
    names = {"rewards": rewards, "num_generations": K}
    grpo = {**names, "self": SimpleNamespace(scale_rewards="none")}
    rloo = {**names, "self": SimpleNamespace(normalize_advantages=False)}
    found = {
        "dr_grpo": run_lines(GRPOTrainer, "mean_grouped_rewards = torch.nanmean(rewards.view", "is_std_zero =", grpo),
        "rloo": run_lines(RLOOTrainer, "grouped_rewards = rewards.view(-1", "# Unscorable completions carry", rloo),
    }
    return {name: scope["advantages"].nan_to_num(0.0).view(-1, K).tolist() for name, scope in found.items()}


def trainer_of(case: dict[str, Any], logprobs: torch.Tensor, entropies: torch.Tensor) -> Any:
    """A trainer that has what `_compute_loss` asks for, and no model."""
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    settings: dict[str, Any] = {
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "loss_type": "grpo",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": LENGTH,
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
        "_metrics": {"train": defaultdict(list)},
        "model": SimpleNamespace(training=True),
    }
    delta = case.get("delta")
    settings |= {name: value for name, value in case.items() if name not in ("delta", "weights")}
    if "weights" in case:
        settings |= {"use_vllm": True, "vllm_importance_sampling_correction": True}
    for name, value in settings.items():
        object.__setattr__(trainer, name, value)
    trainer.args = SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1)
    trainer.accelerator = SimpleNamespace(
        num_processes=1,
        sync_gradients=False,
        gather=lambda x: x,
        reduce=lambda x, reduction: x,
        gather_for_metrics=lambda x: x,
    )
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, entropies, None)
    return trainer


def compute(case: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in given.items()}
    logprobs, mask = tensors["logprobs"].requires_grad_(), tensors["mask"]
    nothing = torch.zeros(ROWS, 1, dtype=torch.long)
    weights = importance_weights(*case["weights"], tensors) if "weights" in case else None
    loss = trainer_of(case, logprobs, tensors["entropies"])._compute_loss(
        None,
        {
            "prompt_ids": nothing,
            "prompt_mask": nothing,
            "completion_ids": torch.zeros(ROWS, LENGTH, dtype=torch.long),
            "completion_mask": mask,
            "advantages": tensors["advantages"],
            "old_per_token_logps": tensors["old_logprobs"],
            "sampling_per_token_logps": tensors["sampling_logprobs"],
            "ref_per_token_logps": tensors["reference_logprobs"],
            "num_items_in_batch": mask.sum(),
            "importance_sampling_ratio": weights,
        },
    )
    [gradient] = torch.autograd.grad(loss, logprobs)
    return {"settings": case, "loss": loss.item(), "gradient": gradient.tolist()}


def main() -> None:
    given = make_inputs()
    found = {name: compute(case, given) for name, case in CASES.items()}
    scores = make_scores()
    recorded = {"trl": trl.__version__, "inputs": given, "cases": found}
    recorded |= {"scores": scores, "advantages": advantages(scores)}
    Path(sys.argv[1]).write_text(json.dumps(recorded) + "\n")


if __name__ == "__main__":
    main()
