"""Does off-policy correction work? The tiny task, sampled by weights that lag k steps behind those that are trained.

correction.<method>.lag<k>.lr<x>   mean reward of the weights of the last five steps, over the seeds; detail: each seed,
                                   the curve, what is lost against `on_policy` and against the same loss without a lag

`on_policy` is the plain policy gradient without a lag, at the same learning rate. `pg` has the lag and no correction.
The others correct: `tis` and `icepop` weigh the policy gradient, `decoupled` is PPO of two updates with three policies,
`dppo` masks by the probability that has moved. Without a lag `tis`, `icepop` and `dppo` are `on_policy`, and
`decoupled` is `on_policy_2`: PPO of two updates. Two updates have half the rate each: with all of it a step would move
twice as far, and a lag be twice as long as that of the others. The lag is exact: a step is sampled by the weights of k
steps before, of the first ones while there are no older. Rewards are told of the weights that sampled, by their model
step: those that no step sampled with any more are sampled when training is over.

python benchmarks/correction.py [--full] [--lags 1,4,8] [--rates 1,4] [--seeds 5] [--steps 50] [--jobs 2] [--out DIR]

Rates are multiples of 2.5e-4, a quarter of the recipe's. Without `--full` one seed, lag 8 and four times the rate: a
smoke run. `--jobs` runs at a time, of one thread each. `--out` keeps a line for every run that is done, so that an
interrupted experiment goes on, and has the tables and the plot: `correction.md`, `correction.png`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import statistics
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
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

GROUPS, K, LR, LAST = 16, 8, 2.5e-4, 5
WORDS = ReverseWordConfig(template="{word}>", alphabet="abcdefgh", min_length=4, max_length=6, held_out=400)
METHODS: dict[str, dict[str, Any]] = {
    "on_policy": {"loss": PGLossConfig()},
    "on_policy_2": {"loss": PPOLossConfig(), "updates_per_batch": 2},
    "pg": {"loss": PGLossConfig()},
    "tis": {"loss": PGLossConfig(), "correction": "tis"},
    "icepop": {"loss": PGLossConfig(), "correction": "icepop"},
    "decoupled": {"loss": PPOLossConfig(), "correction": "decoupled", "updates_per_batch": 2},
    "dppo": {"loss": DPPOLossConfig()},
}
OWN = {"pg": "on_policy", "tis": "on_policy", "icepop": "on_policy", "decoupled": "on_policy_2", "dppo": "on_policy"}
"""What each method is without a lag."""
COLOURS = {
    "on_policy": "#333333",
    "on_policy_2": "#999999",
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
    """The mean reward of the weights after every step, from none to the last."""
    directory = resolve_model("tiny")
    tokenizer = load_tokenizer(directory)
    engine = EmbeddedEngineConfig(max_running=GROUPS * K).build(str(directory), tokenizer, threads=1)
    fields = METHODS[method]
    lr = LR * rate / fields.get("updates_per_batch", 1)
    worker = TrainWorkerConfig(lr=lr, **fields).build(directory, total_steps=steps, threads=1)
    prompts = WORDS.replace("seed", seed).prompts()
    older: deque[tuple[int, Copied]] = deque(maxlen=lag + 1)
    rewards: dict[int, float] = {}

    async def sampled(step: int) -> list[Group]:
        model_step, weights = older[0]
        await engine.load_weights(weights, model_step)
        groups = await play(engine, tokenizer, [next(prompts) for _ in range(GROUPS)], seed, step)
        rewards[model_step] = statistics.mean(r.reward.score for g in groups for r in g if r.reward is not None)
        return groups

    def copied() -> Copied:
        return Copied({name: tensor.clone() for name, tensor in worker.weights.tensors()})

    try:
        for step in range(1, steps + 1):
            older.append((step - 1, copied()))
            await worker.train(prepare_batch(await sampled(step), train_step=step))
        older.append((steps, copied()))
        for step in range(steps + 1, steps + len(older) + 1):
            await sampled(step)
            older.popleft()
    finally:
        await engine.close()
        await worker.close()
    return [rewards[model_step] for model_step in range(steps + 1)]


def experiments(lags: list[int], rates: list[float], seeds: int) -> Iterator[tuple[str, int, float, int]]:
    for seed, rate in itertools.product(range(seeds), rates):
        yield from ((method, 0, rate, seed) for method in METHODS if method not in OWN)
        yield from ((method, lag, rate, seed) for lag in lags for method in OWN)


def ends_of(found: dict[str, list[float]], method: str, lag: int, rate: float) -> dict[str, float]:
    """The mean reward of the last weights, by seed."""
    name = figure_name(method, lag if method in OWN else 0, rate)
    split = ((key.rpartition(".seed"), rewards) for key, rewards in found.items())
    return {seed: statistics.mean(rewards[-LAST:]) for (figure, _, seed), rewards in split if figure == name}


def lost(found: dict[str, list[float]], method: str, lag: int, rate: float, against: str) -> float | None:
    """How much less a method ends with than another, over the seeds that both have."""
    ends, others = ends_of(found, method, lag, rate), ends_of(found, against, 0, rate)
    both = ends.keys() & others.keys()
    return statistics.mean(others[seed] - ends[seed] for seed in both) if both else None


def report(found: dict[str, list[float]], lags: list[int], rates: list[float]) -> None:
    for rate, lag, method in itertools.product(rates, [0, *lags], METHODS):
        ends = ends_of(found, method, lag, rate)
        if not ends or (method in OWN) != (lag > 0):
            continue
        figure = figure_name(method, lag, rate)
        curve = [statistics.mean(column) for column in zip(*curves(found, figure), strict=True)]
        detail: dict[str, Any] = {"seeds": ends, "curve": [round(reward, 3) for reward in curve]}
        if method in OWN:
            detail["lost"] = lost(found, method, lag, rate, "on_policy")
            detail["lost_to_the_same_loss"] = lost(found, method, lag, rate, OWN[method])
        value = round(statistics.mean(ends.values()), 4)
        print(json.dumps({"figure": figure, "value": value, "unit": "reward", "detail": detail}), flush=True)


def curves(found: dict[str, list[float]], figure: str) -> list[list[float]]:
    return [rewards for key, rewards in found.items() if key.rpartition(".seed")[0] == figure]


def tables(found: dict[str, list[float]], lags: list[int], rates: list[float]) -> str:
    """In Markdown: the mean over the seeds with the worst seed behind it, and what is lost to the same loss without a
    lag; a line for each rate and lag."""
    lines = ["| rate | lag | " + " | ".join(METHODS) + " |", "|---" * (len(METHODS) + 2) + "|"]
    for rate, lag in itertools.product(rates, lags):
        all_ends = (list(ends_of(found, method, lag, rate).values()) for method in METHODS)
        cells = [f"{statistics.mean(ends):.2f} ({min(ends):.2f})" if ends else "" for ends in all_ends]
        lines.append(f"| {LR * rate:g} | {lag} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| rate | lag | " + " | ".join(f"{method} lost" for method in OWN) + " |",
        "|---" * (len(OWN) + 2) + "|",
    ]
    for rate, lag in itertools.product(rates, lags):
        losses = [lost(found, method, lag, rate, OWN[method]) for method in OWN]
        cells = ["" if loss is None else f"{loss:.2f}" for loss in losses]
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
            runs = curves(found, figure_name(method, lag if method in OWN else 0, rate))
            if runs:
                means = [statistics.mean(values) for values in zip(*runs, strict=True)]
                panel.plot(range(len(means)), means, color=colour, linewidth=1.2, label=method)
    for panel in panels[-1]:
        panel.set_xlabel("model step", fontsize=9)
    for line in panels:
        line[0].set_ylabel("mean reward", fontsize=9)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="lower center", ncol=len(METHODS), fontsize=9)
    figure.tight_layout(rect=(0, 0.3 / size[1], 1, 1))
    figure.savefig(path, dpi=80)


def figure_name(method: str, lag: int, rate: float) -> str:
    return f"correction.{method}.lag{lag}.lr{LR * rate:g}"


def measured(method: str, lag: int, rate: float, seed: int, steps: int) -> list[float]:
    """`run`, in a process of a pool."""
    torch.set_num_threads(1)
    return asyncio.run(run(method, lag, rate, seed, steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="every lag and rate, five seeds")
    parser.add_argument("--lags", default="1,4,8")
    parser.add_argument("--rates", default="1,4", help=f"in multiples of {LR:g}")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, of one thread each")
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
    resolve_model("tiny")
    with ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn")) as pool:
        asked = {}
        for method, lag, rate, seed in experiments(lags, rates, seeds):
            key = f"{figure_name(method, lag, rate)}.seed{seed}"
            if key not in found:
                asked[pool.submit(measured, method, lag, rate, seed, arguments.steps)] = key
        for future in as_completed(asked):
            found[asked[future]] = future.result()
            if kept is not None:
                with kept.open("a") as file:
                    file.write(json.dumps([asked[future], future.result()]) + "\n")
    report(found, lags, rates)
    if arguments.out is not None:
        (arguments.out / "correction.md").write_text(tables(found, lags, rates))
        draw(found, lags, rates, arguments.out / "correction.png")


if __name__ == "__main__":
    main()
