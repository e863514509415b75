from __future__ import annotations

import io
import math
import threading
from typing import TextIO, cast

import pytest
from rich.console import Console

from penstock.events import (
    EngineChanged,
    EvaluationDone,
    Note,
    RunBegan,
    RunEnded,
    StageBegan,
    StageEnded,
    StepGivenBack,
    StepTrained,
    TaskProgress,
    Warned,
)
from penstock.trainer.display import Display, PlainDisplay, make_display
from penstock.trainer.lines import count, duration
from penstock.trainer.output import MAX_WAITING, Output
from penstock.trainer.picture import LiveDisplay

METRICS = {
    "reward/mean": 0.4125,
    "time/produce_s": 1.2,
    "time/prepare_s": 0.01,
    "time/train_s": 0.7,
    "time/step_s": 2.1,
    "tokens/generated_per_s": 310.0,
    "tokens/trained_per_s": 25_000.0,
    "train/loss": 0.0021,
    "train/grad_norm": 1.3,
    "staleness/mean": 0.0,
}


def run(display: Display, metrics: dict[str, float]) -> None:
    display.notice(RunBegan(run_name="quickstart", model="tiny", total_steps=2))
    display.notice(EvaluationDone(model_step=0, metrics={"eval/accuracy": 0.31, "eval/greedy_accuracy": 0.42}))
    for step in (1, 2):
        display.notice(StageBegan(stage="produce", train_step=step))
        display.notice(TaskProgress(task="addition", done=4, due=8, tokens=300, pending=4, expired=1))
        display.notice(StageBegan(stage="train", train_step=step))
        display.notice(StageEnded(stage="train", train_step=step, seconds=0.7))
        display.notice(StepTrained(train_step=step, metrics=metrics))
    display.notice(Note(text="checkpoint kept"))
    display.notice(StepGivenBack(train_step=3, reason="the loss is nan"))
    display.notice(EngineChanged(engine="engine-0", state="active", reason="well"))
    display.notice(EngineChanged(engine="engine-0", state="fenced", reason="it died"))
    display.notice(EngineChanged(engine="engine-0", state="active"))
    display.notice(EngineChanged(engine="engine-0", state="fenced", reason="closed"))
    display.notice(Warned(text="the disk is slow"))
    display.notice(EvaluationDone(model_step=2, metrics={"eval/accuracy": 0.9}))
    summary = {"run_directory": "runs/quickstart", "greedy": None, "accuracy": 0.9}
    display.notice(RunEnded(steps=2, summary=summary))
    display.close()
    display.close()


def live(width: int = 120) -> tuple[LiveDisplay, io.StringIO]:
    out = io.StringIO()
    return LiveDisplay(Console(file=out, force_terminal=True, width=width, color_system=None)), out


def test_without_a_terminal_each_step_and_each_evaluation_is_one_line() -> None:
    out = io.StringIO()
    run(PlainDisplay(out), METRICS)
    assert out.getvalue().splitlines() == [
        "quickstart: tiny: 2 steps",
        "eval after step 0  accuracy 31.0 %  greedy 42.0 %",
        *(
            f"step {step}/2  reward 0.412  loss 0.0021  grad 1.30  2.1 s (produce 1.2, train 0.7)"
            "  310 tokens/s generated  25.0k tokens/s trained"
            for step in (1, 2)
        ),
        "checkpoint kept",
        "train step 3 refused: the loss is nan",
        "engine-0 is fenced: it died",
        "engine-0 is active",
        "warning: the disk is slow",
        "eval after step 2  accuracy 90.0 %",
        "  run directory  runs/quickstart",
        "  accuracy       0.9",
    ]


def test_without_a_terminal_what_is_loaded_is_said_once() -> None:
    out = io.StringIO()
    display = PlainDisplay(out)
    for detail in ("tiny, libraries first", "the weights of tiny", "the engine of tiny"):
        display.notice(StageBegan(stage="load", detail=detail))
    display.notice(StageBegan(stage="scan", detail="400 rows"))
    assert out.getvalue() == "load tiny, libraries first\n"


def test_a_stage_before_the_run_begins_is_shown_and_does_not_stay() -> None:
    display, out = live()
    display.notice(StageBegan(stage="load", detail="the weights"))
    display.close()
    assert "load the weights 0 s" in out.getvalue()
    assert out.getvalue().endswith("\x1b[1A\x1b[2K")


@pytest.mark.parametrize("metrics", [{}, {"reward/mean": math.nan}, {"time/step_s": 0.0, "time/train_s": 0.0}])
def test_missing_and_odd_metrics_are_simply_not_shown(metrics: dict[str, float]) -> None:
    run(PlainDisplay(io.StringIO()), metrics)
    run(live()[0], metrics)


def test_the_cursor_is_given_back_when_a_run_ends_with_an_error() -> None:
    display, out = live()
    display.start("quickstart", 2)
    display.close()
    assert out.getvalue().endswith("\x1b[?25h")


class Hung(io.StringIO):
    """A terminal whose user has left."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_that_is_gone_is_said_by_notice_and_nothing_else_raises(terminal: bool) -> None:
    output = Output(Hung())
    out = cast(TextIO, output)
    display = LiveDisplay(Console(file=out, force_terminal=True)) if terminal else PlainDisplay(out)
    display.note("hello")
    output.drain()
    with pytest.raises(OSError, match="Input/output error"):
        display.notice(Note(text="hello"))
    display.close()


def test_a_closed_output_is_said_like_a_broken_one() -> None:
    stream = io.StringIO()
    output = Output(stream)
    display = PlainDisplay(cast(TextIO, output))
    stream.close()
    display.note("hello")
    output.drain()
    with pytest.raises(ValueError, match="closed"):
        display.notice(Note(text="hello"))


def test_a_process_without_any_output_has_a_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    run(make_display(terminal=False), METRICS)


@pytest.mark.parametrize("terminal", [False, True])
def test_letters_that_a_terminal_does_not_have_are_replaced(terminal: bool) -> None:
    raw = io.BytesIO()
    out = cast(TextIO, Output(io.TextIOWrapper(raw, encoding="ascii", write_through=True)))
    display = LiveDisplay(Console(file=out, force_terminal=True, width=120)) if terminal else PlainDisplay(out)
    display.notice(Note(text="größer"))
    run(display, METRICS)
    display.close()
    assert b"gr??er" in raw.getvalue()


class Unread(io.StringIO):
    """A terminal whose user pressed Ctrl-S."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = threading.Event()

    def write(self, text: str) -> int:
        self.reads.wait()
        return super().write(text)


def test_nobody_waits_for_a_reader_that_has_stopped_and_what_waits_keeps_its_order() -> None:
    stream = Unread()
    output = Output(stream)
    display = PlainDisplay(cast(TextIO, output))
    written = 2 * MAX_WAITING
    for number in range(written):
        display.notice(Note(text=str(number)))
    output.drain(timeout_s=0.01)
    assert stream.getvalue() == ""
    stream.reads.set()
    display.close()
    lines = [int(line) for line in stream.getvalue().splitlines()]
    assert lines == list(range(len(lines)))
    assert MAX_WAITING <= len(lines) < written


def test_numbers_are_written_for_people() -> None:
    assert [count(9_999), count(25_012), count(3.2e6)] == ["9999", "25.0k", "3.2M"]
    assert [duration(9), duration(61), duration(3_720)] == ["9 s", "1 min 01 s", "1 h 02 min"]
