"""A whole GRPO step, and its training part, against TRL: the same model, prompts, reward, budget, rate and dtype.

step.vs_trl.best                      a step from prompts to new weights in the engine: samples/s of ours over TRL's,
                                      each in the dtype that is best for it on this CPU
step.vs_trl.fp32, step.vs_trl.bf16    the same, both in that dtype
step.vs_trl.contended                 as the first, beside one busy process
train.vs_trl.*                        of forward, backward, clipping and optimiser alone
step.rss_vs_trl                       peak memory of our process tree in fp32 steps over TRL's
step.vs_trl.lora, train.vs_trl.lora   the same with a LoRA adapter of rank 16 on all linear layers (TRL: peft), fp32
step.reference_cost                   a step of ours with a reference model (KL in the loss) over one without, fp32;
                                      with a reward that differs: a KL also has a gradient where all answers of a group
                                      are as good; without one such groups have no backward pass

8 prompts x 8 answers of at most 32 tokens. Both are warm, take turns step by step, and compute the same logprobs of the
same answers before anything is timed. A step of ours also writes the ledger, trajectories and metrics. In bf16 ours
keeps weights and optimiser in float32; TRL is tried so and with everything in bfloat16, and the faster one compared.
Where the best of both is float32, the figures of float32 are those of `best`.

python benchmarks/train_step.py [--quick] [--rounds 5] [--only best,fp32,bf16,contended,lora,reference]
    [--groups 8] [--threads 2]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
from typing import Any, NamedTuple

from peers import (
    Contestant,
    PeerError,
    bf16_environment,
    busy_process,
    note,
    our_python,
    report,
    take_turns,
    trl_python,
)

from penstock.data import AdditionConfig
from penstock.models import load_tokenizer, resolve_model
from penstock.models.arithmetic import cpu_name

DATASET = {"max_number": 40, "template": "How much is {a} plus {b}? Answer in one sentence."}
"""Worded so that answers average about 24 of the 32 tokens."""
ROWS = 640
TOLERANCE = 1e-3
HOPELESS = 3.0
"""Times as long as the fastest: not tried a second time."""
TEXTS = (
    "The answer is 12.",
    "It is 7, because 3 and 4 make 7.",
    "40",
    "I would say that the sum of both numbers is 31.",
)


LORA = {"rank": 16, "alpha": 32}
KL_COEF = 0.01


def make_job(dtype: str, quick: bool, threads: int, *, groups: int = 8, **extra: Any) -> dict[str, Any]:
    model_dir = resolve_model("smollm2-135m")
    tokenizer = load_tokenizer(model_dir)
    prompts = list(itertools.islice(AdditionConfig(**DATASET).prompts(), ROWS))
    scored = [tokenizer.render(prompt.messages) for prompt in prompts[: len(TEXTS)]]
    return {
        "model": str(model_dir),
        "dtype": dtype,
        "threads": threads,
        "groups": 2 if quick else groups,
        "group_size": 2 if quick else 8,
        "max_tokens": 8 if quick else 32,
        "lr": 1e-6,
        "seed": 0,
        "reward": "final_number",
        "dataset": DATASET,
        "rows": [{"prompt": list(prompt.messages), "ground_truth": prompt.ground_truth} for prompt in prompts],
        "score": [scored, [tokenizer.encode(text) for text in TEXTS]],
        "lora": None,
        "kl_coef": 0.0,
        **extra,
    }


def check_same(ours: Contestant, trl: Contestant, job: dict[str, Any], exactly: bool) -> float:
    """Both compute the same: the prompt's ids, and in fp32 the logprobs. Returns the largest difference."""
    if trl.ready["first_prompt"] != job["score"][0][0]:
        raise PeerError(f"TRL reads the first prompt as {trl.ready['first_prompt']}, not {job['score'][0][0]}")
    pairs = zip(itertools.chain(*ours.ready["scores"]), itertools.chain(*trl.ready["scores"]), strict=True)
    difference = max(abs(a - b) for a, b in pairs)
    if exactly and not difference < TOLERANCE:
        raise PeerError(f"logprobs of the same answers differ by {difference}; the two do not compute the same")
    return difference


class Way(NamedTuple):
    """How TRL computes: in which dtype, with weights in which."""

    dtype: str
    weights: str


TRL_WAYS = {
    "float32": [Way("float32", "float32")],
    "bfloat16": [Way("bfloat16", "bfloat16"), Way("bfloat16", "float32")],
}


def start_trl(job: dict[str, Any], way: Way) -> Contestant:
    return Contestant("trl_step.py", {"name": "TRL", **job, **way._asdict()}, python=trl_python())


