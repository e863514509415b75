"""Makes what the documentation shows, from a real run: the run of `penstock view --demo`, and pictures of its page.

    .venv/bin/python docs/pictures.py
    .venv/bin/python docs/pictures.py --recorded      # pictures alone, of the run that is recorded already

Also `staleness.png`: groups of three steps of that run, by the weights that made them.

The run is `tiny-async` made small, with a filter, so that there is something that was not trained. Needs Chromium and
what `make setup` installs. Writes penstock/view/demo.zip and docs/pictures/.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path

from matplotlib.figure import Figure
from playwright.sync_api import Browser, sync_playwright

from penstock.events import WeightsPublished
from penstock.trainer.observers import EVENTS_FILE, read_events
from penstock.view.demo import ARCHIVE, demo_run
from penstock.view.groups import Groups
from penstock.view.runs import Runs
from penstock.view.server import ViewServer

PICTURES = Path(__file__).parent / "pictures"
KEPT = (
    *("config.json", "events.jsonl", "index.sqlite", "ledger.sqlite", "metrics.jsonl", "summary.json"),
    "trajectories/*",
)
STEP = 12
PANELS = {
    "now": "panel=now",
    "curves": "panel=curves",
    "batch": f"panel=batch&step={STEP}",
    "rollouts": "panel=rollouts",
    "rollout": f"panel=rollouts&kind=train&step={STEP}&id=GROUP:0",
    "siblings": f"panel=rollouts&kind=train&step={STEP}&group=GROUP",
    "untrained": "panel=untrained",
    "story": "panel=untrained&group=GROUP",
    "time": "panel=time",
}
"""By the name of the picture; GROUP is one of that step."""
SIZES = {"": (1280, 900), "-phone": (390, 844)}
RUN_FILE = '''"""The run of `penstock view --demo`."""

from penstock.recipes.tiny_async import trainer as tiny_async


def has_something_to_learn(group):
    return len({rollout.reward.score for rollout in group}) > 1


trainer = tiny_async.replace("manager.tasks.0.produce_strategy_config.is_valid_sample_fn", has_something_to_learn)
'''


def record(directory: Path) -> Path:
    """A run of half a minute, without what only its trainer needs."""
    run_file = directory / "demo.py"
    run_file.write_text(RUN_FILE)
    run_dir = directory / "demo"
    settings = {
        "total_steps": 24,
        "train_batch_size": 6,
        "eval_interval": 12,
        "manager.tasks.0.sampler_config.prompt_repeat_k": 6,
        "evaluator.eval_sample_num": 32,
    }
    sets = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "penstock.cli", "train", str(run_file), "--run-dir", str(run_dir), *sets]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(ARCHIVE, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for pattern in KEPT:
            for path in sorted(run_dir.glob(pattern)):
                archive.write(path, path.relative_to(directory))
        tokenizer = run_dir / "hf" / "final" / "tokenizer.json"
        archive.write(tokenizer, tokenizer.relative_to(directory))
    return run_dir


def draw_staleness(run_dir: Path, steps: range) -> None:
    """Each group from its first token to its train step, coloured by its oldest weights; lines are weight syncs."""
    groups = Groups(run_dir)
    lanes = [(step, lane) for step in steps for lane in groups.batch(step)]
    begin = min(lane["moves"][0][1] for _, lane in lanes)
    end = max(lane["moves"][-1][1] for _, lane in lanes)
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    for row, (step, lane) in enumerate(lanes):
        made_by = min(lane["model_steps"])
        leased = next(time for state, time, _ in reversed(lane["moves"]) if state == "leased")
        drawn, trained = lane["moves"][0][1], lane["moves"][-1][1]
        axes.barh(row, leased - drawn, left=drawn - begin, color=f"C{made_by % 10}", height=0.7)
        axes.barh(row, trained - leased, left=leased - begin, color="0.75", height=0.7)
        text = f" step {step}, weights {made_by}: staleness {step - made_by - 1}"
        axes.text(trained - begin, row, text, va="center", fontsize=7, bbox={"facecolor": "white", "lw": 0, "pad": 0.5})
    for kept in read_events(run_dir / EVENTS_FILE):
        if isinstance(kept.event, WeightsPublished) and begin <= kept.time <= end:
            axes.axvline(kept.time - begin, color="0.4", linewidth=0.8, linestyle=":")
            axes.text(kept.time - begin, -1.1, f"m = {kept.event.model_step}", ha="center", fontsize=7)
    axes.set_xlim(0, (end - begin) * 1.3)
    axes.set_ylim(len(lanes), -1.6)
    axes.set_yticks([])
    axes.set_xlabel("seconds; dotted: new weights reach the engines; grey: being trained", fontsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(PICTURES / "staleness.png", dpi=110)


def take(browser: Browser, url: str, group: str) -> None:
    for theme in ("light", "dark"):
        for old in PICTURES.glob(f"*-{theme}.png"):
            old.unlink()
    for size, (width, height) in SIZES.items():
        for theme in ("light", "dark"):
            context = browser.new_context(viewport={"width": width, "height": height})
            page = context.new_page()
            page.goto(url)
            page.evaluate(f"localStorage.setItem('penstock-theme', '{theme}')")
            for panel, address in PANELS.items():
                page.goto(f"{url.partition('?')[0]}#run=demo&{address.replace('GROUP', group)}")
                page.reload()
                page.wait_for_selector("main section")
                page.screenshot(path=PICTURES / f"{panel}{size}-{theme}.png")
            context.close()


def main() -> None:
    with contextlib.ExitStack() as stack:
        if "--recorded" in sys.argv[1:]:
            run_dir = stack.enter_context(demo_run())
        else:
            run_dir = record(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        playwright = stack.enter_context(sync_playwright())
        server = ViewServer(Runs(run_dir))
        thread = threading.Thread(target=server.serve)
        thread.start()
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        try:
            take(browser, server.url, Groups(run_dir).batch(STEP)[0]["group_id"])
            draw_staleness(run_dir, range(11, 14))
        finally:
            browser.close()
            server.stop()
            thread.join()


if __name__ == "__main__":
    main()
