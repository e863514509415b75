from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from view_runs import step_events, tell

from penstock.events import EngineChanged, RunBegan, StageBegan, StageEnded
from penstock.trainer.alarms import findings
from penstock.trainer.history import History, HistoryFile


def found(tmp_path: Path, *events: Any, states: dict[str, int] | None = None, now: float = 1.0) -> list[str]:
    tmp_path.mkdir(exist_ok=True)
    tell(tmp_path, RunBegan(run_name="r", model="tiny", total_steps=9), *events)
    history = HistoryFile(tmp_path)
    history.read()
    return [f"{one.level}: {one.text}" for one in findings(history, states or {}, now)]


def steps(**metrics: float) -> list[Any]:
    return [event for step in range(1, 6) for event in step_events(step, **metrics)]


def test_a_healthy_run_has_none(tmp_path: Path) -> None:
    healthy = {"reward/equal_group_share": 0.2, "length/truncated_share": 0.1, "share/trainer_wait": 0.1}
    assert found(tmp_path, *steps(**healthy), states={"trained": 1000, "aborted": 20}) == []


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"reward/equal_group_share": 0.5}, "tip: 50 % of the groups have equal rewards"),
        ({"length/truncated_share": 0.25}, "tip: 25 % of the answers were cut"),
        ({"share/trainer_wait": 0.4}, "tip: the trainer waits 40 %"),
        ({"share/engine_idle": 0.4}, "tip: the engines are idle 40 %"),
        ({"train/mismatch/k3_kl": 0.2}, "alarm: engine and trainer disagree"),
        ({"judger/unjudged": 3.0}, "alarm: the judge abstains: 3 answers"),
    ],
)
def test_what_is_out_of_its_band_is_said_in_words(tmp_path: Path, metrics: dict[str, float], said: str) -> None:
    [text] = found(tmp_path, *steps(**metrics))
    assert text.startswith(said)


def test_many_interrupted_groups_are_an_alarm_when_there_are_enough_to_tell(tmp_path: Path) -> None:
    assert found(tmp_path, states={"trained": 90, "aborted": 9}) == []
    [text] = found(tmp_path, states={"trained": 91, "aborted": 9})
    assert text == "alarm: 9 of 100 groups were interrupted and wait to be played again"


def test_an_engine_that_is_away_is_an_alarm(tmp_path: Path) -> None:
    [text] = found(tmp_path, EngineChanged(engine="engine-1", state="fenced", reason="it died"))
    assert text == "alarm: engine engine-1 is fenced: it died"


def test_a_stage_that_takes_far_longer_than_three_before_it_is_an_alarm() -> None:
    history = History()
    history.notice(RunBegan(run_name="r", model="tiny", total_steps=9), at=0.0)

    def train(step: int, begin: float) -> None:
        history.notice(StageBegan(stage="train", train_step=step), at=begin)

    def trained(step: int, end: float) -> None:
        history.notice(StageEnded(stage="train", train_step=step, seconds=2.0), at=end)

    for step in (1, 2):
        train(step, 10.0 * step)
        trained(step, 10.0 * step + 2)
    train(3, 30.0)
    assert findings(history, {}, 130.0) == []
    trained(3, 32.0)
    train(4, 40.0)
    assert findings(history, {}, 51.0) == []
    [one] = findings(history, {}, 53.0)
    assert one.text == "train has taken 13 s; it usually takes 2.0 s"


def test_groups_that_the_staleness_bound_throws_away_are_an_alarm(tmp_path: Path) -> None:
    few = {"produce/groups": 90.0, "produce/sums/discarded/expired": 10.0}
    assert found(tmp_path / "few", *steps(**few)) == []
    many = {"produce/groups": 80.0, "produce/sums/discarded/expired": 20.0}
    [text] = found(tmp_path / "many", *steps(**many))
    assert text.startswith("alarm: 20 % of the groups became too stale to be trained")
    masked = {"train/tokens": 60.0, "staleness/masked_tokens": 40.0}
    [text] = found(tmp_path / "masked", *steps(**masked))
    assert text.startswith("alarm: 40 % of the tokens in the batches are too stale")
