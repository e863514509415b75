from __future__ import annotations

from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect
from view_runs import HOSTILE, step_events, tell

PANELS = ["Now", "Curves", "Batch", "Rollouts", "Why not trained", "Time"]


def open_panel(page: Page, name: str) -> None:
    page.get_by_role("navigation").get_by_role("button", name=name, exact=True).click()
    expect(page.locator("nav button[aria-current=page]")).to_have_text(name)


def test_now_shows_the_pipe_and_that_the_driver_is_gone(page: Page) -> None:
    expect(page.get_by_role("status")).to_have_text("killed, step 2 of 4")
    expect(page.get_by_text("Its driver is gone. Nothing is lost")).to_be_visible()
    expect(page.locator(".pipe .stage", has_text="trained").first).to_contain_text("1")
    expect(page.get_by_text("something odd")).to_be_visible()


def test_the_page_follows_a_run_without_being_loaded_again(page: Page, run_dir: Path) -> None:
    page.evaluate("window.same = true")
    tell(run_dir, *step_events(3))
    expect(page.get_by_role("status")).to_contain_text("step 3 of 4")
    assert page.evaluate("window.same") is True


def test_curves_are_drawn_and_can_be_had_as_files(page: Page) -> None:
    open_panel(page, "Curves")
    expect(page.get_by_role("img", name="Reward by train step")).to_be_visible()
    with page.expect_download() as csv:
        page.get_by_role("button", name="Reward as CSV").click()
    assert csv.value.path().read_text().splitlines() == ["run,step,value", '"first",1,0.1', '"first",2,0.2']
    with page.expect_download() as png:
        page.get_by_role("button", name="Reward as PNG").click()
    assert png.value.path().read_bytes().startswith(b"\x89PNG")


def test_a_rollout_is_found_by_its_words_and_a_hostile_answer_stays_text(page: Page) -> None:
    open_panel(page, "Rollouts")
    page.get_by_role("searchbox", name="text").fill("alert")
    page.get_by_role("button", name="Find").click()
    page.get_by_role("cell", name="sums:0:1").click()
    expect(page.get_by_role("heading", name="sums:0:1")).to_be_visible()
    expect(page.locator(".turn.generate")).to_contain_text(HOSTILE)
    expect(page.locator(".turn.tool")).to_contain_text("42")
    assert page.locator("main script, main img").count() == 0
    expect(page.locator(".siblings button")).to_have_count(2)
    assert page.locator(".tokens span").count() > len(HOSTILE)


def test_what_was_not_trained_tells_its_story(page: Page) -> None:
    open_panel(page, "Why not trained")
    expect(page.get_by_role("cell", name="retries exhausted").first).to_be_visible()
    page.get_by_role("cell", name="sums:1", exact=True).click()
    expect(page.get_by_text("Not trained: discarded, retries_exhausted")).to_contain_text("the engine said nothing")


def test_batch_and_time_are_drawn(page: Page) -> None:
    page.goto(page.url.partition("#")[0] + "#run=first&panel=batch&step=1")
    expect(page.get_by_role("img", name="the groups of train step 1")).to_be_visible()
    open_panel(page, "Time")
    expect(page.get_by_role("img", name="stages of steps 1 to 2")).to_be_visible()


def test_the_keyboard_is_enough(page: Page) -> None:
    page.keyboard.press("2")
    expect(page.locator("nav button[aria-current=page]")).to_have_text("Curves")
    before = page.evaluate("document.documentElement.dataset.theme")
    page.keyboard.press("d")
    assert page.evaluate("document.documentElement.dataset.theme") != before


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_panel_is_accessible_and_no_wider_than_its_screen(page: Page, theme: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.evaluate(f"localStorage.setItem('penstock-theme', '{theme}')")
    page.reload()
    for panel in PANELS:
        open_panel(page, panel)
        page.wait_for_selector("main .place > *")
        found = Axe().run(page).response["violations"]
        bad = [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]
        assert bad == [], panel
        assert page.evaluate("document.documentElement.scrollWidth") <= width, panel
