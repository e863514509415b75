"""The disk fails in the middle of a run: it stops before the next train step, and goes on when the disk does."""

from __future__ import annotations

import hashlib
import random
import shutil
import subprocess

import pytest

from penstock.errors import LedgerError, StorageError
from penstock.replay.story import open_read_only
from penstock.testing.faults import DiskFailure, Faults
from penstock.testing.ledger_history import check_ledger

pytestmark = pytest.mark.crash_tier

STEPS = 6
SAYS = {
    DiskFailure.FULL: r"No space left|disk is full",
    DiskFailure.IO: r"Input/output error|disk I/O error",
    DiskFailure.READ_ONLY: r"Read-only file system|readonly database",
}


def weights(run_dir) -> str:
    return hashlib.sha256((run_dir / "hf" / "final" / "model.safetensors").read_bytes()).hexdigest()


def trained_steps(run_dir) -> int:
    """The last step that is durably trained."""
    with open_read_only(run_dir) as connection:
        (step,) = connection.execute("SELECT max(train_step) FROM groups WHERE state = 'trained'").fetchone()
    return step or 0


def begun_steps(run_dir) -> int:
    """The last step whose batch reached the trainer."""
    return max((int(p.stem.removeprefix("step-")) for p in (run_dir / "trajectories").glob("step-*")), default=0)


@pytest.fixture(scope="module", params=["tiny", "tiny-async"])
def whole(request, build, tmp_path_factory):
    """A run without faults: its recipe, its weights, and how many operations it takes."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    faults = {"ledger": Faults(), "files": Faults()}
    build(request.param, run_dir, steps=STEPS, **faults).fit()
    check_ledger(run_dir).require_none()
    return request.param, weights(run_dir), {port: fault.count for port, fault in faults.items()}


@pytest.mark.parametrize("failure", list(DiskFailure))
@pytest.mark.parametrize("port", ["ledger", "files"])
def test_a_disk_that_fails_stops_the_run_before_the_next_train_step_and_a_resume_loses_nothing(
    whole, build, tmp_path, port, failure
):
    recipe, expected, operations = whole
    run_dir = tmp_path / "run"
    # After the ledger was made: without one there is no run to go on with.
    first = 30 if port == "ledger" else 0
    at = random.Random(f"{recipe} {port} {failure.name}").randrange(first, operations[port] * 3 // 4)
    trainer = build(recipe, run_dir, steps=STEPS, **{port: Faults(at, failure=failure)})
    with pytest.raises(StorageError, match=SAYS[failure]):
        trainer.fit()
    durable = trained_steps(run_dir)
    assert trainer.summary.steps <= durable <= begun_steps(run_dir) <= durable + 1
    build(recipe, run_dir, steps=STEPS).fit()
    check_ledger(run_dir).require_none()
    assert trained_steps(run_dir) == STEPS
    if recipe == "tiny":
        assert weights(run_dir) == expected


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own: `small_disk(size)` makes it, or resizes it."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = False

    def resize(size: str):
        nonlocal mounted
        options = f"remount,size={size}" if mounted else f"size={size}"
        mount = shutil.which("mount") or pytest.skip("there is no mount command")
        done = subprocess.run(
            [mount, "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True
        )
        if done.returncode and not mounted:
            pytest.skip(f"a file system cannot be mounted: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr
        mounted = True
        return place

    yield resize
    if mounted:
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_ends_the_command_with_a_clear_message_and_it_resumes_when_there_is_space(
    penstock, small, small_disk
):
    run_dir = small_disk("3m") / "run"
    run = penstock("train", "tiny", "--run-dir", str(run_dir), *small(200))
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 1, output
    last = output.splitlines()[-1]
    assert last.startswith("penstock: ") and str(run_dir) in last and "Traceback" not in output, output
    assert "No space left" in last or "disk is full" in last, output
    durable = trained_steps(run_dir)
    assert 0 < durable < 200 and begun_steps(run_dir) <= durable + 1
    small_disk("64m")
    resumed = penstock("train", "tiny", "--run-dir", str(run_dir), *small(durable + 3), "--resume")
    output, _ = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, output
    check_ledger(run_dir).require_none()
    assert trained_steps(run_dir) == durable + 3


def test_a_ledger_that_cannot_be_begun_is_named_and_leaves_the_directory_usable(build, tmp_path):
    with pytest.raises((StorageError, LedgerError), match=r"ledger\.sqlite"):
        build("tiny", tmp_path / "run", steps=1, ledger=Faults(3, failure=DiskFailure.FULL))
    build("tiny", tmp_path / "run", steps=1).fit()
    check_ledger(tmp_path / "run").require_none()
