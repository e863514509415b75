from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from penstock.events import (
    EngineChanged,
    EngineSeen,
    EvaluationDone,
    RunBegan,
    StageBegan,
    StageEnded,
    StepTrained,
    TaskProgress,
)
from penstock.trainer.picture import LiveDisplay, sparkline

METRICS = {
    "reward/mean": 0.4125,
    "time/produce_s": 1.2,
    "time/prepare_s": 0.1,
    "time/train_s": 0.7,
    "time/checkpoint_s": 0.2,
    "time/sync_s": 0.1,
    "time/eval_s": 0.1,
    "time/step_s": 2.1,
    "tokens/generated_per_s": 3425.0,
    "tokens/trained_per_s": 26_700.0,
    "train/loss": 0.0032,
    "train/grad_norm": 0.2,
    "staleness/mean": 0.5,
}


class Watch:
    """A clock that somebody else turns."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def make(watch: Watch | None = None, total_steps: int = 80) -> LiveDisplay:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    display = LiveDisplay(console, watch or Watch())
    display.notice(RunBegan(run_name="quickstart", model="tiny", total_steps=total_steps))
    return display


def shown(display: LiveDisplay, width: int = 80, encoding: str = "utf-8") -> list[str]:
    """The picture's lines in a terminal of this width."""
    raw = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    console = Console(file=raw, width=width, color_system=None, force_terminal=True)
    console.print(display)
    raw.flush()
    assert isinstance(raw.buffer, io.BytesIO)
    return raw.buffer.getvalue().decode(encoding).splitlines()


def half_way(display: LiveDisplay, task: str = "reverse", metrics: dict[str, float] | None = None) -> None:
    display.notice(EvaluationDone(model_step=0, metrics={"eval/accuracy": 0.372, "eval/greedy_accuracy": 0.41}))
    for step in range(1, 41):
        display.notice(StageBegan(stage="step", train_step=step))
        display.notice(StepTrained(train_step=step, metrics={**METRICS, "reward/mean": step / 40, **(metrics or {})}))
    display.notice(EvaluationDone(model_step=25, metrics={"eval/accuracy": 0.978, "eval/greedy_accuracy": 1.0}))
    display.notice(StageBegan(stage="produce", train_step=41))
    display.notice(TaskProgress(task=task, done=9, due=16, tokens=300, pending=8, expired=2))


def test_in_80_columns_every_row_is_one_line_and_says_what_matters() -> None:
    display = make()
    half_way(display)
    title, run, reward, evaluated, spent, now, task = shown(display)
    assert title == "quickstart: tiny"
    assert "40/80  about 0 s left  produce 0 s  0 s so far" in run
    assert "1.000  first 0.025  best 1.000" in reward
    assert evaluated.endswith("step 25  accuracy 97.8 %  greedy 100.0 %  (step 0: 37.2 %, 41.0 %)")
    assert "produce 50 %  prepare 4 %  train 29 %" in spent
    assert now.endswith("loss 0.0032  grad 0.20  staleness 0.5  3425 tokens/s generated")
    assert "reverse  9/16 groups  3000 tokens/s  8 pending  2 expired" in task
    display.close()


def test_what_became_of_the_groups_and_who_waits_has_its_rows() -> None:
    display = make()
    flow = {"produce/groups": 6.0, "produce/reverse/discarded/filtered": 2.0, "produce/reverse/leftover/completed": 3.0}
    tokens = {"tokens/generated": 200.0, "tokens/wasted": 50.0, "share/trainer_wait": 0.31, "share/engine_idle": 0.44}
    for step in (1, 2):
        display.notice(StepTrained(train_step=step, metrics={**METRICS, **flow, **tokens}))
    said = {line[:10].strip(): line[10:] for line in shown(display)}
    assert said["groups"] == "12 trained  4 discarded (filtered 4)  3 wait (ready 3)"
    assert said["pipe"] == "trainer waits 31 %  engines idle 44 %  25 % of all tokens wasted"
    assert all(len(line) <= 40 for line in shown(display, 40))
    display.close()


