"""Random kills over one run of `tiny-ray` on a local cluster: nothing may be lost, skipped or doubled.

    python tests/cluster/soak.py [--kills 20] [--seed 0]

Each kill takes one actor, of each kind in turn, and counts when the run told that it was lost and that it is back. Then
the run is stopped in order, its history is checked, and the effective-time ratio is printed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from penstock.cluster.session import connect, read_authentication_again
from penstock.environment import child_environment, environment_replaced
from penstock.events import ActorLost, ActorRecovered
from penstock.testing import check_ledger
from penstock.trainer.observers import read_events

NODE = {"num_cpus": 4, "object_store_memory": 80 << 20, "memory": 4 << 30}
KINDS = ("agent loop", "judger", "engine", "rollout-controller", "rank")
WAIT_S = 300.0


def living(address: str) -> dict[str, int]:
    """Processes of the run's actors, by name."""
    with connect(address):
        table = ray._private.state.actors().values()
        return {actor["Name"]: actor["Pid"] for actor in table if actor["State"] == "ALIVE"}


def counted(run: Path) -> tuple[Counter[str], Counter[str]]:
    """How often each actor was lost, and came back."""
    lost, back = Counter[str](), Counter[str]()
    if (run / "events.jsonl").exists():
        for kept in read_events(run / "events.jsonl"):
            if isinstance(kept.event, ActorLost):
                lost[kept.event.actor] += 1
            elif isinstance(kept.event, ActorRecovered):
                back[kept.event.actor] += 1
    return lost, back


def until(process: subprocess.Popen[bytes], holds: object, what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():  # type: ignore[operator]
        if process.poll() is not None:
            sys.exit(f"the run ended with {process.returncode} while {what}")
        if time.monotonic() > deadline:
            sys.exit(f"{what}: not within {WAIT_S:g} s")
        time.sleep(0.1)


def steps(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("reward/mean") if metrics.exists() else 0


def soak(address: str, directory: Path, kills: int, chance: random.Random) -> Counter[str]:
    """Returns the kills that were told and recovered from, by kind."""
    run, accepted = directory / "run", Counter[str]()
    command = ["train", "tiny-ray", "--address", address, "--run-dir", str(run)]
    command += ["--set=total_steps=1000000", "--set=train_batch_size=4", "--set=evaluator=null"]
    with (directory / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli", *command], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        until(process, lambda: steps(run) >= 2, "waiting for the first steps")
        for number in range(kills):
            actors = living(address)
            kinds = [kind for kind in KINDS if any(name.startswith(kind) for name in actors)]
            kind = kinds[number % len(kinds)]
            name = chance.choice(sorted(name for name in actors if name.startswith(kind)))
            lost, back = counted(run)
            time.sleep(chance.uniform(0.0, 2.0))
            os.kill(actors[name], signal.SIGKILL)

            def recovered(name: str = name, lost: Counter[str] = lost, back: Counter[str] = back) -> bool:
                now_lost, now_back = counted(run)
                return now_lost[name] > lost[name] and now_back[name] > back[name]

            until(process, recovered, f"waiting for {name} to come back")
            here = steps(run)
            until(process, lambda here=here: steps(run) > here, f"waiting for a step after {name} came back")
            accepted[kind] += 1
            print(f"kill {number + 1}: {name}, back; step {steps(run)}", flush=True)
        process.send_signal(signal.SIGINT)
        if process.wait(timeout=WAIT_S) != 0:
            sys.exit(f"the run ended with {process.returncode}; see {directory / 'output.txt'}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    check_ledger(run).require_none()
    ratio = [line for line in (directory / "output.txt").read_text().splitlines() if "effective time ratio" in line]
    print("\n".join(ratio))
    return accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ray_dir, run_dir = Path(tempfile.mkdtemp(prefix="psc-")), Path(tempfile.mkdtemp(prefix="penstock-soak-"))
    variables = child_environment() | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
        "RAY_TMPDIR": str(ray_dir),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with environment_replaced(variables):
        read_authentication_again()
        nodes = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
        try:
            for _ in range(2):
                nodes.add_node(**NODE)
            accepted = soak(nodes.address, run_dir, options.kills, random.Random(options.seed))
        finally:
            nodes.shutdown()
            shutil.rmtree(ray_dir, ignore_errors=True)
    print(f"{sum(accepted.values())} kills: " + ", ".join(f"{kind} {accepted[kind]}" for kind in KINDS))
    few = [kind for kind in KINDS if accepted[kind] < 2]
    if options.kills >= 2 * len(KINDS) and few:
        sys.exit(f"fewer than two kills of: {', '.join(few)}")
    shutil.rmtree(run_dir, ignore_errors=True)


if __name__ == "__main__":
    main()