def fastest_way(job: dict[str, Any], ways: list[Way]) -> tuple[Way, dict[str, float]]:
    """In which TRL's second step takes least, with a quarter of the prompts; and what each took."""
    if len(ways) == 1:
        return ways[0], {}
    seconds: dict[Way, float] = {}
    smaller = job | {"groups": max(1, job["groups"] // 4)}
    for way in ways:
        with start_trl(smaller, way) as trl:
            took = trl.ask({"step": "tried"})["step_s"]
            if not seconds or took < HOPELESS * min(seconds.values()):
                took = trl.ask({"step": "tried"})["step_s"]
        seconds[way] = took
        note(f"TRL in {way.dtype} with weights in {way.weights}: {took:.2f} s a smaller step")
    return min(seconds, key=seconds.__getitem__), {"/".join(way): round(took, 2) for way, took in seconds.items()}


def compare(name: str, job: dict[str, Any], rounds: int, ways: list[Way]) -> None:
    samples = job["groups"] * job["group_size"]
    way, tried = fastest_way(job, ways)
    with (
        Contestant("penstock_step.py", {"name": "Penstock", **job}, python=our_python()) as ours,
        start_trl(job, way) as trl,
    ):
        dtype = ours.ready["dtype"]
        difference = check_same(ours, trl, job, exactly=dtype == way.dtype == "float32")
        both = {"ours": ours, "trl": trl}
        steps = []
        with busy_process() if name == "contended" else contextlib.nullcontext():
            for _ in take_turns(both, {"step": "warm"}, 1):
                note(f"{name}: both are warm")
            for contestant in both.values():
                contestant.reset_peak_memory()
            for answers in take_turns(both, {"step": "timed"}, rounds):
                steps.append(answers)
                note(f"{name}: " + ", ".join(f"{who} {found['step_s']:.2f} s" for who, found in answers.items()))
        memory = {who: contestant.peak_memory_mb() for who, contestant in both.items()}
    detail: dict[str, Any] = {who: summary([answers[who] for answers in steps], samples) for who in both}
    detail |= {"samples": samples, "threads": job["threads"], "logprob_difference": round(difference, 6)}
    detail |= {"cpu": cpu_name(), "oneDNN": bf16_environment(trl_python()) or "as it is"}
    detail |= {"dtype": dtype, "trl": way._asdict(), "trl_tried_s": tried}
    names = [name]
    if name == "best" and dtype == ours.ready["engine_dtype"] == way.dtype == "float32":
        names.append("fp32")
    for figure, key in [(f"{part}.vs_trl.{each}", f"{part}_s") for each in names for part in ("step", "train")]:
        ratios = [answers["trl"][key] / answers["ours"][key] for answers in steps]
        report(figure, statistics.median(ratios), ratios=[round(ratio, 3) for ratio in ratios], **detail)
    if "fp32" in names:
        detail_mb = {f"{who}_mb": round(found) for who, found in memory.items()}
        report("step.rss_vs_trl", memory["ours"] / memory["trl"], **detail_mb)


def compare_reference(job: dict[str, Any], rounds: int) -> None:
    """Ours with a reference model and without, step by step."""
    with (
        Contestant("penstock_step.py", {"name": "Penstock", **job}, python=our_python()) as without,
        Contestant(
            "penstock_step.py", {"name": "with a reference", **job, "kl_coef": KL_COEF}, python=our_python()
        ) as with_it,
    ):
        both = {"without": without, "with": with_it}
        for _ in take_turns(both, {"step": "warm"}, 1):
            note("reference: both are warm")
        steps = list(take_turns(both, {"step": "timed"}, rounds))
    ratios = [answers["with"]["step_s"] / answers["without"]["step_s"] for answers in steps]
    samples = job["groups"] * job["group_size"]
    detail = {who: summary([answers[who] for answers in steps], samples) for who in both}
    report("step.reference_cost", statistics.median(ratios), ratios=[round(ratio, 3) for ratio in ratios], **detail)


def summary(answers: list[dict[str, Any]], samples: int) -> dict[str, Any]:
    """Medians over the rounds; tokens are those of the answers."""
    median = {key: statistics.median(found[key] for found in answers) for key in ("step_s", "generate_s", "train_s")}
    tokens = statistics.mean(found["answer_tokens"] for found in answers)
    return {
        **{key: round(seconds, 3) for key, seconds in median.items()},
        "samples_per_s": round(samples / median["step_s"], 3),
        "tokens_per_s": round(tokens / median["step_s"], 1),
        "trained_tokens_per_s": round(tokens / median["train_s"], 1),
        "tokens_per_answer": round(tokens / samples, 2),
        # Ours makes no backward pass for groups whose answers are all as good; TRL does not tell.
        "equal_groups": [found.get("equal_group_share") for found in answers],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: 2 x 2 answers of 8 tokens, once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="best,contended,lora,reference", help="which comparisons")
    parser.add_argument("--groups", type=int, default=8, help="prompts of a step")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    chosen = arguments.only.split(",")
    size = {"quick": arguments.quick, "threads": arguments.threads, "groups": arguments.groups}
    every = [way for ways in TRL_WAYS.values() for way in ways]
    for name, dtype, ways, extra in (
        ("fp32", "float32", TRL_WAYS["float32"], {}),
        ("bf16", "bfloat16", TRL_WAYS["bfloat16"], {}),
        ("best", "auto", every, {}),
        ("contended", "auto", every, {}),
        ("lora", "float32", TRL_WAYS["float32"], {"lora": LORA, "lr": 1e-5}),
    ):
        if name in chosen:
            compare(name, make_job(dtype, **size, **extra), rounds, ways)
    if "reference" in chosen:
        compare_reference(make_job("float32", **size, reward="differs"), rounds)


if __name__ == "__main__":
    try:
        main()
    except PeerError as error:
        sys.exit(f"train_step: {error}")
