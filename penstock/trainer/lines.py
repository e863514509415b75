"""What a person reads of a run, as words: a step, an evaluation, a number. What is not reported is not shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.events import ArithmeticChosen
from penstock.trainer.history import EngineStands

STAGES = {
    "time/produce_s": ("produce", "cyan"),
    "time/prepare_s": ("prepare", "blue"),
    "time/train_s": ("train", "green"),
    "time/checkpoint_s": ("checkpoint", "red"),
    "time/sync_s": ("sync", "magenta"),
    "time/eval_s": ("eval", "yellow"),
}
"""By metric: the name and the colour of a stage."""


def step_line(metrics: Mapping[str, float]) -> str:
    """`reward 0.412  loss 0.0021  grad 1.30  2.1 s (produce 1.2, train 0.7)  310 tokens/s`, with what there is."""
    words = []
    if "reward/mean" in metrics:
        words.append(f"reward {metrics['reward/mean']:.3f}")
    words += training_words(metrics)
    discarded = {key.rpartition("/")[2]: value for key, value in metrics.items() if "/discarded/" in key and value}
    if discarded:
        words.append("discarded " + ", ".join(f"{value:.0f} {reason}" for reason, value in discarded.items()))
    if "time/step_s" in metrics:
        stages = [f"{name} {metrics[key]:.1f}" for key, (name, _) in STAGES.items() if metrics.get(key, 0.0) >= 0.05]
        words.append(f"{metrics['time/step_s']:.1f} s" + (f" ({', '.join(stages)})" if stages else ""))
    return "  ".join(words + speed_words(metrics))


def arithmetic_line(event: ArithmeticChosen) -> str:
    """`arithmetic: training float32, engine float32 (bfloat16 takes 2.3x as long), on AMD EPYC (AVX2)`."""
    words = []
    for name, part, dtype in (("training", "train", event.train), ("engine", "engine", event.engine)):
        if dtype is not None:
            other = "float32" if dtype == "bfloat16" else "bfloat16"
            takes = event.others_take.get(part)
            words.append(f"{name} {dtype}" + (f" ({other} takes {takes:.2g}x as long)" if takes is not None else ""))
    line = f"arithmetic: {', '.join(words)}, on {event.cpu}"
    if not event.began_on:
        return line
    here = "" if event.began_on == event.cpu else f" on {event.began_on}; what is fastest here was not asked"
    return f"{line}; as the run began{here}"


def training_words(metrics: Mapping[str, float]) -> list[str]:
    words = []
    if "train/loss" in metrics:
        # Adding 0.0 turns a rounded -0.0 into 0.0.
        words.append(f"loss {round(metrics['train/loss'], 4) + 0.0:.4f}")
    if "train/grad_norm" in metrics:
        words.append(f"grad {metrics['train/grad_norm']:.2f}")
    if metrics.get("staleness/mean"):
        words.append(f"staleness {metrics['staleness/mean']:.1f}")
    return words


def speed_words(metrics: Mapping[str, float]) -> list[str]:
    return [
        f"{count(metrics[key])} tokens/s {verb}"
        for key, verb in (("tokens/generated_per_s", "generated"), ("tokens/trained_per_s", "trained"))
        if key in metrics
    ]


def engine_words(engines: Mapping[str, EngineStands]) -> tuple[list[str], list[str]]:
    """Those that are away, each with its reason; and of those that serve: how many, with which weights, how loaded."""
    open_ = {name: stands for name, stands in engines.items() if stands.state != "closed"}
    away = [
        f"{name} is {stands.state}{f': {stands.reason}' if stands.reason else ''}"
        for name, stands in open_.items()
        if stands.state != "active"
    ]
    loads = [stands.load for stands in open_.values() if stands.load is not None]
    words = [f"{len(open_) - len(away)} of {len(open_)} serve"] if open_ else []
    if loads:
        versions = sorted({load.model_step for load in loads})
        words.append(f"weights {versions[0]}" + (f" to {versions[-1]}" if len(versions) > 1 else ""))
        words.append(f"busy {100 * sum(load.busy for load in loads) / len(loads):.0f} %")
        words.append(f"{sum(load.running for load in loads)} running")
        words += [f"{waiting} wait" for waiting in [sum(load.waiting for load in loads)] if waiting]
        words.append(f"{count(sum(load.tokens_per_s for load in loads))} tokens/s")
    return away, words


def eval_figures(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Name and value of what an evaluation came to; metrics of the user's own as they are called."""
    known = (("eval/accuracy", "accuracy"), ("eval/greedy_accuracy", "greedy"))
    figures = [(name, f"{100 * metrics[key]:.1f} %") for key, name in known if key in metrics]
    return figures or [(key.removeprefix("eval/"), f"{value:.4g}") for key, value in metrics.items()]


def eval_line(metrics: Mapping[str, float]) -> str:
    """`accuracy 61.0 %  greedy 74.0 %`."""
    words = [f"{name} {value}" for name, value in eval_figures(metrics)]
    failed = metrics.get("eval/failed_prompts", 0.0) + metrics.get("eval/greedy_failed_prompts", 0.0)
    if failed:
        words.append(f"{failed:.0f} prompts failed and are not counted")
    return "  ".join(words)


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values for people; what is None was not measured and is left out."""
    shown = {name: value for name, value in summary.items() if value is not None and name != "began_at"}
    known = {str(name).replace("_", " "): value for name, value in shown.items()}
    width = max(map(len, known), default=0)
    return [
        (name.ljust(width), f"{value:.4g}" if isinstance(value, float) else str(value)) for name, value in known.items()
    ]


def count(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.1f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
