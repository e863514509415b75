from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from penstock.replay import Ledger, ReplayBuffer, StaleRule
from penstock.replay.ledger import LEDGER_FILE
from penstock.replay.story import open_read_only
from penstock.rollout import Prompt, RolloutState, Status, Verdict, pack_ids
from penstock.testing import Batch, Restart, check_ledger, read_batches, read_history


class Life:
    """One process of a run with batches of one group."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.buffer = ReplayBuffer(storage=Ledger.open(run_dir, threaded=False))

    async def play(self, draw: int) -> None:
        group_id = f"sums:{draw}"
        prompt = Prompt(messages=(), ids=pack_ids([draw]), ground_truth=None)
        group = [
            RolloutState(prompt=prompt, task_name="sums", group_id=group_id, rollout_id=f"{group_id}:0", draw=draw)
        ]
        self.buffer.draw(group, draw + 1)
        group[0].response = group[0].response.append([1], [-0.5], model_step=0)
        group[0].status, group[0].reward = Status.COMPLETED, Verdict(1.0, {}, "")
        self.buffer.put(group, "sums", model_step=0, current_train_step=1, stale_threshold=9)
        await self.buffer.flush()

    def train(self, step: int, *, written: str | None = None) -> None:
        (group,) = self.buffer.take_batch({"sums": 1}, train_step=step)["sums"]
        self.write(step, written or group[0].group_id)
        self.buffer.commit(step)

    def write(self, step: int, group_id: str) -> None:
        directory = self.run_dir / "trajectories"
        directory.mkdir(exist_ok=True)
        (directory / f"step-{step}.jsonl").write_text(json.dumps({"group_id": group_id, "reward": 1}) + "\n")


def make_run(run_dir: Path, *, written: str | None = None) -> None:
    """Draws 0 to 3; trains 0 and 1; is restarted from checkpoint 1; trains 1 again, then 2."""

    async def main() -> None:
        life = Life(run_dir)
        for draw in range(4):
            await life.play(draw)
        life.train(1)
        life.train(2)
        await life.buffer.close()
        life = Life(run_dir)
        life.buffer.restore(1, {"sums": StaleRule(9, None, False)})
        life.train(2)
        life.train(3, written=written)
        await life.buffer.close()

    asyncio.run(main())


def test_a_run_with_a_restart_is_read_back_as_it_was(tmp_path: Path) -> None:
    make_run(tmp_path)
    with open_read_only(tmp_path) as connection:
        told = read_history(connection, tmp_path / LEDGER_FILE)
    assert told.history.batches == [
        Batch(1, ("sums:0",), True),
        Batch(2, ("sums:1",), True),
        Restart(1),
        Batch(2, ("sums:1",), True),
        Batch(3, ("sums:2",), True),
    ]
    assert told.held >= {"sums:3"}
    assert told.cursors == {"sums": 4}
    assert [batch.group_ids for batch in read_batches(tmp_path)] == [("sums:0",), ("sums:1",), ("sums:2",)]
    check_ledger(tmp_path).require_none()


def test_a_group_that_the_trainer_saw_twice_is_doubled_and_the_one_it_never_saw_is_lost(tmp_path: Path) -> None:
    make_run(tmp_path, written="sums:0")
    findings = check_ledger(tmp_path)
    assert findings.doubled == ["sums:0 was trained in steps 1 and 3"]
    assert findings.lost == ["sums:2 is recorded as trained, but no consumer trained it"]


@pytest.mark.parametrize(
    ("sql", "kind"),
    [
        ("DELETE FROM draws WHERE sequence = 3", "lost"),
        ("DELETE FROM cursors", "skipped"),
    ],
)
def test_content_or_cursors_that_are_gone_are_found(tmp_path: Path, sql: str, kind: str) -> None:
    import sqlite3

    make_run(tmp_path)
    connection = sqlite3.connect(tmp_path / LEDGER_FILE)
    with connection:
        connection.execute(sql)
    connection.close()
    assert getattr(check_ledger(tmp_path), kind)
