"""What a checkpoint of SmolLM2 costs a run: `quickstart` as a user runs it, with smaller steps and more checkpoints.

checkpoint.stall_s          the time that a checkpoint keeps the loop from going on (median)
checkpoint.write_s          from the snapshot until it is on the disk and read back, beside training (median)
checkpoint.beside_vs_alone  a step while one is written, over a step while none is (medians)

python benchmarks/checkpoint.py [--checkpoints 3] [--threads 2]
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
    stalls = [trained[step]["time/checkpoint_s"] for step in due]
    seconds = [event["seconds"] for event in written if event.get("train_step") in due]
    note(f"stalls {stalls}, written in {seconds}")
    detail = {"megabytes": round(megabytes), "threads": arguments.threads, "waits": waits}
    report("checkpoint.stall_s", statistics.median(stalls), "s", stalls=[round(s, 3) for s in stalls], **detail)
    report("checkpoint.write_s", statistics.median(seconds), "s", seconds=[round(s, 2) for s in seconds])
    beside = [trained[step + 1]["time/step_s"] for step in due]
    alone = [trained[step - 1]["time/step_s"] for step in due]
    ratio = statistics.median(beside) / statistics.median(alone)
    report(
        "checkpoint.beside_vs_alone", ratio, beside=[round(s, 2) for s in beside], alone=[round(s, 2) for s in alone]
    )


if __name__ == "__main__":
    main()
