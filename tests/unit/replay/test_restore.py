"""Restarts: after every write, in a row, from older checkpoints."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import LedgerError
from penstock.replay import DiscardReason, GroupState, Ledger, ReplayBuffer, StaleRule
from penstock.replay.lifecycle import Transition
from penstock.rollout import Group, Status

S, G = Status, GroupState
RULES = {"sums": StaleRule(2), "code": StaleRule(1, discard_expired=True)}
PATIENT = {task: StaleRule(99) for task in RULES}
"""For restarts after which all that is there shall be trained, however stale."""


class Recorded:
    """A ledger that also tells what was recorded, in order."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.transitions: list[Transition] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    def record(self, transition: Transition, group: Group | None = None, cursor: int | None = None) -> None:
        self.transitions.append(transition)
        self._ledger.record(transition, group, cursor)


async def scenario(buffer: ReplayBuffer, groups: Any, checkpoint: Callable[[int], None] = lambda step: None) -> None:
    """Every arrow of the diagram at least once; two tasks; checkpoints after steps 1 and 3."""

    async def put(group: Group, step: int, **how: Any) -> None:
        rule = RULES[group[0].task_name]
        await groups.put(
            buffer, groups.play(group, **how), step=step, threshold=rule.stale_threshold,
            discard_expired=rule.discard_expired,
        )  # fmt: skip

    sums = [groups.new(draw) for draw in range(8)]
    code = [groups.new(draw, "code") for draw in range(4)]
    for group in [*sums[:5], *code[:2]]:
        buffer.draw(group, group[0].draw + 1)
    await put(sums[1], 1)
    await put(sums[0], 1)
    await put(code[0], 1)
    await put(sums[2], 1, statuses=[S.ABORTED, S.COMPLETED])
    buffer.take_batch({"sums": 2, "code": 1}, train_step=1)
    buffer.commit(1)
    await buffer.flush()
    checkpoint(1)
    buffer.refresh_staleness(2)
    (again,) = buffer.get(1, "sums", S.ABORTED)
    await put(again, 2, model_step=1)
    await put(sums[3], 2, model_step=2, statuses=[S.MAX_TRIES, S.COMPLETED])
    await put(code[1], 3)
    for group in [*sums[5:], *code[2:]]:
        buffer.draw(group, group[0].draw + 1)
    await put(sums[5], 2, model_step=1)
    buffer.take_batch({"sums": 2}, train_step=2)
    buffer.return_lease(2)
    buffer.take_batch({"sums": 2}, train_step=2)
    buffer.commit(2)
    buffer.discard(sums[6], "sums", DiscardReason.FAILED, train_step=2)
    await buffer.flush()
    await put(code[2], 3, model_step=2)
    await put(sums[4], 2, model_step=0)
    buffer.refresh_staleness(3)
    (expired,) = buffer.get(1, "sums", S.EXPIRED)
    for rollout in expired:
        buffer.forget_response(rollout, "re_rolled")
        rollout.status = S.INIT
    await put(expired, 3, model_step=2)
    buffer.take_batch({"sums": 1, "code": 1}, train_step=3)
    buffer.commit(3)
    await buffer.flush()
    checkpoint(3)
    (tail,) = buffer.get(1, "sums", S.MAX_TRIES)
    await put(tail, 4, model_step=3)
    buffer.take_batch({"sums": 1}, train_step=4)
    await buffer.flush()


def expected_states(transitions: list[Transition], checkpoint_step: int) -> dict[str, GroupState]:
    """What a restart makes of these, by the definition."""
    found: dict[str, GroupState] = {}
    for transition in transitions:
        state = transition.target
        if state is G.RUNNING:
            state = G.ABORTED
        elif state is G.LEASED or (state is G.TRAINED and transition.train_step > checkpoint_step):
            state = G.COMPLETED
        elif state is G.ABORTED and S.MAX_TRIES in transition.statuses:
            state = G.MAX_TRIES
        found[transition.group_id] = state
    return found


async def finish(buffer: ReplayBuffer, groups: Any, step: int) -> tuple[list[str], list[Group]]:
    """Play all that waits and train all; returns what was played again and what was trained, in order."""
    played, trained = [], []
    for task in RULES:
        for status in (S.ABORTED, S.EXPIRED, S.MAX_TRIES):
            for group in buffer.get(99, task, status):
                played.append(group[0].group_id)
                await groups.put(buffer, groups.play(group, model_step=step - 1), step=step, threshold=99)
    sizes = {task: buffer.count(task, S.COMPLETED) for task in RULES}
    for batch in buffer.take_batch(sizes, train_step=step).values():
        trained += batch
    buffer.commit(step)
    await buffer.flush()
    return played, trained


