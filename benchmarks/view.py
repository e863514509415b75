"""How fast the page of a long run answers: a million rollouts in the ledger, the trajectories and their index.

view.first_paint_s      from starting the server to all that the first panel asks for
view.slowest_filter_s   the slowest of the questions that a person can ask by a click or by typing
view.memory_mb          of the server, after all of them

    python benchmarks/view.py --live quickstart

view.live_share         processor time of the server over the wall time of the steps it showed, with one page open on a
                        run of the recipe: asked every two seconds for what the first panel asks for
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from penstock.events import EngineChanged, RunBegan, StageBegan, StageEnded, StepTrained
from penstock.replay import DiscardReason, Ledger, ReplayBuffer
from penstock.rollout import FinishReason, Group, Prompt, RolloutState, Status, Tokens, Verdict, pack_ids
from penstock.trainer.index import RolloutIndex
from penstock.trainer.observers import EVENTS_FILE, EventFile

K = 8
GROUPS_A_STEP = 64
TOKENS = 16
DISCARDED_SHARE = 0.1
EVERY_S = 2.0
"""As `view/page/app.js` has it."""
WORDS = [f"word{n}" for n in range(2_000)]
PROMPT = Prompt(messages=({"role": "user", "content": "What is 17 + 25?"},), ids=pack_ids(range(8)))
ANSWER = Tokens().append(range(TOKENS), [-0.5] * TOKENS, model_step=0)


def new_group(draw: int) -> Group:
    group_id = f"sums:{draw}"
    return [
        RolloutState(prompt=PROMPT, task_name="sums", group_id=group_id, rollout_id=f"{group_id}:{k}", draw=draw)
        for k in range(K)
    ]


async def fill_ledger(run_dir: Path, groups: int) -> None:
    buffer = ReplayBuffer(storage=Ledger.open(run_dir))
    chosen, step, complete = random.Random(0), 1, 0
    for draw in range(groups):
        group = new_group(draw)
        buffer.draw(group, draw + 1)
        for rollout in group:
            rollout.response, rollout.finish_reason = ANSWER, FinishReason.STOP
            rollout.reward, rollout.status = Verdict(1.0), Status.COMPLETED
        if chosen.random() < DISCARDED_SHARE:
            buffer.discard(group, "sums", DiscardReason.FILTERED, train_step=step)
            continue
        buffer.put(group, "sums", model_step=step - 1, current_train_step=step, stale_threshold=1_000_000)
        complete += 1
        if complete == GROUPS_A_STEP:
            buffer.take_batch({"sums": GROUPS_A_STEP}, train_step=step)
            buffer.commit(step)
            await buffer.flush()
            await buffer.prune(step)
            step, complete = step + 1, 0
    await buffer.flush()
    await buffer.close()


def fill_trajectories(run_dir: Path, steps: int) -> None:
    directory = run_dir / "trajectories"
    directory.mkdir()
    index, chosen = RolloutIndex(run_dir), random.Random(0)
    packed = {"ids": ANSWER.ids, "logprobs": ANSWER.logprobs, "mask": ANSWER.mask}
    columns = {name: base64.b64encode(column).decode() for name, column in packed.items()}
    segment = {"parent": -1, "start": -1, **columns, "steps": [[0, TOKENS]]}
    for step in range(1, steps + 1):
        lines = []
        for number in range(GROUPS_A_STEP * K):
            group_id = f"sums:{(step - 1) * GROUPS_A_STEP + number // K}"
            line: dict[str, Any] = {
                "rollout_id": f"{group_id}:{number % K}",
                "group_id": group_id,
                "task": "sums",
                "data_source": "made",
                "prompt": [{"role": "user", "content": f"What is {number} + {step}?"}],
                "rendered_prompt": "",
                "prompt_ids": "",
                "answer": " ".join(chosen.choices(WORDS, k=8)),
                "ground_truth": None,
                "turns": [],
                "reward": {"score": chosen.choice([0.0, 0.25, 0.5, 1.0]), "parts": {}, "text": None},
                "advantage": 0.5,
                "status": "completed",
                "finish_reason": "stop",
                "tokens": TOKENS,
                "model_steps": [[step - 1, TOKENS]],
                "staleness": 0,
                "num_tries": 0,
                "segments": [segment],
            }
            lines.append(json.dumps(line))
        path = directory / f"step-{step:06d}.jsonl"
        path.write_text("\n".join(lines) + "\n")
        index.add(path)


def fill_events(run_dir: Path, steps: int) -> None:
    file, metrics = EventFile(run_dir / EVENTS_FILE), {f"some/metric_{n}": float(n) for n in range(60)}
    file.notice(RunBegan(run_name="long", model="tiny", total_steps=steps))
    file.notice(EngineChanged(engine="engine-0", state="active"))
    for step in range(1, steps + 1):
        for stage in ("step", "produce", "prepare", "train", "commit", "sync"):
            file.notice(StageBegan(stage=stage, train_step=step))
            file.notice(StageEnded(stage=stage, train_step=step, seconds=1.0))
        file.notice(StepTrained(train_step=step, metrics={"reward/mean": step / steps, **metrics}))
    file.close()


def ask(client: httpx.Client, base: str, path: str) -> float:
    began = time.perf_counter()
    client.get(f"{base}api/{path}").raise_for_status()
    return time.perf_counter() - began


def measure(run_dir: Path, steps: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "penstock.cli", "view", str(run_dir)]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().removeprefix("open ").strip()
            base = url.partition("?")[0]
            with httpx.Client(follow_redirects=True, timeout=120) as client:
                client.get(url).raise_for_status()
                for path in ("runs", "long/now"):
                    ask(client, base, path)
                first = time.perf_counter() - began
                middle = steps // 2
                questions = [
                    "long/now",
                    "long/curves?name=reward/mean&name=some/metric_3",
                    "long/timeline",
                    f"long/batch?step={middle}",
                    "long/rollouts",
                    "long/rollouts?text=word7",
                    "long/rollouts?text=word7+word8&min_reward=0.5",
                    f"long/rollouts?step={middle}&min_reward=1",
                    "long/rollouts?min_reward=0.3&max_reward=0.6",
                    "long/rollouts?task=sums&status=completed",
                    "long/rollouts?task=none&min_reward=0.3",
                    f"long/rollout?id=sums:{(middle - 1) * GROUPS_A_STEP}:0&step={middle}",
                    "long/histogram",
                    "long/untrained",
                    "long/groups?state=discarded",
                    "long/groups?state=trained",
                    f"long/group?id=sums:{middle}",
                ]
                took = {path: ask(client, base, path) for path in questions}
            status = Path(f"/proc/{server.pid}/status").read_text()
            memory = int(status.partition("VmHWM:")[2].split()[0]) / 1024
        finally:
            server.terminate()
    return {"first": first, "took": took, "memory": memory}


def live(recipe: str, polls: int) -> None:
    """The page of a run that trains, asked as a browser asks."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "live"
        command = [sys.executable, "-m", "penstock.cli", "train", recipe, "--run-dir", str(run_dir)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None
            try:
                next(line for line in run.stdout if line.startswith("step"))
                # Read on, so that the run never waits for its reader.
                threading.Thread(target=run.stdout.read, daemon=True).start()
                share, steps = poll(run_dir, polls)
            finally:
                run.kill()
    report("view.live_share", share, "of the wall time", recipe=recipe, polls=polls, steps=steps)


def poll(run_dir: Path, polls: int) -> tuple[float, int]:
    command = [sys.executable, "-m", "penstock.cli", "view", str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().removeprefix("open ").strip()
            base = url.partition("?")[0]
            with httpx.Client(follow_redirects=True, timeout=120) as client:
                client.get(url).raise_for_status()
                ask(client, base, "live/now")
                before, began = processor_seconds(server.pid), time.perf_counter()
                first = client.get(f"{base}api/live/now").json()["step"]
                for _ in range(polls):
                    time.sleep(EVERY_S)
                    for path in ("runs", "live/now"):
                        ask(client, base, path)
                spent, wall = processor_seconds(server.pid) - before, time.perf_counter() - began
                steps = client.get(f"{base}api/live/now").json()["step"] - first
        finally:
            server.terminate()
    return spent / wall, steps


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def report(figure: str, value: float, unit: str, **detail: Any) -> None:
    print(json.dumps({"figure": figure, "value": round(value, 3), "unit": unit, "detail": detail}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--live", metavar="RECIPE", help="the cost of an open page instead, on a run of this recipe")
    parser.add_argument("--polls", type=int, default=20, help="how often the page of --live asks")
    options = parser.parse_args()
    if options.live is not None:
        live(options.live, options.polls)
        return
    rollouts = options.rollouts
    steps = max(2, rollouts // (GROUPS_A_STEP * K))
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "long"
        run_dir.mkdir()
        fill_events(run_dir, steps)
        fill_trajectories(run_dir, steps)
        asyncio.run(fill_ledger(run_dir, int(steps * GROUPS_A_STEP / (1 - DISCARDED_SHARE))))
        found = measure(run_dir, steps)
    slowest = max(found["took"], key=found["took"].get)
    report("view.first_paint_s", found["first"], "s", rollouts=steps * GROUPS_A_STEP * K, steps=steps)
    all_of_them = {path: round(seconds, 3) for path, seconds in found["took"].items()}
    report("view.slowest_filter_s", found["took"][slowest], "s", which=slowest, all=all_of_them)
    report("view.memory_mb", found["memory"], "MB")


if __name__ == "__main__":
    main()
