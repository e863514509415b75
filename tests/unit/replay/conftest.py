from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.replay import Ledger, ReplayBuffer, StaleRule
from penstock.replay.disk import Connection, SqliteDisk
from penstock.rollout import FinishReason, Group, Prompt, RolloutState, Status, Verdict, pack_ids


class Groups:
    """Groups as the sampler draws them and as an agent loop brings them back."""

    @staticmethod
    def new(draw: int, task: str = "sums", k: int = 2) -> Group:
        prompt = Prompt(
            messages=({"role": "user", "content": f"question {draw}"},),
            ids=pack_ids([draw, 1, 2]),
            ground_truth={"answer": draw},
            extra_info={"index": draw},
        )
        group_id = f"{task}:{draw}"
        return [
            RolloutState(prompt=prompt, task_name=task, group_id=group_id, rollout_id=f"{group_id}:{i}", draw=draw)
            for i in range(k)
        ]

    @staticmethod
    def play(group: Group, *, tokens: int = 3, model_step: int = 0, statuses: Sequence[Status] | None = None) -> Group:
        """Every rollout that is not complete gets more tokens and a status: COMPLETED, or the one given."""
        for index, rollout in enumerate(group):
            if rollout.status is Status.COMPLETED:
                continue
            ids = [rollout.draw * 100 + index] * tokens
            rollout.response = rollout.response.append(ids, [-0.25] * tokens, model_step=model_step)
            rollout.status = statuses[index] if statuses else Status.COMPLETED
            if rollout.status is Status.COMPLETED:
                rollout.finish_reason = FinishReason.STOP
                rollout.response_text = f"answer {rollout.draw}"
                rollout.reward = Verdict(float(index), {"exact": float(index)}, "said")
        return group

    @staticmethod
    async def put(
        buffer: ReplayBuffer, group: Group, *, step: int = 1, threshold: int = 2, discard_expired: bool = False
    ) -> Status:
        rule = StaleRule(threshold, discard_expired=discard_expired)
        status = buffer.put(group, group[0].task_name, model_step=0, current_train_step=step, stale_threshold=rule)
        await buffer.flush()
        return status


class Watched:
    """A connection that can fail at a chosen statement and says when a transaction is committed."""

    def __init__(self, real: Connection, disk: WatchedDisk) -> None:
        self._real = real
        self._disk = disk

    @property
    def total_changes(self) -> int:
        return self._real.total_changes

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> sqlite3.Cursor:
        if sql == "ROLLBACK":
            return self._real.execute(sql)
        self._disk.before(sql)
        cursor = self._real.execute(sql, parameters)
        if sql == "COMMIT":
            self._disk.committed()
        return cursor

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> sqlite3.Cursor:
        self._disk.before(sql)
        return self._real.executemany(sql, parameters)

    def close(self) -> None:
        self._real.close()


class WatchedDisk:
    """Real SQLite without the waiting for the disk, and with faults."""

    def __init__(self) -> None:
        self.statements: list[str] = []
        self.fail_at: int | None = None
        self.error: Exception = sqlite3.OperationalError("disk I/O error")
        self.on_statement: Callable[[str], None] = lambda sql: None
        self.on_commit: Callable[[], None] = lambda: None

    def connect(self, path: Path) -> Connection:
        connection = SqliteDisk().connect(path)
        connection.execute("PRAGMA synchronous = OFF")
        return Watched(connection, self)

    def before(self, sql: str) -> None:
        self.on_statement(sql)
        if self.fail_at is not None and len(self.statements) >= self.fail_at:
            raise self.error
        self.statements.append(sql)

    def committed(self) -> None:
        self.on_commit()


def kill_and_copy(source: Path, target: Path) -> Path:
    """The run directory as a process that was killed now would leave it."""
    target.mkdir(parents=True)
    for path in source.glob("ledger.sqlite*"):
        if not path.name.endswith("-shm"):  # lives in memory; SQLite makes it again from the log
            shutil.copy(path, target / path.name)
    return target


@pytest.fixture
def groups() -> type[Groups]:
    return Groups


@pytest.fixture
def new_disk() -> type[WatchedDisk]:
    return WatchedDisk


@pytest.fixture
def copy_run() -> Callable[[Path, Path], Path]:
    return kill_and_copy


@pytest.fixture
def open_buffer() -> Callable[..., ReplayBuffer]:
    def build(directory: Path, *, order: Any = "fifo", disk: Any = None, **options: Any) -> ReplayBuffer:
        return ReplayBuffer(order=order, storage=Ledger.open(directory, disk=disk or WatchedDisk(), **options))

    return build
