"""What a checkpoint of SmolLM2 costs a run: `quickstart` as a user runs it, with smaller steps and more checkpoints.

checkpoint.stall_s          the time that a checkpoint keeps the loop from going on, and the model while it is
                            copied: what a run waits at most (medians)
checkpoint.write_s          from the snapshot until it is on the disk and read back, beside training (median)
checkpoint.beside_vs_alone  a step while one is written, over a step while none is (medians)

python benchmarks/checkpoint.py [--checkpoints 3] [--threads 2]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from peers import note, report

from penstock.learn import TrainWorkerConfig
from penstock.learn.batch import TrainAnswer, TrainBatch, TrainGroup, TrainSegment
from penstock.models import resolve_model
from penstock.rollout import ROOT

INTERVAL = 4
"""Steps: a checkpoint is written long before the next is due."""


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(run_dir: Path, checkpoints: int, threads: int) -> None:
    # One step more: what is written after the last stalls nothing.
    fields = {"total_steps": checkpoints * INTERVAL + 1, "checkpoint_interval": INTERVAL, "train_batch_size": 4}
    fields |= {"cpu_threads": threads, "evaluator": "null"}
    sets = [argument for key, value in fields.items() for argument in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "penstock.cli", "train", "quickstart", "--run-dir", str(run_dir), *sets]
    subprocess.run(command, check=True, stdout=sys.stderr)


def small_batch() -> TrainBatch:
    """Two answers of four tokens, one better than the other."""
    prompt, zeros = np.arange(10, 18, dtype=np.int32), np.zeros(4, np.float32)
    mask, steps = np.ones(4, np.uint8), np.zeros(4, np.int32)
    answers = []
    for index, reward in enumerate((1.0, -1.0)):
        ids = np.arange(20 + index, 24 + index, dtype=np.int32)
        segment = TrainSegment(ids, zeros, np.full(4, reward, np.float32), mask, steps, ROOT, len(prompt))
        answers.append(TrainAnswer(f"0/{index}", reward, reward, [segment]))
    return TrainBatch(1, [TrainGroup("0", prompt, answers)])


async def copies(rounds: int, threads: int) -> list[float]:
    """Seconds for which a pass through the model waits when it comes right behind a snapshot."""
    worker = TrainWorkerConfig(lr=1e-6).build(resolve_model("smollm2-135m"), total_steps=10, threads=threads)
    batch, found = small_batch(), []
    await worker.train(batch)  # now there is a state of the optimiser
    for _ in range(rounds + 1):
        began = time.perf_counter()
        await worker.score(batch)
        alone = time.perf_counter() - began
        began = time.perf_counter()
        snapshot = await worker.snapshot(optimizer=True, export=False)
        await worker.score(batch)
        found.append(time.perf_counter() - began - alone)
        del snapshot
    await worker.close()
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        run(run_dir, arguments.checkpoints, arguments.threads)
        trained = {line["step"]: line for line in lines(run_dir / "metrics.jsonl") if "reward/mean" in line}
        written = [event for event in lines(run_dir / "events.jsonl") if event["kind"] == "checkpoint_written"]
        waits = [event["text"] for event in lines(run_dir / "events.jsonl") if " waits until " in event.get("text", "")]
        newest = max((run_dir / "checkpoints").glob("step-*"))
        megabytes = sum(path.stat().st_size for path in newest.iterdir()) / 1e6
    due = [step for step in trained if step % INTERVAL == 0]
    waited = [trained[step]["time/checkpoint_s"] for step in due]
    copied = asyncio.run(copies(arguments.checkpoints, arguments.threads))
    seconds = [event["seconds"] for event in written if event.get("train_step") in due]
    note(f"waited {waited}, copied in {copied}, written in {seconds}")
    detail: dict[str, Any] = {"megabytes": round(megabytes), "threads": arguments.threads, "waits": waits}
    detail |= {"waited": [round(s, 3) for s in waited], "copied": [round(s, 3) for s in copied]}
    report("checkpoint.stall_s", statistics.median(waited) + statistics.median(copied), "s", **detail)
    report("checkpoint.write_s", statistics.median(seconds), "s", seconds=[round(s, 2) for s in seconds])
    beside = [trained[step + 1]["time/step_s"] for step in due]
    alone = [trained[step - 1]["time/step_s"] for step in due]
    ratio = statistics.median(beside) / statistics.median(alone)
    report(
        "checkpoint.beside_vs_alone", ratio, beside=[round(s, 2) for s in beside], alone=[round(s, 2) for s in alone]
    )


if __name__ == "__main__":
    main()
