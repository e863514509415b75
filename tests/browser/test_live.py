"""The page beside a real run: while it trains, when it was killed, when it ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

RUN_MS = 180_000


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """A tiny-async that is under way; its first event is there."""
    directory = tmp_path / "runs" / "live"
    command = [sys.executable, "-m", "penstock.cli", "train", "tiny-async", "--run-dir", str(directory)]
    settings = ["--set", "total_steps=400", "--set", "checkpoint_interval=10"]
    with subprocess.Popen([*command, *settings], stdout=subprocess.PIPE, text=True) as process:
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
    page.keyboard.press("6")
    expect(page.get_by_role("img", name="stages of steps")).to_be_visible(timeout=RUN_MS)
    pid = int((run_dir.parents[1] / "pid").read_text())
    subprocess.run(["kill", "-9", str(pid)], check=True)
    expect(status).to_contain_text("killed", timeout=RUN_MS)
    page.keyboard.press("1")
    expect(page.get_by_text("Its driver is gone. Nothing is lost")).to_be_visible()
