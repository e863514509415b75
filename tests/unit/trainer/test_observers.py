from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest

from penstock.events import (
    ActorLost,
    ActorRecovered,
    BatchTaken,
    EngineChanged,
    EngineSeen,
    EvaluationDone,
    Event,
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
from penstock.trainer.observers import EventFile, Observers, read_events
from penstock.trainer.summary import SummarySink


class Notebook:
    def __init__(self, *, fails_at: int | None = None) -> None:
        self.events: list[Event] = []
        self.closed = False
        self._fails_at = fails_at

    def notice(self, event: Event) -> None:
        self.events.append(event)
        if len(self.events) == self._fails_at:
            raise OSError("the terminal is gone")

    def close(self) -> None:
        self.closed = True


def notes(notebook: Notebook) -> list[str]:
    return [event.text for event in notebook.events if isinstance(event, Note)]


def test_every_sink_is_told_every_event_in_order() -> None:
    first, second = Notebook(), Notebook()
    observers = Observers(first=first, second=second)
    for text in "abc":
        observers.notice(Note(text=text))
    assert notes(first) == notes(second) == ["a", "b", "c"]
    observers.close()
    assert first.closed and second.closed


def test_a_sink_that_raises_is_dropped_said_once_and_the_others_go_on() -> None:
    broken, fine = Notebook(fails_at=2), Notebook()
    observers = Observers(display=broken, fine=fine)
    for text in "abcd":
        observers.notice(Note(text=text))
    assert notes(broken) == ["a", "b"] and notes(fine) == ["a", "b", "c", "d"]
    [said] = [event for event in fine.events if isinstance(event, Warned)]
    assert said.source == "display" and "the terminal is gone" in said.text
    observers.close()
    assert fine.closed


def test_all_sinks_may_fail() -> None:
    observers = Observers(a=Notebook(fails_at=1), b=Notebook(fails_at=1))
    observers.notice(Note(text="hello"))
    observers.notice(Note(text="nobody"))
    observers.close()


def test_a_sink_that_comes_late_is_told_what_it_missed() -> None:
    observers, late = Observers(), Notebook()
    observers.notice(Note(text="loading"))
    observers.notice(TaskProgress(task="sums", done=1, due=2))
    observers.add("late", late)
    observers.notice(Note(text="loaded"))
    assert late.events == [Note(text="loading"), Note(text="loaded")]


def test_what_is_logged_and_what_python_warns_of_is_told() -> None:
    notebook = Notebook()
    observers = Observers(notebook=notebook)
    with observers.warnings(), warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.getLogger("penstock.produce").warning("a group waits")
        logging.getLogger("penstock.produce").info("nothing new")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    logging.getLogger("penstock").warning("after the run")
    assert notebook.events == [
        Warned(text="a group waits", source="penstock.produce"),
        Warned(text="old", source="DeprecationWarning"),
    ]


def test_events_are_read_back_as_they_were_told(tmp_path: Path) -> None:
    told = [
        RunBegan(run_name="run", model="tiny", total_steps=3),
        StageBegan(stage="produce", train_step=1),
        StageEnded(stage="produce", seconds=1.5, train_step=1),
        BatchTaken(train_step=1, groups=4, status="normal", staleness={"sums": {0: 3, 1: 1}}),
        StepTrained(train_step=1, metrics={"reward/mean": 1.0}),
        EvaluationDone(model_step=1, metrics={"eval/accuracy": 0.5}),
        RunEnded(steps=1, interrupted=True, summary={"steps": 1, "error": None}),
    ]
    file = EventFile(tmp_path / "events.jsonl")
    for event in (*told[:2], TaskProgress(task="sums", done=1, due=2), *told[2:]):
        file.notice(event)
    file.close()
    read = list(read_events(tmp_path / "events.jsonl"))
    assert [kept.event for kept in read] == told
    moments = [kept.at for kept in read]
    assert moments == sorted(moments) and all(kept.time > 1e9 for kept in read)


def test_how_an_engine_does_is_kept_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    file = EventFile(tmp_path / "events.jsonl")
    for step in range(12):
        file.notice(EngineSeen(engine="engine-0", model_step=step))
        file.notice(EngineSeen(engine="engine-1", model_step=step))
        now += 2.0
    file.close()
    kept = [kept.event for kept in read_events(tmp_path / "events.jsonl")]
    assert kept == [EngineSeen(engine=f"engine-{n}", model_step=step) for step in (0, 5, 10) for n in (0, 1)]


def test_a_resumed_run_appends_and_its_seconds_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    clock = iter([100.0, 130.0, 5.0, 6.0])  # another process, another monotonic clock
    monkeypatch.setattr("penstock.trainer.observers.time.monotonic", lambda: next(clock))
    wall = iter([2e9, 1e9])  # and a wall clock that was set back
    monkeypatch.setattr("penstock.trainer.observers.time.time", lambda: next(wall))
    for text in ("before", "after"):
        file = EventFile(path)
        file.notice(Note(text=text))
        file.close()
    assert [(kept.at, kept.time) for kept in read_events(path)] == [(30.0, 2e9), (31.0, 1e9)]


def test_a_line_that_a_kill_tore_costs_that_line_only(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    file = EventFile(path)
    file.notice(Note(text="whole"))
    file.close()
    path.write_bytes(path.read_bytes() + b'{"time": 1.0, "sec')
    file = EventFile(path)
    file.notice(Note(text="after the kill"))
    file.close()
    assert [kept.event for kept in read_events(path)] == [Note(text="whole"), Note(text="after the kill")]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_event_file_on_a_full_disk_is_dropped_and_the_run_is_still_shown(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    shown = Notebook()
    observers = Observers(shown=shown)
    observers.add("events.jsonl", EventFile(tmp_path / "events.jsonl"))
    observers.notice(Note(text="hello"))
    observers.close()
    assert notes(shown) == ["hello"]
    assert "No space left" in next(event.text for event in shown.events if isinstance(event, Warned))


def test_a_text_that_is_no_unicode_is_kept_with_escapes(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "events.jsonl")
    file.notice(Warned(text="no such file: b\udcff.txt", source="é"))
    file.notice(Note(text="next"))
    file.close()
    first, second = (kept.event for kept in read_events(tmp_path / "events.jsonl"))
    assert first == Warned(text="no such file: b\\udcff.txt", source="é")
    assert second == Note(text="next")


class Moments:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


LOST = ActorLost(actor="judger-0", reason="killed")
BACK = ActorRecovered(actor="judger-0", seconds=1.0)
FENCED = EngineChanged(engine="engine-0", state="fenced", reason="died")
ACTIVE = EngineChanged(engine="engine-0", state="active", reason="well")
LEFT = EngineChanged(engine="engine-0", state="left", reason="it has left")
GIVEN_BACK = StepGivenBack(train_step=1, reason="rank 1 was lost")


@pytest.mark.parametrize(
    ("told", "lost"),
    [
        ({}, None),
        ({2: [LOST], 5: [BACK]}, 3.0),
        ({0: [LOST], 5: [BACK]}, 4.0),  # it was lost before the step began
        ({2: [LOST], 4: [FENCED], 5: [BACK], 8: [ACTIVE]}, 6.0),  # both at once count once
        ({7: [LOST], 14: [BACK]}, 4.0),  # it is back when the step has been told
        ({4: [GIVEN_BACK]}, 3.0),  # what was trained until then was in vain
        ({4: [GIVEN_BACK], 2: [LOST], 6: [BACK]}, 5.0),
        ({2: [FENCED]}, None),  # it never comes back: the run goes on without it
        ({2: [FENCED], 3: [LEFT]}, None),
    ],
)
def test_no_useful_second_is_lost_to_recovery(told: dict[int, list[Event]], lost: float | None) -> None:
    """One step, from second 1 to 11; then 20 s are over."""
    clock = Moments()
    sink = SummarySink(clock)
    sink.summary.began_at -= 20.0
    said: dict[int, list[Event]] = {
        1: [StageBegan(stage="step", train_step=1)],
        11: [
            StepTrained(train_step=1, metrics={"time/step_s": 10.0}),
            StageEnded(stage="step", seconds=10.0, train_step=1),
        ],
    }
    for second in range(20):
        clock.now += 1.0 if second else 0.0
        for event in [*said.get(second, []), *told.get(second, [])]:
            sink.notice(event)
        sink.plain()  # a checkpoint may be written at any time, and changes nothing
    summary = sink.plain()
    assert summary["train_seconds"] == 10.0 and summary["recovery_seconds"] == lost
    assert summary["effective_time_ratio"] == pytest.approx((10.0 - (lost or 0.0)) / 20.0, abs=0.01)


def test_the_share_of_useful_time_counts_evaluations_between_steps_and_no_step_twice():
    sink = SummarySink()
    sink.plain()
    sink.summary.began_at -= 100.0
    told = [
        StageBegan(stage="eval", lane="evaluation"),
        StageEnded(stage="eval", seconds=10.0, lane="evaluation"),
        StageBegan(stage="step", train_step=1),
        StageBegan(stage="eval", lane="evaluation"),
        StageEnded(stage="eval", seconds=5.0, lane="evaluation"),  # beside the step: no time of its own
        StageEnded(stage="step", seconds=20.0, train_step=1),
        StepTrained(train_step=1, metrics={"time/step_s": 20.0}),
        StepTrained(train_step=1, metrics={"time/step_s": 20.0}),  # told again after a restart
        ActorLost(actor="judger-0", reason="killed"),
        ActorRecovered(actor="judger-0", seconds=3.0),
    ]
    for event in told:
        sink.notice(event)
    summary = sink.plain()
    assert summary["eval_seconds"] == 10.0 and summary["train_seconds"] == 20.0
    assert summary["effective_time_ratio"] == pytest.approx(0.3, abs=0.01)
    assert (summary["actors_lost"], summary["actor_seconds_lost"]) == (1, 3.0)
    again = SummarySink()
    again.restart(summary, 1)
    assert again.plain()["began_at"] == summary["began_at"]
