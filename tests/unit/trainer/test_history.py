from __future__ import annotations

from pathlib import Path

import pytest
from view_runs import make_run, step_events, tell

from penstock.events import ArithmeticChosen, EngineChanged, EngineSeen, RunBegan, RunEnded, StageBegan
from penstock.trainer.history import HistoryFile
from penstock.trainer.observers import EVENTS_FILE


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path / "first")


def read(run_dir: Path) -> HistoryFile:
    history = HistoryFile(run_dir)
    history.read()
    return history


def test_a_run_is_folded_as_it_grows(run_dir: Path) -> None:
    history = read(run_dir)
    assert [point.step for point in history.steps] == [1, 2]
    tell(run_dir, *step_events(3))
    history.read()
    assert [point.step for point in history.steps] == [1, 2, 3]
    assert history.published == 3 and [told.text for told in history.told] == ["something odd"]


def test_a_line_that_a_kill_tore_is_passed_over_and_what_follows_is_read(run_dir: Path) -> None:
    with (run_dir / EVENTS_FILE).open("ab") as file:
        file.write(b'{"time":1,"at":9,"kind":"step_tra')
    history = read(run_dir)
    tell(run_dir, *step_events(3))
    history.read()
    assert [point.step for point in history.steps] == [1, 2, 3]


def test_a_resume_forgets_the_steps_of_the_lineage_that_was_left(run_dir: Path) -> None:
    tell(run_dir, RunBegan(run_name="first", model="tiny", total_steps=4, resumed_from=1), *step_events(2))
    history = read(run_dir)
    assert [point.step for point in history.steps] == [1, 2] and history.restarts == 1


def test_the_arithmetic_is_that_of_the_last_process(run_dir: Path) -> None:
    assert read(run_dir).arithmetic is None
    first = ArithmeticChosen(train="float32", cpu="a CPU", others_take={"train": 2.0})
    again = ArithmeticChosen(train="float32", cpu="another", began_on="a CPU")
    tell(run_dir, first, RunBegan(run_name="first", model="tiny", total_steps=4), *step_events(1))
    assert read(run_dir).arithmetic == first
    tell(run_dir, again, RunBegan(run_name="first", model="tiny", total_steps=4, resumed_from=1))
    assert read(run_dir).arithmetic == again


def test_loading_is_over_when_the_run_begins_and_everything_when_it_ends(run_dir: Path) -> None:
    tell(run_dir, StageBegan(stage="produce", train_step=3))
    history = read(run_dir)
    assert [span.stage for span in history.open_spans] == ["produce"]
    tell(run_dir, RunEnded(steps=2))
    history.read()
    assert not history.open_spans and all(span.end is not None for span in history.spans)


def test_an_engine_that_is_closed_with_its_run_was_not_fenced(run_dir: Path) -> None:
    tell(run_dir, EngineChanged(engine="engine-0", state="fenced", reason="it died"))
    tell(run_dir, EngineChanged(engine="engine-0", state="fenced", reason="closed"))
    seen = read(run_dir).engines["engine-0"]
    assert seen.state == "closed" and seen.times_fenced == 1


def test_a_directory_without_events_is_empty(tmp_path: Path) -> None:
    assert not read(tmp_path).steps


def test_loading_is_over_when_the_next_stage_begins(run_dir: Path) -> None:
    tell(run_dir, StageBegan(stage="load", detail="the judges"), StageBegan(stage="produce", train_step=3))
    history = read(run_dir)
    assert [span.stage for span in history.open_spans] == ["produce"]
    assert all(span.end is not None for span in history.spans if span.stage == "load")


def test_the_load_of_an_engine_is_that_of_its_last_look_while_it_serves(run_dir: Path) -> None:
    tell(run_dir, EngineSeen(engine="engine-0", model_step=2, running=7, busy=0.5, tokens_per_s=90.0))
    stands = read(run_dir).engines["engine-0"]
    assert stands.load is not None and (stands.load.model_step, stands.load.running, stands.load.busy) == (2, 7, 0.5)
    tell(run_dir, *step_events(3))
    newer = read(run_dir).engines["engine-0"].load
    assert newer is not None and (newer.model_step, newer.running) == (3, 7)
    tell(run_dir, EngineChanged(engine="engine-0", state="fenced", reason="it died"))
    assert read(run_dir).engines["engine-0"].load is None
