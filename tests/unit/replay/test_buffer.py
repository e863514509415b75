from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from penstock.errors import ConfigError, IllegalTransition, NotReady
from penstock.replay import DiscardReason, GroupState, ReplayBuffer, ReplayBufferConfig, StaleRule
from penstock.replay.shelf import Shelf
from penstock.rollout import UNKNOWN_STEP, Failure, FailureReason, Group, Status, Tokens

S = Status


def ids(found: list[Group]) -> list[str]:
    return [group[0].group_id for group in found]


async def fill(buffer: ReplayBuffer, groups: Any, model_steps: list[int], **more: Any) -> list[Group]:
    """One completed group for each of these model steps, drawn in order."""
    made = [groups.new(draw) for draw in range(len(model_steps))]
    for group in made:
        buffer.draw(group, group[0].draw + 1)
    for group, model_step in zip(made, model_steps, strict=True):
        await groups.put(buffer, groups.play(group, model_step=model_step), **more)
    return made


def test_completed_groups_are_trained_in_the_order_of_their_drawing(groups: Any) -> None:
    async def main() -> None:
        buffer = ReplayBuffer()
        made = [groups.new(draw) for draw in range(4)]
        for group in made:
            buffer.draw(group, group[0].draw + 1)
        for draw in (3, 1, 0, 2):
            await groups.put(buffer, groups.play(made[draw]))
        assert ids(buffer.take_batch({"sums": 3}, train_step=1)["sums"]) == ["sums:0", "sums:1", "sums:2"]

    asyncio.run(main())


def test_stalest_first_takes_what_expires_first_then_what_was_drawn_first(groups: Any) -> None:
    async def main() -> None:
        buffer = ReplayBuffer(order="stalest_first")
        await fill(buffer, groups, [2, 1, 2, 1], step=3, threshold=5)
        batch = buffer.take_batch({"sums": 4}, train_step=3)
        assert ids(batch["sums"]) == ["sums:1", "sums:3", "sums:0", "sums:2"]

    asyncio.run(main())


def test_a_batch_is_taken_whole_or_not_at_all(groups: Any) -> None:
    async def main() -> None:
        buffer = ReplayBuffer()
        await fill(buffer, groups, [0, 0])
        with pytest.raises(NotReady, match=r"train step 1: .*'sums': '2 of 2', 'code': '0 of 1'"):
            buffer.take_batch({"sums": 2, "code": 1}, train_step=1)
        assert buffer.count("sums", S.COMPLETED) == 2
        assert buffer.is_ready({"sums": 2}) and not buffer.is_ready({"sums": 3})

    asyncio.run(main())


def test_waiting_for_a_batch_ends_with_the_group_that_completes_it(groups: Any) -> None:
    async def main() -> None:
        buffer = ReplayBuffer()
        waiting = asyncio.create_task(buffer.wait_ready({"sums": 2}))
        await fill(buffer, groups, [0])
        await asyncio.sleep(0)
        assert not waiting.done()
        group = groups.new(7)
        buffer.draw(group, 8)
        await groups.put(buffer, groups.play(group))
        await waiting

    asyncio.run(main())


def test_only_what_arrives_or_leaves_wakes_those_who_wait(groups: Any) -> None:
    async def main() -> None:
        buffer = ReplayBuffer()

        async def wakes(act: Callable[[], object]) -> bool:
            waiting = asyncio.create_task(buffer.changed.wait())
            await asyncio.sleep(0)
            act()
            await asyncio.sleep(0)
            woken = waiting.done()
            waiting.cancel()
            return woken

        first, second = groups.new(0), groups.new(1)
        assert not await wakes(lambda: buffer.draw(first, 1))
        buffer.draw(second, 2)
        groups.play(first)
        assert await wakes(lambda: buffer.put(first, "sums", model_step=0, current_train_step=1, stale_threshold=2))
        assert not await wakes(lambda: buffer.refresh_staleness(1))
        assert await wakes(lambda: buffer.take_batch({"sums": 1}, train_step=1))
        assert not await wakes(lambda: buffer.commit(1))
        assert await wakes(lambda: buffer.discard(second, "sums", DiscardReason.CANCELLED))

    asyncio.run(main())


def test_a_refused_step_gives_its_groups_back_in_their_places(groups: Any) -> None:
    async def main() -> None:
        buffer = ReplayBuffer()
        await fill(buffer, groups, [0, 0, 0])
        first = ids(buffer.take_batch({"sums": 2}, train_step=1)["sums"])
        assert buffer.return_lease(1) == {"sums": 2}
        assert ids(buffer.take_batch({"sums": 3}, train_step=1)["sums"])[:2] == first
        buffer.commit(1)
        assert buffer.return_lease(1) == {}
        assert buffer.state_count("sums", GroupState.TRAINED) == 3

    asyncio.run(main())


