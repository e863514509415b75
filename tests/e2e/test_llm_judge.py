"""A language model judges on the engines of the run that it judges: neither waits for the other for ever."""

from __future__ import annotations

import pytest

RUN = """\
from penstock import ComposedJudgerConfig, LLMJudgerConfig, SampleParams, exact_match, weighted_sum
from penstock.recipes.{recipe} import trainer as recipe

# The model, which has learnt to read backwards, reads the answer; the first letter that it says is the rating.
reads = LLMJudgerConfig(
    template="{{response}}>",
    pattern=r"\\A(.?)",
    choices={{letter: float(worth) for worth, letter in enumerate(["", *"abcdefgh"])}},
    sample_params=SampleParams(temperature=0.0, max_tokens=16),
    max_retries=0,
)
both = ComposedJudgerConfig(
    all_of={{"right": exact_match, "reads": reads}}, merge=weighted_sum, weights={{"right": 1.0, "reads": 0.01}}
)
trainer = (
    recipe.replace("manager.tasks.0.judger_config", both)
    .replace("evaluator.tasks.0.judger_config", both)
    .replace("evaluator.eval_sample_num", 8)
    .replace("eval_interval", 2)
    .replace("total_steps", {steps})
    .replace("train_batch_size", 4)
    .replace("cpu_threads", 1)
    # Fewer places than rollouts: judges and rollouts wait in the same line.
    .replace("engines.controller.max_requests_per_engine", 6)
)
"""


@pytest.mark.long_tier
@pytest.mark.parametrize(("recipe", "steps"), [("tiny", 4), ("tiny_async", 8)])
def test_a_judge_on_the_engines_of_its_own_run_judges_every_answer(penstock, tmp_path, read_lines, recipe, steps):
    (tmp_path / "run.py").write_text(RUN.format(recipe=recipe, steps=steps))
    run = penstock("train", "run.py", "--run-dir", "run")
    output, _ = run.communicate(timeout=180)
    assert run.returncode == 0, output

    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    last = [line for line in lines if "reward/mean" in line][-1]
    assert last["step"] == steps
    # A request that a weight sync had cut off would have left its rollout unjudged: none is repeated here.
    assert last["judger/reads/unjudged"] == last["judger/reads/timeouts"] == 0
    assert last["judger/reads/calls"] >= steps * 4 * 8
    assert [line["eval/failed_prompts"] for line in lines if "eval/accuracy" in line] == [0] * (steps // 2 + 1)
    for step in range(1, steps + 1):
        trained = read_lines(tmp_path / "run" / "trajectories" / f"step-{step:06d}.jsonl")
        assert len(trained) == 4 * 8
        for rollout in trained:
            parts = rollout["reward"]["parts"]
            assert parts["right"] == (rollout["answer"] == rollout["ground_truth"])
            assert rollout["reward"]["score"] == pytest.approx(parts["right"] + 0.01 * parts["reads"])
    # It read: what it said first is nearly always the last letter of what it was shown.
    agreed = ["_abcdefgh"[int(rollout["reward"]["parts"]["reads"])] == rollout["answer"][-1:] for rollout in trained]
    assert sum(agreed) > len(agreed) / 2
