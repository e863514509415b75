"""The driver is killed while answers are judged: what was finished is not judged again, the rest is, once."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pytest

from penstock.replay.story import open_read_only
from penstock.testing.ledger_history import check_ledger

pytestmark = pytest.mark.crash_tier

STEPS, GROUPS, SIBLINGS = 2, 8, 2
JUDGED_BEFORE_THE_KILL = GROUPS * SIBLINGS + 9
"""All of the first step, and some of the second."""

UNFINISHED = ("running", "aborted")

RUN = f"""\
import os
import time
from pathlib import Path

from penstock import NativeJudgerConfig
from penstock.recipes.tiny import trainer as tiny

HERE = Path(__file__).parent


def judge(response, label, extra_info):
    killed = (HERE / "killed").exists()
    asked = HERE / ("after" if killed else "before")
    with asked.open("a") as file:
        file.write(label + "\\n")
    if not killed and asked.read_text().count("\\n") > {JUDGED_BEFORE_THE_KILL}:
        (HERE / "judging").touch()
        time.sleep(600)
    return float(response == label)


trainer = (
    tiny.replace("manager.tasks.0.judger_config", NativeJudgerConfig(reward_handler=judge, timeout_s=120.0))
    .replace("manager.tasks.0.sampler_config.prompt_repeat_k", {SIBLINGS})
    .replace("train_batch_size", {GROUPS})
    .replace("total_steps", {STEPS})
    .replace("checkpoint_interval", 1)
    .replace("evaluator", None)
    .replace("cpu_threads", 1)
)
"""


def states_of(run_dir: Path) -> dict[str, str]:
    with open_read_only(run_dir) as connection:
        return dict(connection.execute("SELECT group_id, state FROM groups"))


def test_a_driver_killed_while_it_judges_has_only_what_was_not_finished_judged_again_once(penstock, tmp_path, wait_for):
    (tmp_path / "run.py").write_text(RUN)
    run_dir = tmp_path / "run"
    run = penstock("train", "run.py", "--run-dir", "run")
    wait_for((tmp_path / "judging").exists, run)
    # A slow disk writes the second step's groups down while they are judged already: they would be drawn again.
    wait_for(lambda: set(UNFINISHED) & set(states_of(run_dir).values()), run)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    states = states_of(run_dir)
    (tmp_path / "killed").touch()

    resumed = penstock("train", "run.py", "--run-dir", "run", "--resume")
    output, _ = resumed.communicate(timeout=180)
    assert resumed.returncode == 0, output
    check_ledger(run_dir).require_none()

    words = {}
    for step in range(1, STEPS + 1):
        for line in (run_dir / "trajectories" / f"step-{step:06d}.jsonl").read_text().splitlines():
            rollout = json.loads(line)
            words[rollout["group_id"]] = rollout["ground_truth"]
    assert len(words) == STEPS * GROUPS
    before, after = (Counter((tmp_path / when).read_text().split()) for when in ("before", "after"))
    finished = [group for group, state in states.items() if state not in UNFINISHED]
    unfinished = [group for group, state in states.items() if state in UNFINISHED]
    assert len(finished) >= GROUPS and unfinished
    assert {before[words[group]] for group in finished} == {SIBLINGS}
    assert {after[words[group]] for group in finished} == {0}
    # Both of a group that was not finished: its answers are made again.
    assert {after[words[group]] for group in words if group not in finished} == {SIBLINGS}
