"""A signal in the middle of an evaluation: the run ends in order without it, and makes it when it goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.testing import check_ledger

RUN = """
import asyncio, os, signal
from pathlib import Path

from penstock import JsonlTrackerConfig
from penstock.agent_loop import SingleTurnAgentLoop
from penstock.agent_loop.config import AgentLoopConfig
from penstock.recipes.{recipe} import trainer as recipe
from penstock.rollout import SampleParams, Verdict

HANGS = Path("hangs")


class Answers(SingleTurnAgentLoop):
    sets_reward = True

    async def generate_sample(self, rollout):
        await self.generate(rollout)
        rollout.reward = Verdict(float(len(rollout.response_text) % 2))
        return rollout


class IsLookedAt(Answers):
    async def generate_sample(self, rollout):
        await super().generate_sample(rollout)
        if HANGS.exists() and int(HANGS.read_text()) == rollout.steps[0][0]:
            HANGS.unlink()
            os.kill(os.getpid(), signal.SIG{number})
            await asyncio.Event().wait()
        return rollout


changes = {{
    "engines.engine.process": False,
    "total_steps": 2,
    "train_batch_size": 2,
    "eval_interval": 1,
    "evaluator.greedy": False,
    "evaluator.eval_sample_num": 4,
    "trackers": [JsonlTrackerConfig()],
}}
for part, loop in (("manager", Answers), ("evaluator", IsLookedAt)):
    changes[part + ".tasks.0.judger_config"] = None
    changes[part + ".tasks.0.agent_loop_config"] = AgentLoopConfig(loop=loop, sample_params=SampleParams(max_tokens=8))
trainer = recipe
for path, value in changes.items():
    trainer = trainer.replace(path, value)
"""


@pytest.mark.parametrize(
    ("recipe", "model_step", "number"),
    [
        ("tiny", 0, "INT"),
        ("tiny_async", 0, "TERM"),
        pytest.param("tiny", 1, "INT", marks=pytest.mark.long_tier),
        pytest.param("tiny_async", 2, "INT", marks=pytest.mark.long_tier),
    ],
)
def test_a_signal_ends_an_evaluation_at_once_and_the_resumed_run_makes_it(
    recipe, model_step, number, tmp_path, monkeypatch, capsys, read_lines
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("signalled.py").write_text(RUN.format(recipe=recipe, number=number))
    Path("hangs").write_text(str(model_step))

    def trained_and_evaluated() -> dict[str, list[int]]:
        lines = read_lines(Path("run/metrics.jsonl")) if Path("run/metrics.jsonl").exists() else []
        return {kind: [line["step"] for line in lines if line["kind"] == kind] for kind in ("train", "eval")}

    def train(*arguments: str) -> int:
        sys.modules.pop("signalled", None)  # as in a process of its own
        return main(["train", "signalled.py", "--run-dir", "run", *arguments])

    assert train() == 0
    said = capsys.readouterr().out
    assert f"the evaluation of model step {model_step} was given up" in said
    assert "Resume with: penstock train signalled.py --run-dir run --resume" in said
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["interrupted"] and summary["error"] is None and summary["steps"] == model_step
    assert trained_and_evaluated() == {"train": [*range(1, model_step + 1)], "eval": [*range(model_step)]}

    assert train("--resume") == 0
    summary = json.loads(Path("run/summary.json").read_text())
    assert not summary["interrupted"] and summary["steps"] == 2 and summary["eval_after_step"] == 2
    assert trained_and_evaluated() == {"train": [1, 2], "eval": [0, 1, 2]}
    check_ledger(Path("run")).require_none()
