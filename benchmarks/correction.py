"""Does off-policy correction work? The tiny task, sampled by weights that lag k steps behind those that are trained.

correction.<method>.lag<k>.lr<x>    mean reward of the last five steps, over the seeds; detail: each seed, and the curve

`on_policy` is the plain policy gradient without a lag, at the same learning rate. `pg` has the lag and no correction.
The others correct: `tis` and `icepop` weigh the policy gradient, `decoupled` is PPO of two updates with three policies,
`dppo` masks by the probability that has moved. The lag is exact: a step is sampled by the weights of k steps before,
of the first ones while there are no older.

python benchmarks/correction.py [--full] [--lags 1,4,8] [--rates 0.25,1,4] [--seeds 5] [--steps 50] [--out DIR]

Without `--full` one seed, lag 8 and four times the rate: a smoke run. `--out` keeps a line for every run that is done,
so that an interrupted experiment goes on, and has the table and the plot: `correction.md`, `correction.png`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from penstock.data import ReverseWordConfig
from penstock.engine import EmbeddedEngineConfig
from penstock.judger import exact_match
from penstock.learn import DPPOLossConfig, PGLossConfig, PPOLossConfig, TrainWorkerConfig
from penstock.learn.batch import prepare_batch
from penstock.models import load_tokenizer, resolve_model
from penstock.ports import Engine, GenerateRequest, Tokenizer
from penstock.rollout import (
    Group,
    Prompt,
    RolloutState,
    SampleParams,
    Segment,
    Status,
    Tokens,
    Verdict,
    pack_ids,
    unpack_ids,
)

GROUPS, K, LR, LAST = 16, 8, 1e-3, 5
WORDS = ReverseWordConfig(template="{word}>", alphabet="abcdefgh", min_length=4, max_length=6, held_out=400)
METHODS: dict[str, dict[str, Any]] = {
    "on_policy": {"loss": PGLossConfig()},
    "pg": {"loss": PGLossConfig()},
    "tis": {"loss": PGLossConfig(), "correction": "tis"},
    "icepop": {"loss": PGLossConfig(), "correction": "icepop"},
    "decoupled": {"loss": PPOLossConfig(), "correction": "decoupled", "updates_per_batch": 2},
    "dppo": {"loss": DPPOLossConfig()},
}
COLOURS = {
    "on_policy": "#333333",
    "pg": "#d62728",
    "tis": "#1f77b4",
    "icepop": "#2ca02c",
    "decoupled": "#9467bd",
    "dppo": "#ff7f0e",
}


class Copied:
    """Weights as they were."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()


async def play(engine: Engine, tokenizer: Tokenizer, prompts: list[Prompt], seed: int, step: int) -> list[Group]:
    """K answers to each prompt, judged."""
    params = SampleParams(max_tokens=8)

    async def answer(number: int, prompt: Prompt, ids: list[int], index: int) -> RolloutState:
        request = GenerateRequest(
            request_id=f"{step}/{number}/{index}",
            prompt_ids=pack_ids(ids),
            params=params,
            seed=hash((seed, step, number, index)) & 0x7FFFFFFF,
            group_id=f"{step}/{number}",
        )
        made = await engine.generate(request)
        tokens = Tokens().append(made.ids, made.logprobs, steps=made.steps)
        text = tokenizer.decode(unpack_ids(made.ids).tolist())
        return RolloutState(
            prompt=Prompt(ids=pack_ids(ids), ground_truth=prompt.ground_truth),
            group_id=request.group_id,
            rollout_id=request.request_id,
            segments=(Segment(tokens),),
            finish_reason=made.finish_reason,
            reward=Verdict(exact_match(text, prompt.ground_truth, {})),
            status=Status.COMPLETED,
        )

    asked = [(number, prompt, tokenizer.render(prompt.messages)) for number, prompt in enumerate(prompts)]
    answers = await asyncio.gather(*(answer(*one, index) for one in asked for index in range(K)))
    return [list(answers[start : start + K]) for start in range(0, len(answers), K)]


async def run(method: str, lag: int, rate: float, seed: int, steps: int) -> list[float]:
    """The mean reward of every step."""
    directory = resolve_model("tiny")
    tokenizer = load_tokenizer(directory)
    engine = EmbeddedEngineConfig(max_running=GROUPS * K).build(str(directory), tokenizer, threads=1)
    worker = TrainWorkerConfig(lr=LR * rate, **METHODS[method]).build(directory, total_steps=steps, threads=1)
    prompts = WORDS.replace("seed", seed).prompts()
    older: deque[tuple[int, Copied]] = deque(maxlen=lag + 1)
    rewards = []
    try:
        for step in range(1, steps + 1):
            older.append((step - 1, Copied({name: tensor.clone() for name, tensor in worker.weights.tensors()})))
            model_step, weights = older[0]
            await engine.load_weights(weights, model_step)
            groups = await play(engine, tokenizer, [next(prompts) for _ in range(GROUPS)], seed, step)
            rewards.append(statistics.mean(r.reward.score for g in groups for r in g if r.reward is not None))
            await worker.train(prepare_batch(groups, train_step=step))
    finally:
        await engine.close()
        await worker.close()
    return rewards


