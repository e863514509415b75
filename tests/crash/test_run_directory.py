"""Who may use a run directory, and what a run that lost its driver leaves behind: real processes of the command."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest

from penstock.replay.story import group_story, open_read_only
from penstock.testing.ledger_history import check_ledger

pytestmark = pytest.mark.crash_tier

HOST = socket.gethostname()
QUIET = {"completed", "aborted", "expired", "max_tries", "discarded"}
"""States in which a group waits, driver or not."""


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def require_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while not all(is_gone(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if not is_gone(pid)]}"
        time.sleep(0.02)


def trained(run_dir: Path, steps: int) -> bool:
    metrics = run_dir / "metrics.jsonl"
    return metrics.exists() and metrics.read_text().count("reward/mean") >= steps


def groups_not_trained(run_dir: Path) -> dict[str, str]:
    with open_read_only(run_dir) as connection:
        return dict(connection.execute("SELECT group_id, state FROM groups WHERE state != 'trained'"))


def test_a_second_process_is_refused_and_a_killed_driver_leaves_a_free_and_explained_directory(
    penstock, small, tmp_path, wait_for
):
    run_dir = tmp_path / "run"
    command = ["train", "tiny-async", "--run-dir", str(run_dir)]
    holder = penstock(*command, *small(100_000))
    wait_for(lambda: trained(run_dir, 3), holder)

    for resume in ([], ["--resume"]):
        second = penstock(*command, *small(100_000), *resume)
        output, _ = second.communicate(timeout=60)
        assert second.returncode == 2, output
        assert f"is in use by process {holder.pid} on host {HOST}" in output
    # A live run is looked at beside its writer.
    looked_at = penstock("ledger", str(run_dir), "--json").communicate(timeout=60)[0]
    assert json.loads(looked_at)["conserved"] and holder.poll() is None

    children = children_of(holder.pid)
    assert len(children) >= 2  # engine and judge workers
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(timeout=60)
    require_gone(children)

    left = groups_not_trained(run_dir)
    assert left
    for group_id, state in left.items():
        why = group_story(run_dir, group_id)["why_not_trained"]
        assert why, (group_id, state)
        if state in ("running", "leased"):
            assert f"when process {holder.pid} on {HOST} ended; a resume" in why
    summary = json.loads(penstock("ledger", str(run_dir), "--json").communicate(timeout=60)[0])
    open_groups = {group["group_id"]: group["why_not_trained"] for group in summary["waiting"]}
    assert open_groups.keys() == {group_id for group_id, state in left.items() if state != "discarded"}
    assert all(open_groups.values())
    shown = penstock("ledger", str(run_dir)).communicate(timeout=60)[0]
    assert f"when process {holder.pid} on {HOST} ended; a resume" in shown or set(left.values()) <= QUIET

    steps = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    resumed = penstock(*command, *small(steps + 2), "--resume")
    output, _ = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, output
    check_ledger(run_dir).require_none()
    explained = {group: group_story(run_dir, group)["why_not_trained"] for group in groups_not_trained(run_dir)}
    assert all(explained.values()), explained


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]], ids=["sigterm", "two-sigint"])
def test_a_signal_ends_the_run_with_its_children_and_it_resumes(penstock, small, tmp_path, wait_for, signals):
    run_dir = tmp_path / "run"
    recipe = "tiny" if len(signals) == 1 else "tiny-async"
    command = ["train", recipe, "--run-dir", str(run_dir)]
    run = penstock(*command, *small(100_000))
    wait_for(lambda: trained(run_dir, 2), run)
    children = children_of(run.pid)
    for number in signals:
        run.send_signal(number)
        time.sleep(0.002)  # two at once may be delivered as one
    output, _ = run.communicate(timeout=60)
    # The second one may find the run already ended in order.
    assert run.returncode in ((0,) if len(signals) == 1 else (0, 130)), output
    assert "Traceback" not in output
    require_gone(children)
    with open_read_only(run_dir) as connection:
        (step,) = connection.execute("SELECT max(train_step) FROM groups WHERE state = 'trained'").fetchone()
    resumed = penstock(*command, *small(step + 2), "--resume")
    output, _ = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, output
    check_ledger(run_dir).require_none()


def test_of_two_drivers_started_at_once_one_has_the_directory_and_the_other_writes_nothing(penstock, small, tmp_path):
    """Whichever is later: refused at the door, at the lock, or after the other's run has already ended."""
    for trial in range(2):
        run_dir = tmp_path / f"run-{trial}"
        command = ["train", "tiny", "--run-dir", str(run_dir), *small(3), "--set", "seed=1"]
        two = [penstock(*command), penstock(*command)]
        ended = [(run.communicate(timeout=240)[0], run.returncode) for run in two]
        assert sorted(code for _, code in ended) == [0, 2], ended
        refusal = next(output for output, code in ended if code == 2)
        assert "is in use by process" in refusal or "meanwhile" in refusal or "is not empty" in refusal, refusal
        summary = json.loads((run_dir / "summary.json").read_text())
        assert summary["steps"] == 3 and summary["error"] is None
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2, 3]
        kinds = [json.loads(line)["kind"] for line in (run_dir / "events.jsonl").read_text().splitlines()]
        assert kinds.count("run_began") == kinds.count("run_ended") == 1
        assert len(list((run_dir / "tensorboard").iterdir())) == 1
        check_ledger(run_dir).require_none()


def test_an_export_that_was_due_when_the_driver_was_killed_is_made_by_the_resume(penstock, small, tmp_path, wait_for):
    run_dir = tmp_path / "run"
    latest, export = run_dir / "checkpoints" / "latest", run_dir / "hf" / "step-2"
    command = ["train", "tiny", "--run-dir", str(run_dir), *small(3), "--set", "hf_interval=2"]
    run = penstock(*command)
    wait_for(lambda: latest.exists() and latest.read_text() == "step-000002\n", run)
    os.kill(run.pid, signal.SIGKILL)
    run.wait(timeout=60)
    # It may have been made in the moment between the look and the kill.
    shutil.rmtree(export, ignore_errors=True)
    resumed = penstock("train", "tiny", "--run-dir", str(run_dir), "--resume")
    output, _ = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, output
    assert (export / "model.safetensors").exists() and (run_dir / "hf" / "final" / "model.safetensors").exists()
