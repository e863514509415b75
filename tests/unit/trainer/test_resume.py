"""Where a run begins, and what it may not begin with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import CheckpointError
from penstock.replay.ledger import LEDGER_FILE
from penstock.trainer.checkpoints import CheckpointStore
from penstock.trainer.resume import Beginning, find_beginning

CONFIG = {
    "class": "T",
    "total_steps": 10,
    "eval_interval": 5,
    "train": {"lr": 1e-3, "betas": [0.9, 0.95], "schedule": "constant"},
    "replay_buffer": {"storage": "sqlite"},
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of a run with checkpoints 0, 2 and 4."""
    (tmp_path / LEDGER_FILE).touch()
    store = CheckpointStore(tmp_path / "checkpoints", keep=3)
    for step in (0, 2, 4):
        asyncio.run(store.save(step, state={}, config=CONFIG))
    return tmp_path


def begin(run_dir: Path, resume: str, config: dict[str, Any] = CONFIG, *allow_change: str) -> Beginning:
    return find_beginning(run_dir, resume, config, CheckpointStore(run_dir / "checkpoints"), allow_change=allow_change)


def refused(run_dir: Path, *given: Any) -> list[str]:
    with pytest.raises(CheckpointError) as error:
        begin(run_dir, *given)
    return error.value.problems


def with_lr(lr: float, **others: Any) -> dict[str, Any]:
    return {**CONFIG, "train": {**CONFIG["train"], "lr": lr}, **others}  # type: ignore[dict-item]


def test_a_checkpoint_is_named_or_pointed_to(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for resume in ("step-000002", str(run_dir / "checkpoints" / "step-000002")):
        found = begin(run_dir, resume).checkpoint
        assert found is not None and found.step == 2
    monkeypatch.chdir(run_dir)
    found = begin(run_dir, "checkpoints/step-000002").checkpoint
    assert found is not None and found.step == 2


@pytest.mark.parametrize("resume", ["step-000001", "", "newst", "checkpoints/step-000001", "/elsewhere/step-000002"])
def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(run_dir: Path, resume: str) -> None:
    [said] = refused(run_dir, resume)
    assert said.startswith(f"{resume!r} is not a checkpoint of this run; ")
    assert said.endswith(f"there are step-000004, step-000002, step-000000, in {run_dir / 'checkpoints'}")


def test_a_changed_field_is_refused_with_the_way_to_allow_it_and_what_may_change_anyway(run_dir: Path) -> None:
    said = refused(run_dir, "newest", with_lr(2e-3))
    assert said[0].endswith("step-000004: the configuration changed, and with it what the run means:")
    assert said[1] == "  train.lr: 0.001 -> 0.002"
    assert said[2] == "change it back, or go on with it: --allow-change train.lr"
    may_change = "\n".join(said[3:])
    assert "eval_interval" in may_change and "total_steps (with train.schedule=constant)" in may_change
    assert "train.lr" not in may_change


@pytest.mark.parametrize("allowed", ["train.lr", "train"])
def test_a_change_that_is_allowed_is_noted_and_the_run_goes_on(run_dir: Path, allowed: str) -> None:
    beginning = begin(run_dir, "newest", with_lr(2e-3), allowed)
    assert beginning.checkpoint is not None and "changed: train.lr: 0.001 -> 0.002" in beginning.notes


def test_what_was_not_allowed_is_still_refused(run_dir: Path) -> None:
    said = refused(run_dir, "newest", with_lr(2e-3, seed=3), "train.lr")
    assert said[1] == "  seed: '(absent)' -> 3" and said[2].endswith("go on with it: --allow-change seed")


def test_a_change_that_is_allowed_again_after_it_was_made_does_no_harm(run_dir: Path) -> None:
    """A script that restarts a run gives the same options every time."""
    assert begin(run_dir, "newest", CONFIG, "train.lr").checkpoint is not None


def test_a_field_that_does_not_exist_is_not_allowed_to_change(run_dir: Path) -> None:
    said = refused(run_dir, "newest", with_lr(2e-3), "trian.lr")
    assert said[0] == "--allow-change trian.lr: there is no such field. Did you mean 'train.lr'?"
    assert refused(run_dir, "newest", CONFIG, "nothing") == ["--allow-change nothing: there is no such field."]


def test_nobody_can_allow_a_run_to_go_on_without_its_ledger(run_dir: Path) -> None:
    [said] = refused(run_dir, "newest", {**CONFIG, "replay_buffer": {"storage": "memory"}}, "replay_buffer")
    assert said.startswith("replay_buffer.storage: 'sqlite' -> 'memory': a run is resumed from its ledger")
