"""The recipes of GSM8K, from files as they are published to a trained step, with and without a language model as judge.

The model is made here: two layers over characters that answer everything with a number from 2 to 5 in double brackets.
It is the student, whose answer is right about every fourth time, and served beside the run it is the judge too.
"""

from __future__ import annotations

import json
import random
import re

import pytest

from penstock.cli import main
from penstock.models.lessons import make_taught
from penstock.models.tiny import character_tokenizer
from penstock.recipes.gsm8k import to_rollout
from penstock.recipes.gsm8k_llm_judge import reasoning

SUMS = [(1, 1), (1, 2), (2, 2), (1, 4), (3, 1), (2, 3), (0, 2), (0, 3)]
CONTEXT = 1024


def row(first, second):
    """As GSM8K has it: the answer reasons, with its sums in double angle brackets, and ends in the number."""
    total = first + second
    return {
        "question": f"Ann has {first} and gets {second}. How many?",
        "answer": f"She has {first}+{second}=<<{first}+{second}={total}>>{total}.\n#### {total}",
    }


def lessons(tokenizer, number, *, judges):
    """What a student is asked, and in every second lesson what the judge is asked, answered with a number."""
    import torch

    draw = random.Random(0)
    for lesson in range(number):
        texts = []
        for _ in range(4 if judges and lesson % 2 else 16):
            given = row(*draw.choice(SUMS))
            asked = to_rollout(given).prompt.messages[0]["content"]
            if judges and lesson % 2:
                answer = f"[[{draw.randint(2, 5)}]]"
                asked = reasoning.template.format(prompt=asked, label=given["answer"], response=answer)
            texts.append((asked, f"[[{draw.randint(2, 5)}]]"))
        yield tuple(map(torch.stack, zip(*(as_ids(tokenizer, *text) for text in texts), strict=True)))


def as_ids(tokenizer, asked, answer):
    import torch

    ids = [*tokenizer.encode(asked + answer), tokenizer.eos_token_id]
    learnt = len(answer) + 1
    return torch.tensor(ids), torch.tensor([-100] * (len(ids) - learnt) + ids[-learnt:])


def taught(directory, number, *, judges):
    tokenizer = character_tokenizer()
    tokenizer.model_max_length = CONTEXT
    make_taught(
        directory, tokenizer, lambda seed: lessons(tokenizer, number, judges=judges), number, context=CONTEXT, seed=0
    )
    return directory


def settings(directory, model):
    """What a user sets: the model, the files; and few prompts, few steps."""
    for name in ("train", "test"):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row(*numbers)) + "\n" for numbers in SUMS))
    return [
        f"model={model}",
        f"manager.tasks.0.sampler_config.dataset.path={directory / 'train.jsonl'}",
        f"evaluator.tasks.0.sampler_config.dataset.path={directory / 'test.jsonl'}",
        "train_batch_size=4",
        "total_steps=2",
        "eval_interval=2",
        "cpu_threads=1",
    ]


def arguments(settings):
    return [word for setting in settings for word in ("--set", setting)]


def trained_rollouts(run, read_lines, steps=2):
    """Of every step, after a look at the step's metrics."""
    lines = [line for line in read_lines(run / "metrics.jsonl") if "reward/mean" in line]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert all(line["train/grad_norm"] > 0 for line in lines)
    rollouts = []
    for step in range(1, steps + 1):
        trained = read_lines(run / "trajectories" / f"step-{step:06d}.jsonl")
        assert len(trained) == 4 * 8
        rollouts += trained
    return rollouts


def is_right(rollout):
    numbers = re.findall(r"\d+", rollout["answer"])
    return numbers[-1:] == [rollout["ground_truth"].rpartition("#### ")[2]]


def test_gsm8k_trains_on_files_as_they_are_published(tmp_path, read_lines, monkeypatch):
    monkeypatch.chdir(tmp_path)
    student = taught(tmp_path / "student", 30, judges=False)
    assert main(["train", "gsm8k", "--run-dir", "run", *arguments(settings(tmp_path, student))]) == 0
    rollouts = trained_rollouts(tmp_path / "run", read_lines)
    assert [rollout["reward"]["score"] for rollout in rollouts] == [float(is_right(rollout)) for rollout in rollouts]
    assert 0 < sum(map(is_right, rollouts)) < len(rollouts)
    assert "eval_accuracy_after" in json.loads((tmp_path / "run" / "summary.json").read_text())


@pytest.mark.long_tier
def test_gsm8k_llm_judge_trains_on_what_a_served_language_model_says(tmp_path, read_lines, penstock):
    rater = taught(tmp_path / "rater", 120, judges=True)
    server = penstock("serve", str(rater), "--port", "0", "--no-key")
    base_url = next(line.split()[-1] for line in server.stdout if "base URL" in line)
    judge = "manager.tasks.0.judger_config.all_of.reasoning"
    asked = [f"{judge}.base_url={base_url}", f"{judge}.model={rater.name}"]
    asked += [f"{judge}.sample_params.max_tokens=16", f"{judge}.sample_params.temperature=1.0"]
    run = penstock("train", "gsm8k-llm-judge", "--run-dir", "run", *arguments(settings(tmp_path, rater) + asked))
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 0, output

    rollouts = trained_rollouts(tmp_path / "run", read_lines)
    rated = set()
    for rollout in rollouts:
        reward = rollout["reward"]
        assert reward["parts"]["number"] == is_right(rollout)
        rated.add(reward["parts"]["reasoning"])
        assert reward["score"] == pytest.approx(reward["parts"]["number"] + 0.03 * reward["parts"]["reasoning"])
    # Numbers that nobody but the language model says, and not always the same.
    assert rated <= {2.0, 3.0, 4.0, 5.0} and len(rated) > 1
    last = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "reward/mean" in line][-1]
    assert last["judger/reasoning/calls"] > 0
