"""This checkout against an earlier one of the same machine: is anything slower than it was?

python benchmarks/since.py BEFORE [--rounds 3] [--only engine,step,pipeline,records,async,ledger]

BEFORE is another checkout (`git worktree add /tmp/before REV`). Engines and train steps take turns while both are warm,
each figure is how many times as fast this one is. The other benchmarks run one after the other, BEFORE first, and their
figures are printed side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from peers import PROJECT, Contestant, PeerError, note, our_python, report, take_turns

ALONE = {
    "pipeline": [],
    "records": [],
    "async": [],
    "ledger": ["--groups", "4096", "--open-groups", "20000", "--steps", "1"],
}


def engines(before: Path, rounds: int) -> None:
    from engine import BATCH, FP32, Work, resolve_model

    model = str(resolve_model("smollm2-135m"))
    job = {"model": model, "threads": 2, "seed": 0, "max_running": BATCH, "dtypes": [FP32]}
    work = Work(model, quick=False).fixed()
    request = {**work, "way": "generate", "dtype": FP32}
    with (
        Contestant("penstock_generate.py", {"name": "now", **job}, python=our_python()) as now,
        Contestant("penstock_generate.py", {"name": "before", **job}, python=our_python(), project=before) as then,
    ):
        _compare("since.engine.fixed", {"now": now, "before": then}, request, rounds, "seconds")


def steps(before: Path, rounds: int) -> None:
    from train_step import make_job

    job = make_job("float32", False, 2)
    with (
        Contestant("penstock_step.py", {"name": "now", **job}, python=our_python()) as now,
        Contestant("penstock_step.py", {"name": "before", **job}, python=our_python(), project=before) as then,
    ):
        _compare("since.step.fp32", {"now": now, "before": then}, {"step": "timed"}, rounds, "step_s")


def _compare(figure: str, both: dict[str, Contestant], request: dict[str, Any], rounds: int, seconds: str) -> None:
    for _ in take_turns(both, request, 1):
        note(f"{figure}: both are warm")
    found = []
    for answers in take_turns(both, request, rounds):
        found.append({who: answer[seconds] for who, answer in answers.items()})
        note(f"{figure}: " + ", ".join(f"{who} {value:.2f} s" for who, value in found[-1].items()))
    ratios = [one["before"] / one["now"] for one in found]
    report(figure, statistics.median(ratios), ratios=[round(ratio, 3) for ratio in ratios])


def alone(name: str, before: Path) -> None:
    figures = {who: _figures(name, project) for who, project in (("before", before), ("now", PROJECT))}
    for figure, value in figures["now"].items():
        print(f"{figure}: before {figures['before'].get(figure, 'none')}, now {value}", flush=True)


def _figures(name: str, project: Path) -> dict[str, str]:
    note(f"{name} of {project}")
    command = [sys.executable, str(project / "benchmarks" / f"{name}.py"), *ALONE[name]]
    environment = {**os.environ, "PYTHONPATH": str(project)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=project, check=False)
    if done.returncode:
        raise PeerError(f"{name} of {project} ended with code {done.returncode}: {done.stderr[-2000:]}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["figure"]: f"{line['value']:g} {line['unit']}" for line in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="engine,step,pipeline,records,async,ledger")
    arguments = parser.parse_args()
    for name in arguments.only.split(","):
        if name in ALONE:
            alone(name, arguments.before)
        else:
            {"engine": engines, "step": steps}[name](arguments.before, arguments.rounds)


if __name__ == "__main__":
    try:
        main()
    except PeerError as error:
        sys.exit(f"since: {error}")
