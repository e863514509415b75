"""Checkpoints and ledgers that somebody or something changed between two processes of a run."""

from __future__ import annotations

import hashlib
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.cli.config_file import load_config
from penstock.errors import CheckpointError, LedgerError
from penstock.testing.ledger_history import check_ledger
from penstock.trainer.checkpoints import CheckpointStore
from penstock.trainer.resume import find_beginning

STEPS = 6
MUTATIONS = 200


def weights(run_dir: Path) -> str:
    return hashlib.sha256((run_dir / "hf" / "final" / "model.safetensors").read_bytes()).hexdigest()


pytestmark = pytest.mark.crash_tier


@pytest.fixture(scope="module")
def stopped(build, tmp_path_factory):
    """A run that ended after step 6, with the checkpoints 4 and 6."""
    run_dir = tmp_path_factory.mktemp("stopped") / "run"
    build("tiny", run_dir, steps=STEPS).fit()
    return run_dir


@pytest.fixture(scope="module")
def whole(build, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    build("tiny", run_dir, steps=STEPS + 2).fit()
    return run_dir


@pytest.fixture
def run_dir(stopped, tmp_path):
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:06d}"


KINDS = ("flip", "flip", "cut", "grow", "remove", "swap", "remove all")


def damage(rng: random.Random, directory: Path, kinds: tuple[str, ...] = KINDS) -> str:
    """Change one file of a checkpoint, or remove all of it; returns what was done."""
    path = rng.choice(sorted(directory.iterdir()))
    kind = rng.choice(kinds)
    content = bytearray(path.read_bytes())
    if kind == "flip":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    elif kind == "cut":
        path.write_bytes(content[: rng.randrange(len(content))])
    elif kind == "grow":
        path.write_bytes(bytes(content) + rng.randbytes(rng.randint(1, 100)))
    elif kind == "remove":
        path.unlink()
    elif kind == "swap":
        other = rng.choice([p for p in sorted(directory.iterdir()) if p != path])
        shutil.copy(other, path)
    else:
        shutil.rmtree(directory)
    return f"{kind} {path.name}"


def test_two_hundred_damaged_checkpoints_fall_back_loudly_and_none_starts_from_step_0(stopped, tmp_path):
    config = load_config("tiny").describe()
    config = CheckpointStore(stopped / "checkpoints").newest().config | {"class": config["class"]}
    copy = Path(shutil.copytree(stopped, tmp_path / "run"))
    for number in range(MUTATIONS):
        rng = random.Random(number)
        what = damage(rng, checkpoint(copy, 6))
        beginning = find_beginning(copy, rng.choice(["newest", "auto"]), config, CheckpointStore(copy / "checkpoints"))
        assert beginning.checkpoint is not None and beginning.checkpoint.step == 4, (number, what)
        assert any(note.startswith("checkpoint passed over") for note in beginning.notes), (number, what)
        damage(rng, checkpoint(copy, 4), KINDS[:-1])
        with pytest.raises(CheckpointError, match="none is whole"):
            find_beginning(copy, "newest", config, CheckpointStore(copy / "checkpoints"))
        for step in (4, 6):
            shutil.rmtree(checkpoint(copy, step), ignore_errors=True)
            shutil.copytree(checkpoint(stopped, step), checkpoint(copy, step))


@pytest.mark.parametrize("seed", range(4))
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one_to_the_same_weights(build, run_dir, whole, said, seed):
    what = damage(random.Random(f"run {seed}"), checkpoint(run_dir, 6))
    build("tiny", run_dir, steps=STEPS + 2, sink=said).fit()
    assert any(note.startswith("checkpoint passed over") for note in said.notes), what
    assert "at step 4; groups given back: {'trained': 8}" in said.notes
    check_ledger(run_dir).require_none()
    assert weights(run_dir) == weights(whole)


@pytest.mark.parametrize("resume", ["--resume", "--resume=auto"])
@pytest.mark.parametrize("kind", ["damaged", "removed"])
def test_a_run_whose_checkpoints_are_all_bad_is_refused_and_left_as_it_is(run_dir, capsys, resume, kind):
    for step in (4, 6):
        if kind == "removed":
            shutil.rmtree(checkpoint(run_dir, step))
        else:
            (checkpoint(run_dir, step) / "model.safetensors").write_bytes(b"")
    ledger = (run_dir / "ledger.sqlite").read_bytes()
    settings = ["evaluator=null", "train_batch_size=4", "checkpoint_interval=2", "cpu_threads=1", "total_steps=8"]
    arguments = [word for setting in settings for word in ("--set", setting)]
    assert main(["train", "tiny", "--run-dir", str(run_dir), *arguments, resume]) == 2
    assert "checkpoint" in capsys.readouterr().err
    assert (run_dir / "ledger.sqlite").read_bytes() == ledger


def test_another_configuration_is_refused_with_its_differences(run_dir, capsys):
    assert main(["train", "tiny", "--run-dir", str(run_dir), "--resume"]) == 2
    assert "train_batch_size" in capsys.readouterr().err


def mutate(run_dir: Path, sql: str) -> None:
    connection = sqlite3.connect(run_dir / "ledger.sqlite")
    with connection:
        connection.execute(sql)
    connection.close()


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("PRAGMA user_version = 99", "format 99"),
        ("PRAGMA application_id = 7", "not a ledger"),
        ("UPDATE groups SET train_step = 1 WHERE sequence = 20", "does not have its checksum"),
        ("DELETE FROM groups WHERE sequence = 3", "is missing"),
        ("DELETE FROM events WHERE id = (SELECT max(id) FROM events)", "is damaged"),
        ("UPDATE rollouts SET content = zeroblob(length(content))", "checksum"),
    ],
)
def test_a_ledger_that_is_damaged_or_newer_is_refused_and_named(build, run_dir, sql, says):
    mutate(run_dir, sql)
    # The groups of step 6 are needed again.
    shutil.rmtree(checkpoint(run_dir, 6))
    (run_dir / "checkpoints" / "latest").write_text("step-000004\n")
    with pytest.raises(LedgerError, match=says):
        build("tiny", run_dir, steps=STEPS + 2).fit()
