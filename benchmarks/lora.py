"""`lora-smollm2` beside `quickstart`, both as a user runs them: the same task, steps, batch and seed.

lora.time_vs_quickstart         time of a step (median, the first left out) over quickstart's
lora.gain_vs_quickstart         rise of the mean reward (last third of the steps less the first two), less quickstart's
lora.optimizer_vs_quickstart    bytes of the optimiser's state over quickstart's
lora.checkpoint_mb              a checkpoint, all files

python benchmarks/lora.py [--steps 16] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from peers import note, report

RECIPES = ("lora-smollm2", "quickstart")


def run(recipe: str, steps: int, threads: int, directory: Path) -> dict[str, Any]:
    fields = {"total_steps": steps, "cpu_threads": threads, "evaluator": "null"}
    sets = [argument for key, value in fields.items() for argument in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "penstock.cli", "train", recipe, "--run-dir", str(directory / recipe), *sets]
    subprocess.run(command, check=True, stdout=sys.stderr)
    lines = [json.loads(line) for line in (directory / recipe / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "reward/mean" in line]
    rewards = [line["reward/mean"] for line in trained]
    [checkpoint] = (directory / recipe / "checkpoints").glob(f"step-*{steps:06d}")
    found = {
        "step_s": statistics.median(line["time/step_s"] for line in trained[1:]),
        "train_s": statistics.median(line["time/train_s"] for line in trained[1:]),
        "rewards": [round(reward, 3) for reward in rewards],
        "gain": statistics.mean(rewards[-max(1, steps // 3) :]) - statistics.mean(rewards[:2]),
        "optimizer_bytes": (checkpoint / "optimizer.safetensors").stat().st_size,
        "checkpoint_bytes": sum(path.stat().st_size for path in checkpoint.iterdir()),
    }
    note(f"{recipe}: {found}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        lora, plain = (run(recipe, arguments.steps, arguments.threads, Path(directory)) for recipe in RECIPES)
    detail = {"lora": lora, "quickstart": plain, "steps": arguments.steps, "threads": arguments.threads}
    report("lora.time_vs_quickstart", lora["step_s"] / plain["step_s"], **detail)
    report("lora.gain_vs_quickstart", lora["gain"] - plain["gain"], "reward")
    report("lora.optimizer_vs_quickstart", lora["optimizer_bytes"] / plain["optimizer_bytes"])
    report("lora.checkpoint_mb", lora["checkpoint_bytes"] / 1e6, "MB")


if __name__ == "__main__":
    main()
