"""Simulated runs that crash after chosen writes of a real ledger, are restarted, crash again, and come to their end.

    python -m penstock.testing.crashes 1234           replay one seed and print its history

A crash takes everything but what the ledger has committed and the checkpoints, and it may come before or after the
commit of a write. What a restart finds, the real buffer and manager go on with; sometimes the newest checkpoint is
damaged and the one before is taken. At the end the history of all lives is checked, against the ledger's own too.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import sqlite3
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import PenstockError
from penstock.events import Nobody
from penstock.replay import Ledger
from penstock.replay.disk import Connection
from penstock.replay.ledger import LEDGER_FILE
from penstock.testing.clock import run_virtual
from penstock.testing.history import History, Restart, check_history
from penstock.testing.ledger_history import read_history
from penstock.testing.simulation import (
    VIRTUAL_DEADLINE_S,
    Run,
    Scenario,
    SimulationError,
    build_world,
    draw_scenario,
)
from penstock.testing.world import ScriptedWorld
from penstock.trainer.writer import CheckpointWriter

MAX_CRASHES = 9


class Crash(msgspec.Struct, frozen=True):
    """The process dies at its `write`-th write, counted from 1 at its start: before its commit, or right after it."""

    write: int
    committed: bool = True


class CrashPlan(msgspec.Struct, frozen=True):
    crashes: tuple[Crash, ...]
    """One per life; the life after the last one comes to its end."""
    checkpoint_interval: int = 1
    damaged: float = 0.0
    """How often a restart finds the newest checkpoint damaged, 0 to 1."""
    write_s: float = 0.0
    """How long a checkpoint is written at most, beside training."""


class Crashed(PenstockError):
    """Raised between two turns of the loop, outside of all tasks."""


class MortalDisk:
    """A disk in memory that outlives the process which writes to it."""

    def __init__(self) -> None:
        self.database = sqlite3.connect(":memory:", isolation_level=None)
        self.writes = 0
        self.dead = False
        self._crash: Crash | None = None

    def begin_life(self, crash: Crash | None) -> None:
        self.writes, self.dead, self._crash = 0, False, crash

    def connect(self, path: Path) -> Connection:
        return _MortalConnection(self)

    def before_commit(self) -> None:
        self.writes += 1
        if self._crash == Crash(self.writes, committed=False):
            self.die()

    def after_commit(self) -> None:
        if self._crash == Crash(self.writes):
            self.die()

    def die(self) -> None:
        """From now on nothing reaches the database: what still runs of this life is only about to be stopped."""
        self.dead = True
        if self.database.in_transaction:
            self.database.execute("ROLLBACK")

    def require_alive(self) -> None:
        if self.dead:
            raise sqlite3.OperationalError("the process is dead")


class _MortalConnection:
    def __init__(self, disk: MortalDisk) -> None:
        self._disk = disk

    @property
    def total_changes(self) -> int:
        return self._disk.database.total_changes

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> sqlite3.Cursor:
        if sql == "COMMIT" and not self._disk.dead:
            self._disk.before_commit()
        self._disk.require_alive()
        cursor = self._disk.database.execute(sql, parameters)
        if sql == "COMMIT":
            self._disk.after_commit()
        return cursor

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> sqlite3.Cursor:
        self._disk.require_alive()
        return self._disk.database.executemany(sql, parameters)

    def close(self) -> None:
        """The database stays."""


class _Checkpoint(msgspec.Struct, frozen=True):
    step: int = 0
    position: int = 0


class Lives:
    """One run over all its restarts: what outlives a process, and what is known of all of them."""

    def __init__(self, scenario: Scenario, plan: CrashPlan, run_dir: Path) -> None:
        self.scenario = scenario
        self.plan = plan
        self.disk = MortalDisk()
        self.history = History()
        self.checkpoints = [_Checkpoint()]
        self.newest_weights = 0
        self.crashes = 0
        self.writes: list[int] = []
        """Per life."""
        self._run_dir = run_dir
        self._random = random.Random(f"lives {scenario.seed}")

    def run(self) -> None:
        """To the end. Raises what a life that was not killed raises, and BrokenHistory."""
        for number, crash in enumerate([*self.plan.crashes, None]):
            self.disk.begin_life(None)  # opening is reading
            ledger = Ledger.open(self._run_dir, disk=self.disk, threaded=False, clock=lambda: 0.0)
            self.disk.begin_life(crash)
            # What the last life recorded and did not commit never was.
            del self.history.events[ledger.position :]
            world = build_world(self.scenario, storage=ledger, history=self.history)
            try:
                if not self._live(world, restarted=number > 0):
                    self._check(world)
                    return
                self.crashes += 1
            finally:
                self.writes.append(self.disk.writes)
                run_virtual(ledger.close())

    def save_checkpoint(self, step: int, position: int) -> None:
        self.checkpoints = [*self.checkpoints, _Checkpoint(step, position)][-2:]

    def _live(self, world: ScriptedWorld, *, restarted: bool) -> bool:
        """One life. Returns whether it was killed."""
        life = _Life(self, world, self._choose_checkpoint() if restarted else self.checkpoints[-1], restarted)
        schedule = f"{self.scenario.seed} {self.crashes}"
        try:
            run_virtual(life.main(), seed=schedule, deadline=VIRTUAL_DEADLINE_S, after_turn=life.after_turn)
        except Exception:
            # A life that was killed may say anything with its last breath.
            if not self.disk.dead:
                raise
        return self.disk.dead

    def _choose_checkpoint(self) -> _Checkpoint:
        if len(self.checkpoints) > 1 and self._random.random() < self.plan.damaged:
            self.checkpoints.pop()
        return self.checkpoints[-1]

    def _check(self, world: ScriptedWorld) -> None:
        world.findings().require_none()
        told = read_history(self.disk.database, self._run_dir / LEDGER_FILE)
        check_history(History(told.history.events, self.history.batches), held=told.held).require_none()
        check_history(told.history, held=told.held).require_none()
        kept, recorded = (
            [(event.transition.group_id, event.transition.target) for event in history.events]
            for history in (told.history, self.history)
        )
        if kept != recorded:
            raise PenstockError(f"the ledger has {len(kept)} events, {len(recorded)} were recorded, or they differ")


class _Life(Run):
    """One process of the run."""

    def __init__(self, lives: Lives, world: ScriptedWorld, checkpoint: _Checkpoint, restarted: bool) -> None:
        super().__init__(lives.scenario, world, checkpoint.step)
        self.checkpoint_interval = lives.plan.checkpoint_interval
        self._lives = lives
        self._checkpoint = checkpoint
        self._restarted = restarted
        self._writer = CheckpointWriter(Nobody())
        self._random = random.Random(f"disk {lives.scenario.seed} {lives.crashes}")

    async def main(self) -> None:
        if self._restarted:
            # As the trainers do it.
            step, position = self._checkpoint.step, self._checkpoint.position
            self.world.history.batches.append(Restart(step))
            restored = self.world.buffer.restore(step, self.world.rules, position=position)
            self.manager.resume(step, restored)
            await self.world.load_weights(step)
        await super().main()

    async def loop(self) -> None:
        async with self._writer:
            await super().loop()

    def after_turn(self) -> None:
        if self._lives.disk.dead:
            raise Crashed("killed")
        # Only what always holds: groups of a later lineage came back, so there may be more than the bound.
        if self.has_news():
            self.world.check()

    async def committed(self, train_step: int) -> None:
        self._lives.newest_weights = max(self._lives.newest_weights, train_step)

    async def keep(self, train_step: int, metrics: dict[str, float], *, checkpoint: bool, export: bool) -> None:
        await self._writer.wait()
        position = self.world.buffer.position
        self._writer.begin(f"checkpoint {train_step}", lambda: self._write(train_step, position))

    def check(self) -> None:
        self._writer.check()

    async def _write(self, train_step: int, position: int) -> None:
        """Beside training, as the trainers do it."""
        await self.world.buffer.flush()
        await asyncio.sleep(self._lives.plan.write_s * self._random.random())
        if not self._lives.disk.dead:
            self._lives.save_checkpoint(train_step, position)
        await self.world.buffer.prune(self._lives.checkpoints[0].step)

    def newest_weights(self) -> int:
        return self._lives.newest_weights


def draw_plan(seed: int) -> CrashPlan:
    rng = random.Random(f"crashes {seed}")
    crashes = [
        Crash(rng.randint(1, rng.choice([3, 8, 25, 80])), committed=rng.random() < 0.7)
        for _ in range(rng.randint(2, MAX_CRASHES))
    ]
    return CrashPlan(
        crashes=tuple(crashes),
        checkpoint_interval=rng.randint(1, 3),
        damaged=rng.choice([0.0, 0.0, 0.5]),
        write_s=rng.choice([0.0, 5.0, 100.0]),
    )


def simulate_crashes(scenario: Scenario, plan: CrashPlan) -> Lives:
    """Raises SimulationError with what went wrong and how to see it again."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as directory:
        lives = Lives(scenario, plan, Path(directory))
        try:
            lives.run()
        except Exception as error:
            raise SimulationError(
                f"seed {scenario.seed}, {plan}, life {len(lives.writes)}: {type(error).__name__}: {error}\n"
                f"replay a seed with: python -m penstock.testing.crashes {scenario.seed}"
            ) from error
        return lives


def crash_many(seeds: range) -> tuple[int, list[str]]:
    """Run these seeds: how many crashes there were, and one text per bad seed."""
    logging.getLogger("penstock").setLevel(logging.CRITICAL)
    crashes, problems = 0, []
    for seed in seeds:
        try:
            crashes += simulate_crashes(draw_scenario(seed), draw_plan(seed)).crashes
        except SimulationError as error:
            problems.append(str(error))
    return crashes, problems


def main() -> None:
    parser = argparse.ArgumentParser(description="Replay one simulated run with its crashes.")
    parser.add_argument("seed", type=int)
    seed = parser.parse_args().seed
    scenario, plan = draw_scenario(seed), draw_plan(seed)
    print(scenario, plan, sep="\n")
    for event in simulate_crashes(scenario, plan).history.events:
        move = event.transition
        print(f"step {move.train_step:3} {move.group_id:12} {move.source} -> {move.target} {move.reason or ''}")


if __name__ == "__main__":
    main()