def test_a_step_without_a_batch_cannot_be_committed(groups: Any) -> None:
    async def main() -> None:
        buffer = ReplayBuffer()
        await fill(buffer, groups, [0, 0])
        with pytest.raises(IllegalTransition, match="train step 1 has no batch to commit"):
            buffer.commit(1)
        buffer.take_batch({"sums": 1}, train_step=1)
        buffer.commit(1)
        with pytest.raises(IllegalTransition, match="train step 1 has no batch to commit"):
            buffer.commit(1)
        buffer.take_batch({"sums": 1}, train_step=2)
        buffer.return_lease(2)
        with pytest.raises(IllegalTransition, match="train step 2 has no batch to commit"):
            buffer.commit(2)
        assert buffer.state_count("sums", GroupState.TRAINED) == buffer.count("sums", S.COMPLETED) == 1

    asyncio.run(main())


def test_a_step_has_one_batch(groups: Any) -> None:
    async def main() -> None:
        buffer = ReplayBuffer()
        await fill(buffer, groups, [0, 0])
        buffer.take_batch({"sums": 1}, train_step=1)
        with pytest.raises(IllegalTransition, match="train step 1 has a batch of 1 groups already"):
            buffer.take_batch({"sums": 1}, train_step=1)
        assert buffer.count("sums", S.COMPLETED) == 1
        buffer.return_lease(1)
        assert len(buffer.take_batch({"sums": 2}, train_step=1)["sums"]) == 2

    asyncio.run(main())


@pytest.mark.parametrize("order", ["fifo", "stalest_first"])
def test_a_group_that_is_too_stale_is_never_handed_out(groups: Any, order: Any) -> None:
    async def main() -> None:
        buffer = ReplayBuffer(order=order)
        await fill(buffer, groups, [3, 1, 3], step=1, threshold=2)
        with pytest.raises(
            IllegalTransition, match=r"'sums:1' is too stale for train step 4 \(.* serve is 3\); refresh"
        ):
            buffer.take_batch({"sums": 3}, train_step=4)
        assert buffer.count("sums", S.COMPLETED) == 3
        assert buffer.refresh_staleness(4) == {"sums": 1}
        assert ids(buffer.take_batch({"sums": 2}, train_step=4)["sums"]) == ["sums:0", "sums:2"]

    asyncio.run(main())


def test_what_is_too_stale_expires_and_the_rest_is_not_touched(groups: Any) -> None:
    async def main() -> None:
        buffer = ReplayBuffer()
        await fill(buffer, groups, [0, 1, 2, 0], step=1, threshold=2)
        assert buffer.refresh_staleness(2) == {"sums": 0}
        assert buffer.refresh_staleness(3) == {"sums": 2}
        assert buffer.count_statuses("sums") == {S.COMPLETED: 2, S.ABORTED: 0, S.EXPIRED: 2, S.MAX_TRIES: 0}
        assert ids(buffer.get(5, "sums", S.EXPIRED)) == ["sums:0", "sums:3"]
        assert ids(buffer.take_batch({"sums": 2}, train_step=3)["sums"]) == ["sums:1", "sums:2"]

    asyncio.run(main())


def test_a_group_that_is_too_stale_when_it_is_stored_never_counts_as_completed(groups: Any) -> None:
    async def main() -> None:
        buffer = ReplayBuffer()
        keep, drop = groups.new(0), groups.new(1)
        buffer.draw(keep, 1)
        buffer.draw(drop, 2)
        assert await groups.put(buffer, groups.play(keep), step=9) is S.EXPIRED
        assert await groups.put(buffer, groups.play(drop), step=9, discard_expired=True) is S.EXPIRED
        assert buffer.count("sums", S.EXPIRED) == 1
        assert buffer.discarded("sums") == {DiscardReason.EXPIRED: 1}
        assert buffer.story("sums:0") == "running@0 -> completed@9 -> expired@9"

    asyncio.run(main())


def test_missing_token_versions_are_those_of_the_start_of_the_attempt(groups: Any) -> None:
    async def main() -> None:
        buffer = ReplayBuffer()
        group = groups.new(0)
        buffer.draw(group, 1)
        groups.play(group, model_step=UNKNOWN_STEP)
        buffer.put(group, "sums", model_step=4, current_train_step=6, stale_threshold=9)
        await buffer.flush()
        assert [list(rollout.model_steps) for rollout in group] == [[4, 4, 4]] * 2

    asyncio.run(main())


