"""The embedded engine against others on the same model and machine: SmolLM2-135M, two threads each.

engine.fixed.vs_vllm                64 answers of exactly 64 tokens: tokens/s of ours over vLLM's, both bf16
engine.fixed.vs_generate            the same over transformers' `generate`, both bf16
engine.fixed.share_of_matmul_bound  tokens/s of ours, bf16, over what the matrix products of a decode step alone allow
engine.ragged.vs_generate           128 answers with log-normal lengths from 8 to 256: time of `generate`, in batches of
                                    64 that each run to their longest, over ours; both bf16

Sampling at temperature 1. 8 prompts x 8, as a train step asks them, and new prompts in every round. All are warm and
take turns. The details carry tokens/s of everything: float32, transformers' continuous batching, vLLM compiled.

python benchmarks/engine.py [--quick] [--rounds 3] [--no-compiled] [--threads 2]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers import (
    Contestant,
    PeerError,
    bf16_environment,
    note,
    our_python,
    report,
    trl_python,
    vllm_python,
)

from penstock.data import AdditionConfig
from penstock.models import load_tokenizer, resolve_model

BATCH = 64
REPEAT = 8
BF16, FP32 = "bfloat16", "float32"
MEDIAN_LENGTH, SIGMA, SHORTEST, LONGEST = 32, 0.8, 8, 256

Results = dict[str, list[dict[str, Any]]]


class Work:
    """Workloads, each with prompts that none had before."""

    def __init__(self, model_dir: str, quick: bool) -> None:
        tokenizer = load_tokenizer(Path(model_dir))
        prompts = AdditionConfig(max_number=100).prompts()
        self._prompts = (tokenizer.render(prompt.messages) for prompt in prompts)
        self._random = random.Random(0)
        self._fixed = 4 if quick else 64
        self._ragged = 16 if quick else 128
        self._longest = 16 if quick else LONGEST

    def fixed(self, tokens: int | None = None) -> dict[str, Any]:
        return {"prompts": self._ask(BATCH), "lengths": [tokens or self._fixed] * BATCH, "batch": BATCH}

    def ragged(self) -> dict[str, Any]:
        drawn = [self._random.lognormvariate(math.log(MEDIAN_LENGTH), SIGMA) for _ in range(self._ragged)]
        lengths = [min(self._longest, max(SHORTEST, round(length))) for length in drawn]
        return {"prompts": self._ask(self._ragged), "lengths": lengths, "batch": BATCH}

    def _ask(self, count: int) -> list[list[int]]:
        asked = itertools.islice(self._prompts, count // REPEAT)
        return [ids for ids in asked for _ in range(REPEAT)]


class Field:
    """Everyone who takes part, started one after the other: name -> (contestant, how it is asked)."""

    def __init__(self, model: str, threads: int, stack: contextlib.ExitStack) -> None:
        self._job = {"model": model, "threads": threads, "seed": 0, "max_running": BATCH}
        self._stack = stack
        self.ways: dict[str, tuple[Contestant, dict[str, Any]]] = {}

    def start_ours(self) -> None:
        ours = self._start("Penstock", "penstock_generate.py", our_python(), dtypes=[BF16, FP32])
        self.ways["ours.bf16"] = (ours, {"way": "generate", "dtype": BF16})
        self.ways["ours.fp32"] = (ours, {"way": "generate", "dtype": FP32})
        self.ways["bound.bf16"] = (ours, {"way": "bound", "dtype": BF16, "steps": 30})
        self.ways["bound.fp32"] = (ours, {"way": "bound", "dtype": FP32, "steps": 30})

    def start_transformers(self) -> None:
        peer = self._start("transformers", "transformers_generate.py", trl_python(), dtypes=[BF16, FP32])
        self.ways["generate.bf16"] = (peer, {"way": "generate", "dtype": BF16})
        self.ways["generate.fp32"] = (peer, {"way": "generate", "dtype": FP32})
        self.ways["continuous.bf16"] = (peer, {"way": "continuous", "dtype": BF16})

    def start_vllm(self, name: str, *, eager: bool) -> None:
        python = vllm_python()
        without_amx = bool(bf16_environment(python))
        peer = self._start(name, "vllm_generate.py", python, dtype=BF16, eager=eager, without_amx=without_amx)
        self.ways[f"{name}.bf16"] = (peer, {})

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: answers of 4 tokens, once, nothing compiled")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, help="vLLM compiled too: two minutes more")
    arguments = parser.parse_args()
    quick = arguments.quick
    compiled = not quick if arguments.compiled is None else arguments.compiled
    rounds = 1 if quick else arguments.rounds
    model = str(resolve_model("smollm2-135m"))
    work = Work(model, quick)
    warm: Results = defaultdict(list)
    fixed: Results = defaultdict(list)
    ragged: Results = defaultdict(list)
    with contextlib.ExitStack() as stack:
        field = Field(model, arguments.threads, stack)
        field.start_ours()
        field.start_transformers()
        field.start_vllm("vllm_eager", eager=True)
        rounds_of(field, list(field.ways), iter([work.fixed(tokens=4)]), warm)
        counted = ["ours.bf16", "bound.bf16", "vllm_eager.bf16", "generate.bf16"]
        rounds_of(field, counted, (work.fixed() for _ in range(rounds)), fixed)
        rounds_of(field, ["ours.bf16", "generate.bf16"], (work.ragged() for _ in range(rounds)), ragged)
        rounds_of(field, ["ours.fp32", "bound.fp32", "generate.fp32", "continuous.bf16"], iter([work.fixed()]), fixed)
        rounds_of(field, ["ours.fp32", "vllm_eager.bf16"], iter([work.ragged()]), ragged)
    if compiled:
        with contextlib.ExitStack() as stack:
            field = Field(model, arguments.threads, stack)
            field.start_vllm("vllm_compiled", eager=False)
            field.run("vllm_compiled.bf16", work.fixed(tokens=4))
            rounds_of(field, ["vllm_compiled.bf16"], iter([work.fixed()]), fixed)
            rounds_of(field, ["vllm_compiled.bf16"], iter([work.ragged()]), ragged)
    shared = {
        "threads": arguments.threads,
        "oneDNN": bf16_environment(trl_python()) or "as it is",
        "prompts": f"{BATCH // REPEAT} x {REPEAT}",
    }
    compare("engine.fixed.vs_vllm", fixed, "ours.bf16", "vllm_eager.bf16", **shared)
    compare("engine.fixed.vs_generate", fixed, "ours.bf16", "generate.bf16", **shared)
    compare("engine.fixed.share_of_matmul_bound", fixed, "ours.bf16", "bound.bf16", **shared)
    lengths = {"median": MEDIAN_LENGTH, "sigma": SIGMA, "shortest": SHORTEST, "longest": LONGEST}
    compare("engine.ragged.vs_generate", ragged, "ours.bf16", "generate.bf16", lengths=lengths, **shared)


if __name__ == "__main__":
    try:
        main()
    except PeerError as error:
        sys.exit(f"engine: {error}")
