"""Functions that a model writes, run in the sandbox, as a user trains on them."""

from __future__ import annotations

import json

import numpy as np
import pytest


@pytest.mark.soak_tier
@pytest.mark.timeout(300)
def test_code_tiny_learns_to_write_functions_that_pass_their_tests(penstock, tmp_path, read_lines):
    run = penstock("train", "code-tiny", "--run-dir", "run", "--set", "eval_interval=30")
    output, _ = run.communicate(timeout=280)
    assert run.returncode == 0, output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval_accuracy_after"] - summary["eval_accuracy_before"] >= 0.3, summary
    rewards = [line["reward/mean"] for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "reward/mean" in line]
    assert np.mean(rewards[-5:]) - np.mean(rewards[:3]) >= 0.3, rewards