def test_engines_and_what_is_wrong_are_said_in_words_as_on_the_page() -> None:
    watch = Watch()
    display = make(watch)
    for name, busy in (("engine-0", 0.5), ("engine-1", 0.7)):
        display.notice(EngineChanged(engine=name, state="active"))
        display.notice(EngineSeen(engine=name, model_step=4, running=3, waiting=1, busy=busy, tokens_per_s=100.0))
    assert "engines   2 of 2 serve  weights 4  busy 60 %  6 running  2 wait  200 tokens/s" in shown(display)
    display.notice(EngineChanged(engine="engine-1", state="fenced", reason="it died"))
    cut = {"length/truncated_share": 0.5}
    for step in (1, 2, 3):
        display.notice(StepTrained(train_step=step, metrics={**METRICS, **cut}))
    watch.now += 2.0
    lines = shown(display)
    assert "engines   engine-1 is fenced: it died  1 of 2 serve  weights 4  busy 50 %" in [line[:73] for line in lines]
    assert "alarm     engine engine-1 is fenced: it died" in lines
    place = lines.index("tip       50 % of the answers were cut by max_tokens: raise it, or shape their")
    assert lines[place + 1] == "          reward"
    assert all(len(line) <= 40 for line in shown(display, 40))
    display.close()


def test_a_stage_that_hangs_is_an_alarm_though_nothing_happens() -> None:
    watch = Watch()
    display = make(watch)
    for step in (1, 2, 3, 4):
        display.notice(StageBegan(stage="train", train_step=step))
        watch.now += 2.0
        if step < 4:
            display.notice(StageEnded(stage="train", train_step=step, seconds=2.0))
    assert not any(line.startswith("alarm") for line in shown(display))
    watch.now += 58.0
    assert "alarm     train has taken 60 s; it usually takes 2.0 s" in shown(display)
    display.close()


@given(
    st.integers(1, 200),
    st.integers(1, 10**9),
    st.text(st.characters(exclude_categories=("C",)), max_size=60),
    st.dictionaries(st.sampled_from(sorted(METRICS)), st.floats(allow_nan=True, allow_infinity=True)),
)
def test_no_row_is_ever_wider_than_the_terminal(
    width: int, total_steps: int, task: str, metrics: dict[str, float]
) -> None:
    display = make(total_steps=total_steps)
    display.notice(EvaluationDone(model_step=10**6, metrics={"eval/" + task: 1e300}))
    half_way(display, task, metrics)
    lines = shown(display, width)
    assert len(lines) in (6, 7)  # without a second spent there is no row of seconds
    assert all(cell_len(line) <= width for line in lines)
    display.close()


def test_a_terminal_without_blocks_has_a_picture_in_its_own_letters() -> None:
    display = make()
    half_way(display)
    lines = shown(display, 120, encoding="ascii")
    assert len(lines) == 7 and "?" not in "".join(lines)
    assert "#######----" in lines[1] and "_" in lines[2] and "#" in lines[4]
    display.close()


def test_what_is_left_counts_neither_the_first_evaluation_nor_the_steps_before_a_resume() -> None:
    watch = Watch()
    display = make(watch, total_steps=14)
    display.notice(StageBegan(stage="eval", lane="evaluation"))
    watch.now += 1000.0
    display.notice(EvaluationDone(model_step=4, metrics={"eval/accuracy": 0.5}))
    display.notice(StepTrained(train_step=4, metrics=METRICS))  # of the checkpoint, told again
    assert not any("left" in line for line in shown(display))
    for step in (5, 6):
        display.notice(StageBegan(stage="step", train_step=step))
        watch.now += 3.0
        display.notice(StepTrained(train_step=step, metrics=METRICS))
    assert "6/14  about 24 s left" in shown(display)[1]
    watch.now += 2.0
    assert "6/14  about 22 s left" in shown(display)[1]
    watch.now += 100.0
    assert "6/14  about 0 s left" in shown(display)[1]
    display.close()


def test_what_is_loaded_or_scanned_is_said_with_its_seconds() -> None:
    watch = Watch()
    display = LiveDisplay(Console(file=io.StringIO(), force_terminal=True, width=80), watch)
    display.notice(StageBegan(stage="scan", detail="20,000 rows"))
    assert shown(display) == ["scan 20,000 rows 0 s"]
    display.notice(StageBegan(stage="load", detail="the weights of smollm2-135m"))
    watch.now += 20.0
    assert shown(display) == ["load the weights of smollm2-135m 20 s"]
    display.close()


def test_a_task_has_a_bar_while_its_batch_is_produced_and_none_afterwards() -> None:
    display = make()
    display.stage("produce")
    display.progress("addition", 4, 8, tokens=300.0, pending=4, expired=0)
    assert "addition  4/8 groups" in shown(display, 120)[-1]
    display.stage("train")
    assert not any("addition" in line for line in shown(display))
    display.close()


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=200), st.integers(1, 64))
def test_a_sparkline_never_fails_and_never_outgrows_its_width(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) <= width


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [([0.0, 0.5, 1.0], 10, "▁▅█"), ([float(i) for i in range(16)], 8, "▁▂▃▄▅▆▇█")],
)
def test_a_rising_curve_rises(values: list[float], width: int, line: str) -> None:
    assert sparkline(values, width) == line
