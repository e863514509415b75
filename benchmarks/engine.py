"""The embedded engine against others on the same model and machine: SmolLM2-135M, two threads each.

engine.fixed.vs_vllm_best           64 answers of exactly 48 tokens: tokens/s of ours over vLLM's, each in the dtype in
                                    which it is faster on this CPU
engine.fixed.vs_vllm                the same, vLLM in the dtype that is best for ours
engine.fixed.vs_generate_best       the same over transformers' `generate`, in its best
engine.fixed.share_of_matmul_bound  tokens/s of ours over what the matrix products of a decode step alone allow
engine.ragged.vs_generate           64 answers with log-normal lengths from 8 to 128: time of `generate`, in batches of
                                    32 that each run to their longest, over ours with 32 slots; each in its best dtype
engine.contended                    beside one busy process: tokens/s of ours over ours without it, in the same round
engine.contended.vs_vllm            beside one busy process: tokens/s of ours over vLLM's

Sampling at temperature 1. Prompts x 8, as a train step asks them, and new prompts in every round. All are warm and take
turns. Which dtype is the best for whom is found in the first round, in which everyone has its turn in both. The details
carry tokens/s of everyone, and the CPU.

python benchmarks/engine.py [--quick] [--rounds 3] [--tokens 48] [--compiled] [--only fixed,ragged,contended]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers import (
    Contestant,
    PeerError,
    bf16_environment,
    busy_process,
    note,
    our_python,
    report,
    trl_python,
    vllm_python,
)

from penstock.data import AdditionConfig
from penstock.models import load_tokenizer, resolve_model
from penstock.models.arithmetic import choose_for, cpu_name

BATCH, RAGGED_BATCH = 64, 32
REPEAT = 8
FIXED = 48
BF16, FP32 = "bfloat16", "float32"
DTYPES = {"bf16": BF16, "fp32": FP32}
HOPELESS = 3.0
"""Times as fast in its other dtype: not tried a second time."""
SETTLES_S = 3.0
"""Of work before what is timed, where the machine has just changed."""
MEDIAN_LENGTH, SIGMA, SHORTEST, LONGEST = 32, 0.8, 8, 128

Results = dict[str, list[dict[str, Any]]]


class Work:
    """Workloads, each with prompts that none had before."""

    def __init__(self, model_dir: str, quick: bool, tokens: int = FIXED) -> None:
        tokenizer = load_tokenizer(Path(model_dir))
        prompts = AdditionConfig(max_number=100).prompts()
        self._prompts = (tokenizer.render(prompt.messages) for prompt in prompts)
        self._random = random.Random(0)
        self._fixed = 4 if quick else tokens
        self._ragged = 16 if quick else 64
        self._longest = 16 if quick else LONGEST

    def fixed(self, tokens: int | None = None) -> dict[str, Any]:
        return {"prompts": self._ask(BATCH), "lengths": [tokens or self._fixed] * BATCH, "batch": BATCH}

    def ragged(self) -> dict[str, Any]:
        drawn = [self._random.lognormvariate(math.log(MEDIAN_LENGTH), SIGMA) for _ in range(self._ragged)]
        lengths = [min(self._longest, max(SHORTEST, round(length))) for length in drawn]
        return {"prompts": self._ask(self._ragged), "lengths": lengths, "batch": RAGGED_BATCH}

    def _ask(self, count: int) -> list[list[int]]:
        asked = itertools.islice(self._prompts, count // REPEAT)
        return [ids for ids in asked for _ in range(REPEAT)]


class Field:
    """Everyone who takes part, started one after the other: name -> (contestant, how it is asked)."""

    def __init__(self, model: str, threads: int, dtypes: list[str], stack: contextlib.ExitStack) -> None:
        self._dtypes = dtypes
        self._job = {"model": model, "threads": threads, "seed": 0, "max_running": BATCH}
        self._stack = stack
        self.ways: dict[str, tuple[Contestant, dict[str, Any]]] = {}

    @property
    def _named(self) -> list[str]:
        return [DTYPES[short] for short in self._dtypes]

    def start_ours(self) -> None:
        ours = self._start("Penstock", "penstock_generate.py", our_python(), dtypes=self._named)
        for short, dtype in zip(self._dtypes, self._named, strict=True):
            self.ways[f"ours.{short}"] = (ours, {"way": "generate", "dtype": dtype})
            self.ways[f"bound.{short}"] = (ours, {"way": "bound", "dtype": dtype, "steps": 12})

    def start_transformers(self) -> None:
        peer = self._start("transformers", "transformers_generate.py", trl_python(), dtypes=self._named)
        for short, dtype in zip(self._dtypes, self._named, strict=True):
            self.ways[f"generate.{short}"] = (peer, {"way": "generate", "dtype": dtype})

    def start_vllm(self, name: str, dtype: str, *, eager: bool) -> None:
        python = vllm_python()
        without_amx = bool(bf16_environment(python))
        peer = self._start(name, "vllm_generate.py", python, dtype=DTYPES[dtype], eager=eager, without_amx=without_amx)
        self.ways[f"{name}.{dtype}"] = (peer, {})

    def run(self, name: str, work: dict[str, Any]) -> dict[str, Any]:
        contestant, way = self.ways[name]
        answer = contestant.ask({**work, **way})
        answer["tokens_per_s"] = answer["tokens"] / answer["seconds"]
        note(f"{name}: {answer['tokens']} tokens in {answer['seconds']:.2f} s, {answer['tokens_per_s']:.0f}/s")
        return answer

    def _start(self, name: str, script: str, python: str, **job: Any) -> Contestant:
        note(f"{name} starts")
        contestant = Contestant(script, {"name": name, **self._job, **job}, python=python, start_s=600)
        return self._stack.enter_context(contestant)


def rounds_of(field: Field, names: list[str], work: Iterator[dict[str, Any]], results: Results) -> None:
    """Everyone gets the same work in a round; every other round goes backwards."""
    for number, same in enumerate(work):
        for name in names if number % 2 == 0 else names[::-1]:
            results[name].append(field.run(name, same))


def rivals(name: str, names: list[str]) -> list[str]:
    """The same contestant in every dtype."""
    return [other for other in names if other.partition(".")[0] == name.partition(".")[0]]


def best_ways(field: Field, work: Work) -> tuple[dict[str, str], dict[str, float]]:
    """The faster of its two dtypes for each contestant, by answers of a few tokens after as many to warm up."""
    seen: Results = defaultdict(list)
    names = [name for name in field.ways if not name.startswith("bound")]
    rounds_of(field, names, iter([work.fixed(tokens=2)]), seen)
    warm = {name: answers[-1]["tokens_per_s"] for name, answers in seen.items()}
    hopeful = [name for name in names if HOPELESS * warm[name] > max(warm[other] for other in rivals(name, names))]
    rounds_of(field, hopeful, iter([work.fixed(tokens=6)]), seen)
    rate = {name: answers[-1]["tokens_per_s"] for name, answers in seen.items()}
    owners = sorted({name.partition(".")[0] for name in names})
    best = {owner: max(rivals(owner, hopeful), key=rate.__getitem__) for owner in owners}
    note(f"best: {', '.join(best.values())}")
    return best, {name: round(value, 1) for name, value in rate.items()}


def ratio(results: Results, ours: str, theirs: str) -> list[float]:
    return [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(results[ours], results[theirs], strict=True)]


def rates(results: Results) -> dict[str, float]:
    return {
        name: round(statistics.median(answer["tokens_per_s"] for answer in answers), 1)
        for name, answers in results.items()
    }


def compare(figure: str, results: Results, ours: str, theirs: str, **detail: Any) -> None:
    ratios = ratio(results, ours, theirs)
    report(
        figure,
        statistics.median(ratios),
        ratios=[round(value, 3) for value in ratios],
        tokens_per_s=rates(results),
        **detail,
    )


def compare_fixed(field: Field, best: dict[str, str], work: Work, rounds: int, shared: dict[str, Any]) -> None:
    ours, vllm, generate = best["ours"], best["vllm"], best["generate"]
    bound = ours.replace("ours", "bound")
    same = ours.replace("ours", "vllm")
    results: Results = defaultdict(list)
    field.run(bound, work.fixed())
    names = list(dict.fromkeys([ours, bound, vllm, same, generate]))
    rounds_of(field, names, (work.fixed() for _ in range(rounds)), results)
    compare("engine.fixed.vs_vllm_best", results, ours, vllm, **shared)
    compare("engine.fixed.vs_vllm", results, ours, same, **shared)
    compare("engine.fixed.vs_generate_best", results, ours, generate, **shared)
    compare("engine.fixed.share_of_matmul_bound", results, ours, bound, **shared)


def compare_ragged(field: Field, best: dict[str, str], work: Work, rounds: int, shared: dict[str, Any]) -> None:
    results: Results = defaultdict(list)
    rounds_of(field, [best["ours"], best["generate"]], (work.ragged() for _ in range(rounds)), results)
    lengths = {"median": MEDIAN_LENGTH, "sigma": SIGMA, "shortest": SHORTEST, "longest": LONGEST}
    compare("engine.ragged.vs_generate", results, best["ours"], best["generate"], lengths=lengths, **shared)


def settled_round(field: Field, names: list[str], work: Work, results: Results) -> None:
    """One round of whoever has had the machine as it is now for a while: ours finds its number of threads first."""
    same = work.fixed()
    for name in names:
        began = time.monotonic()
        while time.monotonic() - began < SETTLES_S:
            field.run(name, work.fixed())
        results[name].append(field.run(name, same))


def compare_contended(field: Field, best: dict[str, str], work: Work, rounds: int, shared: dict[str, Any]) -> None:
    ours, vllm = best["ours"], best["vllm"]
    quiet: Results = defaultdict(list)
    results: Results = defaultdict(list)
    for number in range(rounds):
        names = [ours, vllm] if number % 2 == 0 else [vllm, ours]
        settled_round(field, names, work, quiet)
        with busy_process():
            settled_round(field, names, work, results)
    kept = {
        name: [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(results[name], quiet[name], strict=True)]
        for name in (ours, vllm)
    }
    report(
        "engine.contended",
        statistics.median(kept[ours]),
        ratios=[round(value, 3) for value in kept[ours]],
        vllm=round(statistics.median(kept[vllm]), 3),
        quiet=rates(quiet),
        contended=rates(results),
        **shared,
    )
    compare("engine.contended.vs_vllm", results, ours, vllm, **shared)


PARTS = {"fixed": compare_fixed, "ragged": compare_ragged, "contended": compare_contended}


def run_compiled(model: str, threads: int, dtype: str, work: Work) -> None:
    with contextlib.ExitStack() as stack:
        field = Field(model, threads, [dtype], stack)
        field.start_vllm("vllm_compiled", dtype, eager=False)
        (name,) = field.ways
        field.run(name, work.fixed(tokens=4))
        report("engine.fixed.vllm_compiled", field.run(name, work.fixed())["tokens_per_s"], "tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run: answers of 4 tokens, once, in what `auto` takes"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=FIXED, help="of each answer of a fixed length")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compiled", action="store_true", help="vLLM compiled too: two minutes more")
    parser.add_argument("--only", default=",".join(PARTS), help="which comparisons")
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    model = str(resolve_model("smollm2-135m"))
    work = Work(model, arguments.quick, arguments.tokens)
    dtypes = list(DTYPES)
    if arguments.quick:
        chosen = choose_for(Path(model), rows=BATCH, trains=False, fused=True, deterministic=False).dtype
        dtypes = [short for short, dtype in DTYPES.items() if dtype == chosen]
    with contextlib.ExitStack() as stack:
        field = Field(model, arguments.threads, dtypes, stack)
        field.start_ours()
        field.start_transformers()
        for dtype in dtypes:
            field.start_vllm("vllm", dtype, eager=True)
        best, rate = best_ways(field, work)
        shared = {
            "cpu": cpu_name(),
            "best": best,
            "threads": arguments.threads,
            "oneDNN": bf16_environment(trl_python()) or "as it is",
            "short": rate,
        }
        for name in arguments.only.split(","):
            PARTS[name](field, best, work, rounds, shared)
    if arguments.compiled:
        run_compiled(model, arguments.threads, best["vllm"].rpartition(".")[2], work)


if __name__ == "__main__":
    try:
        main()
    except PeerError as error:
        sys.exit(f"engine: {error}")
