"""The page of real runs: one that trains and is killed, one that ended, and one whose judge and answers are no good."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from view_runs import served

from penstock.view.demo import demo_run

RUN_MS = 180_000
WAIT_MS = 20_000
PANELS = {
    "1": ".pipe",
    "2": "svg[aria-label='Reward by train step']",
    "3": "svg[aria-label^='the rollouts of train step']",
    "4": "tr.pick",
    "5": "h2:has-text('Discarded groups, by what they cost')",
    "6": "svg[aria-label^='stages of steps']",
}
"""What each has, by the key that opens it."""


def look_at_every_panel(page: Page, wait_ms: float = WAIT_MS) -> None:
    for key, shown in PANELS.items():
        page.keyboard.press(key)
        expect(page.locator(f"main {shown}").first).to_be_visible(timeout=wait_ms)
        expect(page.get_by_role("alert")).to_have_count(0)


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """A tiny-async that is under way; its first event is there."""
    directory = tmp_path / "runs" / "live"
    command = [sys.executable, "-m", "penstock.cli", "train", "tiny-async", "--run-dir", str(directory)]
    settings = ["total_steps=400", "checkpoint_interval=10", "evaluator.eval_sample_num=16"]
    sets = [word for setting in settings for word in ("--set", setting)]
    with subprocess.Popen([*command, *sets], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step"):
                break
        (tmp_path / "pid").write_text(str(process.pid))
        try:
            yield directory
        finally:
            process.kill()


def test_the_page_follows_a_run_and_tells_when_its_driver_is_killed(page: Page, run_dir: Path) -> None:
    status = page.get_by_role("status")
    expect(status).to_contain_text("running")
    before = status.inner_text()
    expect(status).not_to_have_text(before, timeout=RUN_MS)
    expect(page.get_by_role("img", name="reward by train step")).to_be_visible()
    expect(page.get_by_role("cell", name="engine-0")).to_be_visible()
    look_at_every_panel(page, RUN_MS)
    chart = page.get_by_role("img", name=re.compile("^stages of steps"))
    for stage in ("sync", "pause"):
        expect(chart.locator("title", has_text=re.compile(f"^{stage}")).first).to_be_attached(timeout=RUN_MS)
    pid = int((run_dir.parents[1] / "pid").read_text())
    subprocess.run(["kill", "-9", str(pid)], check=True)
    expect(status).to_contain_text("killed", timeout=RUN_MS)
    look_at_every_panel(page)
    page.keyboard.press("1")
    expect(page.get_by_text("Its driver is gone. Nothing is lost")).to_be_visible()


BAD_RUN = """
from penstock import NativeJudgerConfig
from penstock.recipes.tiny import trainer as tiny


def always_half(response, label, extra_info):
    return None if label[0] == "a" else 0.5


task, judge = "manager.tasks.0", NativeJudgerConfig(reward_handler=always_half, max_retries=0)
trainer = tiny.replace(f"{task}.judger_config", judge).replace("evaluator", None)
trainer = trainer.replace(f"{task}.agent_loop_config.sample_params.max_tokens", 2)
trainer = trainer.replace(f"{task}.sampler_config.prompt_repeat_k", 4)
trainer = trainer.replace("total_steps", 4).replace("train_batch_size", 6)
"""


def test_a_run_whose_judge_abstains_and_whose_answers_are_cut_and_alike_says_so(
    browser: Browser, tmp_path: Path
) -> None:
    file = tmp_path / "bad.py"
    file.write_text(BAD_RUN)
    command = [sys.executable, "-m", "penstock.cli", "train", str(file), "--run-dir", str(tmp_path / "bad")]
    subprocess.run(command, check=True, timeout=RUN_MS / 1000)
    with served(tmp_path / "bad") as url:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(url)
        expect(page.get_by_role("status")).to_have_text("done, step 4 of 4")
        said = page.locator(".finding")
        expect(said).to_have_text(
            [
                re.compile(r"^alarmthe judge abstains: \d+ answers have no verdict$"),
                re.compile(r"^tip100 % of the groups have equal rewards and teach nothing: "),
                re.compile(r"^tip\d+ % of the answers were cut by max_tokens: "),
            ]
        )
        expect(page.locator(".tube", has_text="tokens/s")).to_have_count(3)
        page.keyboard.press("5")
        expect(page.get_by_role("row", name=re.compile("^unjudged")).first).to_be_visible()
        page.close()


def test_every_panel_of_a_run_that_ended_and_a_rollout_and_its_groups_story(browser: Browser) -> None:
    with demo_run() as directory, served(directory) as url:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(url)
        expect(page.get_by_role("status")).to_have_text("done, step 24 of 24")
        look_at_every_panel(page)
        page.goto(f"{page.url.partition('#')[0]}#run=demo&panel=rollouts&kind=train")
        page.locator("tr.pick", has_text="train").first.press("Enter")
        expect(page.locator(".tokens span[title]").first).to_be_visible()
        expect(page.locator(".turn.generate")).to_be_visible()
        page.get_by_role("button", name="The group's story").click()
        expect(page.get_by_text("Trained in step 24.")).to_be_visible()
        page.close()