@pytest.fixture
def history(tmp_path: Path, groups: Any, new_disk: Any, copy_run: Any) -> Callable[..., Any]:
    """Run the scenario and keep the run directory as each commit leaves it, with the checkpoint there is."""

    def run(*, threaded: bool, at: str = "commit") -> tuple[list[Transition], list[tuple[Path, int]]]:
        disk, numbers = new_disk(), itertools.count()
        live, snapshots, checkpoints = tmp_path / "live", [], [0]

        def keep() -> None:
            snapshots.append((copy_run(live, tmp_path / f"killed{next(numbers)}"), checkpoints[-1]))

        async def main() -> list[Transition]:
            storage = Recorded(Ledger.open(live, disk=disk, threaded=threaded))
            if at == "commit":
                disk.on_commit = keep
            else:
                disk.on_statement = lambda sql: keep() if sql == "COMMIT" else None
            buffer = ReplayBuffer(storage=storage)
            await scenario(buffer, groups, checkpoints.append)
            disk.on_commit, disk.on_statement = (lambda: None), (lambda sql: None)
            await buffer.close()
            return storage.transitions

        return asyncio.run(main()), snapshots

    return run


@pytest.mark.parametrize(("threaded", "at"), [(False, "commit"), (False, "statement"), (True, "commit")])
def test_a_kill_at_any_write_loses_nothing_skips_nothing_and_trains_nothing_twice(
    history: Any, groups: Any, open_buffer: Any, threaded: bool, at: str
) -> None:
    transitions, snapshots = history(threaded=threaded, at=at)
    assert len(snapshots) >= (len(transitions) if not threaded else 5)

    async def restart(directory: Path, checkpoint_step: int) -> None:
        buffer = open_buffer(directory, threaded=False)
        durable = transitions[: buffer.position]
        restored = buffer.restore(checkpoint_step, PATIENT)
        states = expected_states(durable, checkpoint_step)
        for task in RULES:
            mine = {group_id: state for group_id, state in states.items() if group_id.startswith(task)}
            found = buffer.conservation(task)
            found.check()
            assert {s: n for s, n in found.states.items() if n} == Counter(mine.values())
            assert restored.cursors.get(task, 0) == len(mine)
            assert restored.trained.get(task, 0) == sum(state is G.TRAINED for state in mine.values())
        buffer.tokens.check()
        assert all(n >= 0 for n in (buffer.tokens.held, *buffer.tokens.wasted.values()))

        played, trained = await finish(buffer, groups, checkpoint_step + 1)
        ids = [group[0].group_id for group in trained]
        # Finished rollouts are reused, all others are played again with the same ids, and each is trained once.
        assert sorted(played) == sorted(g for g, s in states.items() if s in (G.ABORTED, G.EXPIRED, G.MAX_TRIES))
        assert sorted(ids) == sorted(g for g, s in states.items() if s not in (G.TRAINED, G.DISCARDED))
        for group in trained:
            assert [rollout.rollout_id for rollout in group] == [f"{group[0].group_id}:{k}" for k in range(2)]
            assert all(rollout.reward is not None and rollout.response for rollout in group)
            assert group[0].ground_truth == {"answer": group[0].draw}
        buffer.conservation().check()
        buffer.tokens.check()
        assert buffer.tokens.held == 0
        await buffer.close()

    for directory, checkpoint_step in snapshots:
        asyncio.run(restart(directory, checkpoint_step))


def digest(buffer: ReplayBuffer) -> Any:
    """All that decides how the run goes on, in replay order. Takes the groups."""
    tokens = buffer.tokens
    counts = [buffer.conservation(task) for task in RULES]
    order = [buffer.get(99, task, status) for task in RULES for status in (S.ABORTED, S.EXPIRED, S.MAX_TRIES)]
    sizes = {task: buffer.count(task, S.COMPLETED) for task in RULES}
    batch = buffer.take_batch(sizes, train_step=9)
    return counts, (tokens.generated, tokens.trained, tokens.held, +tokens.wasted), order, batch


@pytest.mark.parametrize("checkpoint_step", [0, 1, 3])
def test_five_crashes_in_a_row_each_during_the_restart_end_as_one(
    history: Any, tmp_path: Path, open_buffer: Any, new_disk: Any, copy_run: Any, checkpoint_step: int
) -> None:
    _, snapshots = history(threaded=False)
    numbers = itertools.count()

    def final(directory: Path) -> Any:
        buffer = open_buffer(directory, threaded=False)
        restored = buffer.restore(checkpoint_step, PATIENT)
        found = digest(buffer)
        asyncio.run(buffer.close())
        return restored.cursors, restored.trained, found

    for directory, _ in snapshots[::4]:
        once = final(copy_run(directory, tmp_path / f"once{next(numbers)}"))
        for crash_after in range(1, 6):
            disk, commits, killed = new_disk(), itertools.count(1), []
            here, there = directory, tmp_path / f"again{next(numbers)}"

            def kill(here: Path = here, there: Path = there, commits: Any = commits, after: int = crash_after,
                     killed: list[Path] = killed) -> None:  # fmt: skip
                if next(commits) == after:
                    killed.append(copy_run(here, there))

            disk.on_commit = kill
            buffer = open_buffer(directory, threaded=False, disk=disk)
            buffer.restore(checkpoint_step, RULES)
            asyncio.run(buffer.close())
            directory = killed[0] if killed else directory
        assert final(directory) == once


