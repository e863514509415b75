from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect
from view_runs import (
    HOSTILE,
    branched_group,
    draw_group,
    group_of,
    play_over_restarts,
    restart,
    saved_in,
    step_events,
    tell,
    tell_of_sync,
)

from penstock.events import ArithmeticChosen, EngineChanged
from penstock.replay import DiscardReason, ReplayBuffer

PANELS = ["Now", "Curves", "Batch", "Rollouts", "Why not trained", "Time"]


def open_panel(page: Page, name: str) -> None:
    page.get_by_role("navigation").get_by_role("button", name=name, exact=True).click()
    expect(page.locator("nav button[aria-current=page]")).to_have_text(name)


def test_now_shows_the_pipe_and_that_the_driver_is_gone(page: Page) -> None:
    expect(page.get_by_role("status")).to_have_text("killed, step 2 of 4")
    expect(page.get_by_text("Its driver is gone. Nothing is lost")).to_be_visible()
    expect(page.locator(".pipe .tank", has_text="trained")).to_contain_text("1")
    expect(page.get_by_text("something odd")).to_be_visible()


def test_now_tells_the_arithmetic_and_what_flows_into_each_part_of_the_pipe(page: Page, run_dir: Path) -> None:
    trained = {"trained_tokens": 200.0, "staleness/masked_tokens": 40.0, "length/masked_tokens": 10.0}
    made = {"produce/rollouts": 16.0, "tokens/generated": 400.0, "tokens/wasted": 60.0}
    tell(run_dir, ArithmeticChosen(train="float32", cpu="a CPU"))
    tell(run_dir, *step_events(3, **made, **trained, **{"time/step_s": 2.0}))
    expect(page.locator(".tube")).to_have_text(["8 rollouts/s", "200 tokens/s", "125 tokens/s", "100 tokens/s"])
    expect(page.get_by_text("beside the pipe, 30 tokens/s lost:")).to_be_visible()
    expect(page.get_by_text("arithmetic: training float32, on a CPU")).to_be_visible()
    expect(page.get_by_role("row", name=re.compile("engine-0"))).to_contain_text("120")


def test_what_flows_in_a_run_of_several_tasks_is_told_of_all_together(page: Page, run_dir: Path) -> None:
    restart(run_dir, lambda buffer: draw_group(buffer, group_of(0, task="words")), after_s=100)
    tell(run_dir, *step_events(3, **{"time/step_s": 2.0}))
    pipes = page.locator("section:has(> .pipe)")
    expect(pipes.locator("h2")).to_have_text(["Groups of all tasks", "Groups of sums", "Groups of words"])
    expect(pipes.first.locator(".tank").first).to_have_text("4drawn")
    expect(pipes.first).to_contain_text("50 tokens/s")
    expect(pipes.last).not_to_contain_text("tokens/s")


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


def test_the_length_of_what_was_dropped_is_said_beside_that_of_what_was_trained(page: Page, run_dir: Path) -> None:
    def drop(buffer: ReplayBuffer) -> None:
        long = group_of(3, 3 * HOSTILE)
        draw_group(buffer, long)
        buffer.discard(long, "sums", DiscardReason.FILTERED, train_step=2)

    restart(run_dir, drop, after_s=100)
    open_panel(page, "Why not trained")
    row = page.get_by_role("row", name=re.compile("^filtered"))
    expect(row).to_contain_text("3 times as long as what was trained: long answers are lost")
    row = page.get_by_role("row", name=re.compile("^retries exhausted")).first
    expect(row).to_contain_text("0.093 times as long as what was trained: short or unfinished answers are lost")


def test_a_story_goes_over_attempts_and_a_restart_of_the_driver(page: Page, run_dir: Path) -> None:
    play_over_restarts(run_dir)
    page.goto(page.url.partition("#")[0] + "#run=first&panel=untrained&group=sums:3")
    expect(page.get_by_text("played 3 times, over 1 restart of the driver")).to_be_visible()
    rows = page.locator("main tbody tr")
    told = ["running", "aborted", "running", "the driver was restarted, from checkpoint 1", "aborted", "running"]
    expect(rows.locator("td:nth-child(2)")).to_have_text([*told, "completed", "leased", "trained"])
    expect(rows.first).to_contain_text("+0.0 s")
    chart = page.get_by_role("img", name="the story of sums:3")
    expect(chart.locator("text", has_text="restarts")).to_be_visible()
    expect(page.locator(".legend")).to_have_text(re.compile("running.*completed.*leased.*aborted"))


def test_a_rollout_of_several_segments_is_read_segment_by_segment(page: Page, run_dir: Path) -> None:
    saved_in(run_dir).save_step(2, [branched_group(3)], {})
    page.goto(page.url.partition("#")[0] + "#run=first&panel=rollouts&id=sums:3:0&kind=train&step=2")
    expect(page.get_by_text("segment 0, after the prompt")).to_be_visible()
    expect(page.get_by_text("segment 1, after 3 tokens of segment 0")).to_be_visible()
    expect(page.locator(".turn.generate")).to_contain_text(["5 tokens, stop, segment 0", "5 tokens, stop, segment 1"])
    page.get_by_role("combobox", name="colour tokens by").select_option("model_steps")
    first, second = page.locator("main .tokens:has(> [title])").all()
    expect(first.locator("span")).to_have_count(6)
    expect(second.locator("span")).to_have_count(5)
    expect(second.locator("span").first).to_have_attribute("title", re.compile("weights 1,"))