def experiments(lags: list[int], rates: list[float], seeds: int) -> Iterator[tuple[str, int, float, int]]:
    for seed in range(seeds):
        for rate in rates:
            yield "on_policy", 0, rate, seed
            yield from ((method, lag, rate, seed) for lag in lags for method in METHODS if method != "on_policy")


def report(found: dict[str, list[float]]) -> None:
    by_figure: dict[str, dict[str, list[float]]] = {}
    for key, rewards in found.items():
        figure, _, seed = key.rpartition(".seed")
        by_figure.setdefault(figure, {})[seed] = rewards
    for figure, seeds in by_figure.items():
        ends = {seed: round(statistics.mean(rewards[-LAST:]), 4) for seed, rewards in seeds.items()}
        curve = [round(statistics.mean(column), 3) for column in zip(*seeds.values(), strict=True)]
        value = statistics.mean(ends.values())
        detail = {"seeds": ends, "curve": curve}
        print(json.dumps({"figure": figure, "value": round(value, 4), "unit": "reward", "detail": detail}), flush=True)


def table(found: dict[str, list[float]], lags: list[int], rates: list[float]) -> str:
    """In Markdown: a line for each rate and lag, and in it the mean over the seeds, with the worst seed behind it."""
    lines = ["| rate | lag | " + " | ".join(METHODS) + " |", "|---" * (len(METHODS) + 2) + "|"]
    for rate, lag in itertools.product(rates, lags):
        cells = []
        for method in METHODS:
            name = figure_name(method, 0 if method == "on_policy" else lag, rate)
            ends = [statistics.mean(r[-LAST:]) for key, r in found.items() if key.rpartition(".seed")[0] == name]
            cells.append(f"{statistics.mean(ends):.2f} ({min(ends):.2f})" if ends else "")
        lines.append(f"| {LR * rate:g} | {lag} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(found: dict[str, list[float]], lags: list[int], rates: list[float], path: Path) -> None:
    """A panel for each lag and rate, the mean over the seeds of every method in it."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    size = (3.2 * len(lags), 2.2 * len(rates) + 0.5)
    figure, panels = pyplot.subplots(len(rates), len(lags), squeeze=False, sharex=True, sharey=True, figsize=size)
    for (row, rate), (column, lag) in itertools.product(enumerate(rates), enumerate(lags)):
        panel = panels[row][column]
        panel.set_title(f"lag {lag}, rate {LR * rate:g}", fontsize=9)
        panel.set_ylim(-0.02, 1.02)
        for method, colour in COLOURS.items():
            name = figure_name(method, 0 if method == "on_policy" else lag, rate)
            runs = [rewards for key, rewards in found.items() if key.rpartition(".seed")[0] == name]
            if runs:
                means = [statistics.mean(values) for values in zip(*runs, strict=True)]
                panel.plot(range(1, len(means) + 1), means, color=colour, linewidth=1.2, label=method)
    for panel in panels[-1]:
        panel.set_xlabel("train step", fontsize=9)
    for line in panels:
        line[0].set_ylabel("mean reward", fontsize=9)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="lower center", ncol=len(METHODS), fontsize=9)
    figure.tight_layout(rect=(0, 0.3 / size[1], 1, 1))
    figure.savefig(path, dpi=80)


def figure_name(method: str, lag: int, rate: float) -> str:
    return f"correction.{method}.lag{lag}.lr{rate:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="every lag and rate, five seeds")
    parser.add_argument("--lags", default="1,4,8")
    parser.add_argument("--rates", default="0.25,1,4", help="in multiples of the recipe's, 1e-3")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lags = [int(lag) for lag in arguments.lags.split(",")] if arguments.full else [8]
    rates = [float(rate) for rate in arguments.rates.split(",")] if arguments.full else [4.0]
    seeds = arguments.seeds if arguments.full else 1
    kept = arguments.out / "runs.jsonl" if arguments.out is not None else None
    found: dict[str, list[float]] = {}
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        if kept.exists():
            found = dict(json.loads(line) for line in kept.read_text().splitlines())
    torch.set_num_threads(1)
    for method, lag, rate, seed in experiments(lags, rates, seeds):
        key = f"{figure_name(method, lag, rate)}.seed{seed}"
        if key in found:
            continue
        found[key] = asyncio.run(run(method, lag, rate, seed, arguments.steps))
        if kept is not None:
            with kept.open("a") as file:
                file.write(json.dumps([key, found[key]]) + "\n")
    report(found)
    if arguments.out is not None:
        (arguments.out / "correction.md").write_text(table(found, lags, rates))
        draw(found, lags, rates, arguments.out / "correction.png")


if __name__ == "__main__":
    main()