def test_partial_tokens_continue_and_keep_their_versions(tmp_path: Path, groups: Any, open_buffer: Any) -> None:
    async def main() -> None:
        buffer = open_buffer(tmp_path)
        group = groups.new(0)
        buffer.draw(group, 1)
        groups.play(group, tokens=4, model_step=3, statuses=[S.ABORTED, S.COMPLETED])
        await groups.put(buffer, group, step=4)
        (same,) = buffer.get(1, "sums", S.ABORTED)
        await buffer.flush()
        await buffer.close()
        buffer = open_buffer(tmp_path)
        assert buffer.restore(3, RULES).returned == {G.RUNNING: 1}
        (back,) = buffer.get(1, "sums", S.ABORTED)
        assert back == same
        assert list(back[0].model_steps) == [3] * 4
        await buffer.close()

    asyncio.run(main())


def test_a_rollout_that_was_being_made_again_does_not_continue_from_its_stale_tokens(
    tmp_path: Path, groups: Any, open_buffer: Any
) -> None:
    async def main() -> None:
        buffer = open_buffer(tmp_path)
        group = groups.new(0)
        buffer.draw(group, 1)
        groups.play(group, tokens=4, model_step=0, statuses=[S.ABORTED, S.COMPLETED])
        group[1].response = group[1].response.append([1], [0.0], model_step=0)
        await groups.put(buffer, group, step=1)
        buffer.refresh_staleness(3)
        (running,) = buffer.get(1, "sums", S.EXPIRED)
        await buffer.flush()
        await buffer.close()
        buffer = open_buffer(tmp_path)
        buffer.restore(2, RULES)
        buffer.tokens.check()
        assert buffer.tokens.wasted == {"re_rolled": 9}
        (back,) = buffer.get(1, "sums", S.ABORTED)
        assert [(r.status, len(r.response), r.reward) for r in back] == [(S.ABORTED, 0, None)] * 2
        assert [r.rollout_id for r in back] == [r.rollout_id for r in running]
        await buffer.close()

    asyncio.run(main())


def test_dropped_tokens_are_durable_with_the_next_move_of_their_group(
    tmp_path: Path, groups: Any, open_buffer: Any
) -> None:
    async def main() -> None:
        buffer = open_buffer(tmp_path)
        for draw in range(2):
            group = groups.new(draw)
            buffer.draw(group, draw + 1)
            groups.play(group, tokens=5)
            buffer.forget_response(group[0], "retried")
            group[0].status = S.INIT
            if draw == 0:
                await groups.put(buffer, groups.play(group, tokens=2))
        await buffer.close()
        buffer = open_buffer(tmp_path)
        buffer.restore(0, RULES)
        # What the second group made was never acknowledged; it is as if it had not been made.
        assert (buffer.tokens.generated, buffer.tokens.held, buffer.tokens.wasted) == (12, 7, {"retried": 5})
        await buffer.close()

    asyncio.run(main())


def test_what_ran_is_played_first_in_the_order_of_its_drawing(tmp_path: Path, groups: Any, open_buffer: Any) -> None:
    async def main() -> None:
        buffer = open_buffer(tmp_path)
        for draw in range(5):
            buffer.draw(groups.new(draw), draw + 1)
        await buffer.flush()
        await buffer.close()
        buffer = open_buffer(tmp_path)
        restored = buffer.restore(0, RULES)
        assert restored.cursors == {"sums": 5}
        found = buffer.get(9, "sums", S.ABORTED)
        assert [group[0].group_id for group in found] == [f"sums:{draw}" for draw in range(5)]
        buffer.draw(groups.new(5), 6)
        await buffer.flush()
        await buffer.close()

    asyncio.run(main())


