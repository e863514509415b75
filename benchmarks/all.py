"""The benchmarks beside this file, one after the other; then a table of their figures, and `bench.json`.

Each is given as much work as fits into 25 minutes for all of them on two cores; with --quick as fits into five: that
they run and about what they show. One that fails does not stop the others; its name is said at the end, and the exit
code is 1.

python benchmarks/all.py [--quick] [--only engine,weights] [--out bench.json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from penstock.models.arithmetic import cpu_name

HERE = Path(__file__).parent
NOT_ALONE = {"all", "since"}
"""Needs another checkout, or is this file."""
OWN_COMMANDS = {"correction", "int8", "lora"}
"""Whole runs, or what does not change: only where they are named."""
SMALLER: dict[str, str] = {
    "cluster": "rollouts broadcast",
    "train_step": "--rounds 3 --only best",
}
"""Arguments of those that take longer by themselves: `train_step` has more comparisons, see there."""
QUICK: dict[str, str] = {
    "async": "--steps 20",
    "dataset": "--rows 100000",
    "engine": "--quick --only fixed,ragged",
    "judges": "--seconds 0.5 --rounds 1 --runs 5",
    "ledger": "--groups 2048 --seconds 0.5 --open-groups 10000 --trained-groups 100000 --steps 0",
    "pipeline": "--quick",
    "sessions": "--seconds 2 --sizes 384",
    "train_step": "--quick --only fp32",
    "view": "--rollouts 50000",
    "weights": "--rounds 2",
}
TOO_LONG = {"checkpoint", "cluster", "pause", "quickstart"}
"""Not a part of --quick."""


def run(script: Path, arguments: list[str]) -> tuple[list[dict[str, Any]], int]:
    """Its figures, shown as they come, and its exit code."""
    figures = []
    with subprocess.Popen([sys.executable, str(script), *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("{"):
                figures.append({"benchmark": script.stem, "cpu": cpu_name(), **json.loads(line)})
    return figures, process.returncode


def table(figures: list[dict[str, Any]], seconds: dict[str, float]) -> str:
    rows = [(row["figure"], f"{row['value']:g}", row["unit"]) for row in figures]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"on {cpu_name()}"]
    lines += [f"{name:<{widths[0]}}  {value:>{widths[1]}} {unit}" for name, value, unit in rows]
    lines.append("seconds: " + ", ".join(f"{name} {took:.0f}" for name, took in seconds.items()))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under five minutes: less of everything")
    parser.add_argument("--only", help="names of benchmarks, with commas between them")
    parser.add_argument("--out", type=Path, default=Path("bench.json"))
    arguments = parser.parse_args()
    names = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NOT_ALONE)
    left_out = OWN_COMMANDS | (TOO_LONG if arguments.quick else set())
    every = [name for name in names if name not in left_out]
    chosen = arguments.only.split(",") if arguments.only else every
    unknown = [name for name in chosen if name not in names]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(names)}")
    figures: list[dict[str, Any]] = []
    failed = []
    seconds: dict[str, float] = {}
    for name in chosen:
        print(f"benchmarks/{name}.py", flush=True)
        began = time.monotonic()
        found, code = run(HERE / f"{name}.py", (QUICK if arguments.quick else SMALLER).get(name, "").split())
        seconds[name] = time.monotonic() - began
        figures += found
        failed += [f"{name} (exit {code})"] if code else []
    arguments.out.write_text(json.dumps(figures, indent=2) + "\n")
    if figures:
        print("\n" + table(figures, seconds))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
