"""`penstock train quickstart` as a user runs it: how long it takes, what it learns, what it leaves on the disk.

quickstart.first_figure_s  from the command to the first figure on the screen, the evaluation before training
quickstart.train_s         of its steps
quickstart.wall_s          from the command to its end
quickstart.gain            rise of the accuracy of sampled answers to held-out problems
quickstart.disk_gb         the run directory

The model is resolved before: the cache is warm.

python benchmarks/quickstart.py [--recipe quickstart] [--set KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from peers import note, report

from penstock.models import resolve_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    resolve_model("smollm2-135m")
    sets = [argument for pair in arguments.set for argument in ("--set", pair)]
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        command = [sys.executable, "-m", "penstock.cli", "train", arguments.recipe, "--run-dir", str(run_dir), *sets]
        began, first = time.perf_counter(), None
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                note(line.rstrip())
                if first is None and line.startswith(("eval ", "step ")):
                    first = time.perf_counter() - began
        wall = time.perf_counter() - began
        if process.returncode or first is None:
            sys.exit(f"quickstart: the run ended with code {process.returncode}")
        summary = json.loads((run_dir / "summary.json").read_text())
        size = sum(path.stat().st_size for path in run_dir.rglob("*") if path.is_file()) / 1e9
    before, after = (
        {kind: summary.get(f"eval_{kind}_{when}") for kind in ("accuracy", "greedy")} for when in ("before", "after")
    )
    report("quickstart.first_figure_s", first, "s", target="<= 30")
    report("quickstart.train_s", summary["train_seconds"], "s", steps=summary["steps"])
    report("quickstart.wall_s", wall, "s", eval_s=summary["eval_seconds"])
    if after["accuracy"] is not None:
        report("quickstart.gain", after["accuracy"] - before["accuracy"], "accuracy", before=before, after=after)
    report("quickstart.disk_gb", size, "GB", target="< 2.5")


if __name__ == "__main__":
    main()