@pytest.mark.parametrize("order", ["fifo", "stalest_first"])
def test_staleness_goes_on_after_a_restart_as_if_there_had_been_none(
    tmp_path: Path, groups: Any, open_buffer: Any, order: str
) -> None:
    async def main() -> None:
        buffer = open_buffer(tmp_path, order=order)
        for draw, model_step in enumerate([3, 0, 2, 1, 0]):
            group = groups.new(draw)
            buffer.draw(group, draw + 1)
            await groups.put(buffer, groups.play(group, model_step=model_step), step=1, threshold=3)
        await buffer.close()
        rules = {"sums": StaleRule(3)}
        buffer, whole = open_buffer(tmp_path, order=order), ReplayBuffer(order=order)  # type: ignore[arg-type]
        buffer.restore(3, rules)
        for draw, model_step in enumerate([3, 0, 2, 1, 0]):
            group = groups.new(draw)
            whole.draw(group, draw + 1)
            await groups.put(whole, groups.play(group, model_step=model_step), step=1, threshold=3)
        for step in (4, 5):
            assert buffer.refresh_staleness(step) == whole.refresh_staleness(step)
            assert buffer.count_statuses("sums") == whole.count_statuses("sums")
        sizes = {"sums": buffer.count("sums", S.COMPLETED)}
        assert buffer.take_batch(sizes, train_step=5) == whole.take_batch(sizes, train_step=5)
        await buffer.close()

    asyncio.run(main())


def test_an_earlier_process_is_restored_before_anything_is_drawn(tmp_path: Path, groups: Any, open_buffer: Any) -> None:
    async def main() -> None:
        buffer = open_buffer(tmp_path)
        buffer.draw(groups.new(0), 1)
        await buffer.close()
        buffer = open_buffer(tmp_path)
        with pytest.raises(LedgerError, match="restore them before drawing more"):
            buffer.draw(groups.new(1), 2)
        await buffer.close()
        buffer = open_buffer(tmp_path)
        with pytest.raises(LedgerError, match=r"groups of tasks \['sums'\], this run has \['code'\]"):
            buffer.restore(0, {"code": StaleRule(1)})
        await buffer.close()

    asyncio.run(main())


def test_a_checkpoint_of_a_lineage_that_was_given_up_is_refused(tmp_path: Path, groups: Any, open_buffer: Any) -> None:
    async def main() -> None:
        positions = {0: 0}
        buffer = open_buffer(tmp_path)
        for step in (1, 2):
            group = groups.new(step - 1)
            buffer.draw(group, step)
            await groups.put(buffer, groups.play(group, model_step=step - 1), step=step)
            buffer.take_batch({"sums": 1}, train_step=step)
            buffer.commit(step)
            await buffer.flush()
            positions[step] = buffer.position
        await buffer.close()

        buffer = open_buffer(tmp_path)
        assert buffer.restore(1, RULES, position=positions[1]).returned == {G.TRAINED: 1}
        await buffer.flush()
        await buffer.close()

        buffer = open_buffer(tmp_path)
        with pytest.raises(LedgerError, match="checkpoint 2 belongs to a lineage that ended"):
            buffer.restore(2, RULES, position=positions[2])
        await buffer.close()
        buffer = open_buffer(tmp_path)
        with pytest.raises(LedgerError, match="ends at event 9, but checkpoint 3 was written after event 50"):
            buffer.restore(3, RULES, position=50)
        await buffer.close()
        buffer = open_buffer(tmp_path)
        assert buffer.restore(1, RULES, position=positions[1]).trained == {"sums": 1}
        await buffer.close()

    asyncio.run(main())


def test_contents_go_with_the_checkpoints_and_the_events_stay(tmp_path: Path, groups: Any, open_buffer: Any) -> None:
    async def main() -> None:
        buffer = open_buffer(tmp_path)
        sizes = []
        for step in range(1, 31):
            for draw in range(20 * (step - 1), 20 * step):
                group = groups.new(draw)
                buffer.draw(group, draw + 1)
                await groups.put(buffer, groups.play(group, tokens=500, model_step=step - 1), step=step)
            gone = groups.new(100_000 + step)
            buffer.draw(gone, 20 * step)
            buffer.discard(groups.play(gone), "sums", DiscardReason.FILTERED)
            await buffer.flush()
            buffer.take_batch({"sums": 20}, train_step=step)
            buffer.commit(step)
            await buffer.prune(step - 2)
            sizes.append((tmp_path / "ledger.sqlite").stat().st_size + (tmp_path / "ledger.sqlite-wal").stat().st_size)
        # What is held at once is flat; only the events grow.
        assert sizes[-1] < sizes[9] * 1.5
        await buffer.close()

        buffer = open_buffer(tmp_path)
        with pytest.raises(LedgerError, match="has no content any more; checkpoint 27 is older than what the ledger"):
            buffer.restore(27, RULES)
        await buffer.close()
        buffer = open_buffer(tmp_path)
        assert buffer.restore(28, RULES).returned == {G.TRAINED: 40}
        assert buffer.conservation().drawn == 630
        await buffer.close()

    asyncio.run(main())
