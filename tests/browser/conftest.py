"""The page in a real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Request, sync_playwright
from view_runs import make_run, served

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WAIT_MS = 20_000


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    assert path, "there is no chromium; `make test-browser` installs it, or: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    # In a thread of its own: Playwright's event loop runs in this one.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make_run, tmp_path / "runs" / "first").result()


@pytest.fixture
def url(run_dir: Path) -> Iterator[str]:
    with served(run_dir.parent) as address:
        yield address


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    """Every request must stay on this machine, and nothing may be written to the console as an error."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    elsewhere: list[str] = []
    errors: list[str] = []

    def look(request: Request) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "data:", "blob:")):
            elsewhere.append(request.url)

    page.on("request", look)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: (errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.goto(url)
    page.wait_for_selector("main section")
    yield page
    context.close()
    assert elsewhere == [] and errors == []