def test_completed_groups_are_not_played_again() -> None:
    with pytest.raises(ValueError, match="take_batch"):
        ReplayBuffer().get(1, "sums", S.COMPLETED)


def test_a_group_cannot_be_drawn_twice_or_stored_without_being_drawn(groups: Any) -> None:
    async def main() -> None:
        buffer = ReplayBuffer()
        buffer.draw(groups.new(0), 1)
        with pytest.raises(IllegalTransition, match="'sums:0' is drawn twice: running@0"):
            buffer.draw(groups.new(0), 1)
        with pytest.raises(IllegalTransition, match="'sums:1' of task 'sums' is not running: not held"):
            await groups.put(buffer, groups.play(groups.new(1)))
        group = groups.play(groups.new(0))
        await groups.put(buffer, group)
        with pytest.raises(IllegalTransition, match="is not running: running@0 -> completed@1"):
            await groups.put(buffer, group)

    asyncio.run(main())


def test_a_failed_group_is_not_stored(groups: Any) -> None:
    async def main() -> None:
        buffer = ReplayBuffer()
        group = groups.new(0)
        buffer.draw(group, 1)
        group[0].fail(Failure(FailureReason.ENGINE_DEADLINE, "the engine said nothing"))
        group[1].status = S.COMPLETED
        with pytest.raises(ValueError, match="such a group is discarded, not stored"):
            await groups.put(buffer, group)

    asyncio.run(main())


def test_the_tokens_add_up_through_every_kind_of_waste(groups: Any) -> None:
    async def main() -> None:
        buffer = ReplayBuffer()
        made = [groups.new(draw) for draw in range(4)]
        for group in made:
            buffer.draw(group, group[0].draw + 1)
        # Failed answers that were made again, before anything was counted.
        groups.play(made[0], tokens=5)
        assert buffer.forget_response(made[0][0], "retried") == 5
        buffer.tokens.check()
        made[0][0].status = S.INIT
        await groups.put(buffer, groups.play(made[0], tokens=2))
        buffer.tokens.check()
        assert (buffer.tokens.generated, buffer.tokens.held, buffer.tokens.wasted["retried"]) == (12, 7, 5)
        await groups.put(buffer, groups.play(made[1], statuses=[S.ABORTED, S.COMPLETED]))
        buffer.discard(groups.play(made[2]), "sums", DiscardReason.FILTERED)
        await buffer.flush()
        buffer.tokens.check()
        buffer.take_batch({"sums": 1}, train_step=1)
        buffer.commit(1)
        buffer.refresh_staleness(9)
        (again,) = buffer.get(1, "sums", S.EXPIRED)
        for rollout in again:
            buffer.forget_response(rollout, "re_rolled")
            assert rollout.response == Tokens()
        buffer.tokens.check()
        assert (buffer.tokens.trained, buffer.tokens.held) == (7, 0)
        assert buffer.tokens.wasted == {"retried": 5, "filtered": 6, "re_rolled": 6}

    asyncio.run(main())


def test_a_refresh_looks_only_at_groups_that_change_and_a_count_at_none(groups: Any) -> None:
    """Counted, not timed: how many groups the shelves hand out."""

    async def main() -> None:
        touched = []
        real = Shelf.pop_expired

        class Counting(Shelf):
            def pop_expired(self, train_step: int) -> Any:
                for entry in real(self, train_step):
                    touched.append(entry.group_id)
                    yield entry

        for held in (10, 1000):
            buffer = ReplayBuffer()
            buffer._shelves._shelves["sums", GroupState.COMPLETED] = Counting("fifo")
            await fill(buffer, groups, [5] * held + [0], step=1, threshold=2)
            touched.clear()
            buffer.refresh_staleness(2)
            assert touched == []
            buffer.refresh_staleness(3)
            assert touched == [f"sums:{held}"]

    asyncio.run(main())


def test_a_new_run_has_nothing_to_restore() -> None:
    buffer = ReplayBuffer()
    restored = buffer.restore(0, {"sums": StaleRule(1)})
    assert (restored.cursors, restored.trained, restored.returned, buffer.position) == ({}, {}, {}, 0)


def test_sqlite_storage_without_a_run_directory_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a run directory"):
        ReplayBufferConfig(storage="sqlite").build()
    assert isinstance(ReplayBufferConfig(order="stalest_first").build(), ReplayBuffer)
