"""How fast the page of a long run answers: a million rollouts in the ledger, the trajectories and their index.

view.first_paint_s      from starting the server to all that the first panel asks for
view.slowest_filter_s   the slowest of the questions that a person can ask by a click or by typing
view.memory_mb          of the server, after all of them

    python benchmarks/view.py --browser

view.browser_paint_s    the same in Chromium: from opening the address to the first panel on the screen
view.browser_filter_s   the slowest click or search there, until what it found is on the screen

    python benchmarks/view.py --live quickstart
    python benchmarks/view.py --open runs/quickstart

view.live_share         processor time of the server over the wall time of the steps it showed, with one page open on a
                        run of the recipe, or on one that trains already: asked every two seconds for what the first
                        panel asks for

With `--made DIR` the long run is made there once and used again, whatever `--rollouts` says then.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
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
                "played": [["generate", 1.7e9 + step, 0.4], ["judge", 1.7e9 + step + 0.4, 0.1]],
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


@contextlib.contextmanager
def served(run_dir: Path) -> Iterator[tuple[str, int]]:
    """The address of its page, and the server's process."""
    command = [sys.executable, "-m", "penstock.cli", "view", str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().removeprefix("open ").strip(), server.pid
        finally:
            server.terminate()


def measure(run_dir: Path, steps: int) -> dict[str, Any]:
    began, middle = time.perf_counter(), steps // 2
    with served(run_dir) as (url, pid), httpx.Client(follow_redirects=True, timeout=120) as client:
        base = url.partition("?")[0]
        client.get(url).raise_for_status()
        for path in ("runs", "long/now"):
            ask(client, base, path)
        first = time.perf_counter() - began
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
        status = Path(f"/proc/{pid}/status").read_text()
        memory = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    return {"first": first, "took": took, "memory": memory}


def in_browser(run_dir: Path, steps: int) -> tuple[float, dict[str, float]]:
    """Seconds until the first panel is painted, and until each click's or search's result is."""
    from playwright.sync_api import sync_playwright

    middle = steps // 2
    group = f"sums:{(middle - 1) * GROUPS_A_STEP}"
    clicks = [
        "panel=curves",
        "panel=time",
        f"panel=batch&step={middle}",
        "panel=rollouts",
        "panel=rollouts&text=word7",
        "panel=rollouts&text=word7 word8&min_reward=0.5",
        f"panel=rollouts&step={middle}&min_reward=1",
        "panel=rollouts&min_reward=0.3&max_reward=0.6",
        "panel=rollouts&task=sums&status=completed",
        "panel=rollouts&kind=train&text=word11",
        f"panel=rollouts&id={group}:0&kind=train&step={middle}",
        f"panel=rollouts&group={group}&kind=train&step={middle}",
        "panel=untrained",
        "panel=untrained&state=trained",
        f"panel=untrained&group={group}",
        "panel=now",
    ]
    with served(run_dir) as (url, _), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        began = time.perf_counter()
        page.goto(url)
        page.wait_for_selector("main .pipe")
        page.evaluate(PAINTED)
        first = time.perf_counter() - began
        took = {}
        for click in clicks:
            page.evaluate("document.querySelector('.place').dataset.old = '1'")
            began = time.perf_counter()
            page.evaluate("click => { location.hash = `run=long&${click}`; }", click)
            page.wait_for_selector("main .place:not([data-old]) > *, main [role=alert]", state="attached")
            page.evaluate(PAINTED)
            took[click] = time.perf_counter() - began
            if page.locator("main [role=alert]").count():
                raise RuntimeError(f"{click}: {page.locator('main').inner_text()}")
        browser.close()
    return first, took


PAINTED = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


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
                look_at(run_dir, polls)
            finally:
                run.kill()


def look_at(run_dir: Path, polls: int) -> None:
    """One page open on a run that trains."""
    name = run_dir.resolve().name
    with served(run_dir) as (url, pid), httpx.Client(follow_redirects=True, timeout=120) as client:
        base = url.partition("?")[0]
        client.get(url).raise_for_status()
        ask(client, base, f"{name}/now")
        before, began = processor_seconds(pid), time.perf_counter()
        first = client.get(f"{base}api/{name}/now").json()
        for _ in range(polls):
            time.sleep(EVERY_S)
            for path in ("runs", f"{name}/now"):
                ask(client, base, path)
        spent, wall = processor_seconds(pid) - before, time.perf_counter() - began
        last = client.get(f"{base}api/{name}/now").json()
    if first["state"] != "running":
        raise RuntimeError(f"{run_dir} does not train: it is {first['state']}")
    steps = last["step"] - first["step"]
    detail = {"polls": polls, "steps": steps, "step_s": round(wall / steps, 2) if steps else None}
    report("view.live_share", spent / wall, "of the wall time", model=first["model"], **detail)


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def report(figure: str, value: float, unit: str, **detail: Any) -> None:
    print(json.dumps({"figure": figure, "value": round(value, 3), "unit": unit, "detail": detail}), flush=True)


def make_long(run_dir: Path, steps: int) -> None:
    """Whole or not at all: it takes minutes, and may be interrupted."""
    part = run_dir.with_name("part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    fill_events(part, steps)
    fill_trajectories(part, steps)
    asyncio.run(fill_ledger(part, int(steps * GROUPS_A_STEP / (1 - DISCARDED_SHARE))))
    part.rename(run_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--browser", action="store_true", help="in Chromium too")
    parser.add_argument("--made", type=Path, metavar="DIR", help="where the long run is, or is to be made and kept")
    parser.add_argument("--live", metavar="RECIPE", help="the cost of an open page instead, on a run of this recipe")
    parser.add_argument("--open", type=Path, metavar="RUN", help="the same, on a run that trains already")
    parser.add_argument("--polls", type=int, default=20, help="how often the page of --live or --open asks")
    options = parser.parse_args()
    if options.live is not None:
        live(options.live, options.polls)
    elif options.open is not None:
        look_at(options.open, options.polls)
    else:
        long_run(options.rollouts, options.made, options.browser)


def long_run(rollouts: int, made: Path | None, browser: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        run_dir = (made or Path(directory)) / "long"
        if not run_dir.exists():
            make_long(run_dir, max(2, rollouts // (GROUPS_A_STEP * K)))
        steps = sum(1 for _ in (run_dir / "trajectories").glob("step-*.jsonl"))
        found = measure(run_dir, steps)
        painted = in_browser(run_dir, steps) if browser else None
    slowest = max(found["took"], key=found["took"].get)
    report("view.first_paint_s", found["first"], "s", rollouts=steps * GROUPS_A_STEP * K, steps=steps)
    all_of_them = {path: round(seconds, 3) for path, seconds in found["took"].items()}
    report("view.slowest_filter_s", found["took"][slowest], "s", which=slowest, all=all_of_them)
    report("view.memory_mb", found["memory"], "MB")
    if painted is not None:
        first, took = painted
        slowest = max(took, key=lambda click: took[click])
        report("view.browser_paint_s", first, "s")
        all_of_them = {click: round(seconds, 3) for click, seconds in took.items()}
        report("view.browser_filter_s", took[slowest], "s", which=slowest, all=all_of_them)


if __name__ == "__main__":
    main()