def test_time_draws_syncs_and_the_pauses_in_them_as_spans_of_their_own(page: Page, run_dir: Path) -> None:
    tell_of_sync(run_dir, 3)
    page.goto(page.url.partition("#")[0] + "#run=first&panel=time")
    chart = page.get_by_role("img", name="stages of steps 1 to 3")
    expect(chart.locator("title", has_text=re.compile("^sync"))).to_have_text(["sync of step 3, 4.0 s"])
    expect(chart.locator("title", has_text=re.compile("^pause"))).to_have_text(["pause, 2.0 s"])
    sync, pause = (
        chart.locator(f"rect:has(> title:text-matches('^{name}'))").bounding_box() for name in ("sync", "pause")
    )
    assert sync is not None and pause is not None
    assert sync["x"] < pause["x"] < pause["x"] + pause["width"] < sync["x"] + sync["width"] and sync["y"] < pause["y"]
    seconds = page.locator(".shares span", has_text=re.compile("^pause$"))
    expect(seconds).to_be_visible()


def test_a_batch_has_a_lane_for_each_rollout_and_time_is_drawn(page: Page) -> None:
    page.goto(page.url.partition("#")[0] + "#run=first&panel=batch&step=1")
    expect(page.get_by_role("img", name="the rollouts of train step 1")).to_be_visible()
    lanes = page.locator("main g.pick")
    expect(lanes).to_have_count(2)
    told = lanes.first.locator("title").all_text_contents()
    assert told == [
        "sums:0:0: waits for its turn, 0.1 s",
        "sums:0:0: waits for its turn, 0.1 s",
        "sums:0:0: generated by weights 0, 0.3 s",
        "sums:0:0: at a tool, 0.2 s",
        "sums:0:0: judged, 0.1 s",
        "sums:0:0: waits for its siblings, 0.2 s",
        "sums:0:0: waits in the buffer, 1.0 s",
        "sums:0:0: being trained, 1.0 s",
    ]
    page.get_by_role("button", name="by group").click()
    expect(page.get_by_role("img", name="the groups of train step 1")).to_be_visible()
    open_panel(page, "Time")
    expect(page.get_by_role("img", name="stages of steps 1 to 2")).to_be_visible()


def test_siblings_are_read_side_by_side_the_best_first(page: Page) -> None:
    page.goto(page.url.partition("#")[0] + "#run=first&panel=rollouts&id=sums:0:0&kind=train&step=1")
    expect(page.get_by_text("reward: right")).to_be_visible()
    page.get_by_role("button", name="Side by side").click()
    expect(page.locator(".beside section")).to_have_count(2)
    expect(page.locator(".beside section").first).to_contain_text("reward 1")
    expect(page.locator(".beside section").last.locator(".turn.generate")).to_contain_text(HOSTILE)
    page.get_by_role("button", name="sums:0:1").click()
    page.get_by_role("button", name="The group's story").click()
    expect(page.get_by_role("img", name="the story of sums:0")).to_be_visible()
    expect(page.get_by_text("Trained in step 1.")).to_be_visible()


def test_a_bar_of_the_histogram_is_a_filter(page: Page) -> None:
    open_panel(page, "Rollouts")
    rows = page.locator("tr.pick")
    expect(rows).to_have_count(2)
    page.get_by_role("button", name="reward 0.95 to 1: 1 rollouts").press("Enter")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("sums:0:1")
    page.get_by_role("button", name="every reward").click()
    expect(rows).to_have_count(2)


def test_tokens_are_coloured_by_what_was_recorded(page: Page) -> None:
    page.goto(page.url.partition("#")[0] + "#run=first&panel=rollouts&id=sums:0:1&kind=train&step=1")
    token = page.locator(".tokens span[title]").first
    expect(token).to_have_attribute("title", re.compile(r"weights 0, logprob -0.5, trainer -0.25"))
    for by in ("mask", "logprobs", "difference", "model_steps", "advantage"):
        page.get_by_role("combobox", name="colour tokens by").select_option(by)
        colour = token.evaluate("one => getComputedStyle(one).backgroundColor")
        assert colour not in ("transparent", "rgba(0, 0, 0, 0)"), by


def test_curves_zoom_smooth_and_lie_over_those_of_other_runs(page: Page, run_dir: Path) -> None:
    for step in range(3, 30):
        tell(run_dir, *step_events(step))
    shutil.copytree(run_dir, run_dir.parent / "second")
    page.reload()
    page.keyboard.press("2")
    chart = page.get_by_role("img", name="Reward by train step")
    expect(chart).to_be_visible()
    page.get_by_role("slider", name="smoothing").fill("0.9")
    expect(chart.locator("path.faint")).to_have_count(1)
    other = page.get_by_role("checkbox")
    other.check()
    expect(chart.locator("path.curve:not(.faint)")).to_have_count(2)
    box = chart.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 50)
    page.mouse.up()
    expect(page.get_by_role("button", name="see all steps")).to_be_visible()
    chart.dblclick()
    expect(page.get_by_role("button", name="see all steps")).to_be_hidden()


def test_alarms_are_said_on_the_first_panel_before_tips(page: Page, run_dir: Path) -> None:
    bad = {"train/mismatch/k3_kl": 0.5, "length/truncated_share": 0.9, "reward/equal_group_share": 0.8}
    for step in range(3, 8):
        tell(run_dir, *step_events(step, **bad))
    tell(run_dir, EngineChanged(engine="engine-1", state="fenced", reason="it died"))
    found = page.locator(".finding")
    expect(found).to_have_count(5)  # and that the driver is gone
    said = found.all_inner_texts()
    assert ["alarm" in one.lower() for one in said] == [True, True, True, False, False]
    assert "engine engine-1 is fenced: it died" in said[1] and "mismatch KL is 0.5" in said[2]
    expect(page.get_by_role("row", name=re.compile("engine-0"))).to_contain_text("75 %")


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
