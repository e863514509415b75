"""Finished turns of groups that are being played: kept as they end, given back by a restart, gone with their group."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import IllegalTransition, LedgerError
from penstock.ports import FinishedTurn
from penstock.replay import DiscardReason, GroupState, ReplayBuffer, StaleRule
from penstock.rollout import (
    ROOT,
    UNKNOWN_STEP,
    WHOLE,
    FinishReason,
    Group,
    RolloutState,
    Segment,
    Status,
    Tokens,
    Turn,
    count_tokens,
)

S = Status
RULES = {"sums": StaleRule(9)}


class Player:
    """Plays one rollout as a transcript does: what it has in memory is what the rows must bring back."""

    def __init__(self, rollout: RolloutState) -> None:
        self.rollout = rollout
        self._numbers = itertools.count(1000 * rollout.draw)

    def tokens(self, n: int, *, model_step: int = 1, trained: bool = True) -> Tokens:
        return Tokens().append([next(self._numbers) for _ in range(n)], [-0.5] * n, model_step=model_step,
                               trained=trained)  # fmt: skip

    def turn(
        self, tokens: Tokens, *, kind: str = "generate", segment: int = 0, parent: int = ROOT, start: int = WHOLE
    ) -> FinishedTurn:
        """Append a turn to the record, and return it as it is to be kept."""
        rollout = self.rollout
        turn = Turn(kind, len(tokens), FinishReason.STOP if kind == "generate" else None, "said", segment)
        segments = [*rollout.segments]
        if segment == len(segments):
            segments.append(Segment(Tokens(), parent, start))
        old = segments[segment]
        joined = old.tokens.append(tokens.ids, tokens.logprobs, steps=tokens.steps)
        joined = Tokens(joined.ids, joined.logprobs, old.tokens.mask + tokens.mask, joined.steps)
        segments[segment] = Segment(joined, old.parent, old.start)
        rollout.segments, rollout.turns = tuple(segments), (*rollout.turns, turn)
        return FinishedTurn(
            task_name=rollout.task_name,
            group_id=rollout.group_id,
            rollout_id=rollout.rollout_id,
            index=len(rollout.turns) - 1,
            turn=turn,
            tokens=tokens,
            parent=old.parent,
            start=old.start,
        )


def record(rollout: RolloutState) -> Any:
    return rollout.segments, rollout.turns


def restored(buffer: ReplayBuffer, checkpoint_step: int = 0) -> dict[str, Group]:
    """What a restart gives back to be played again."""
    buffer.restore(checkpoint_step, RULES)
    buffer.conservation().check()
    buffer.tokens.check()
    return {group[0].group_id: group for group in buffer.get(99, "sums", S.ABORTED)}


def rows(directory: Path) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(directory / "ledger.sqlite")
    try:
        return connection.execute("SELECT sequence, rollout_id, place FROM turns ORDER BY id").fetchall()
    finally:
        connection.close()


def test_a_restart_gives_back_every_finished_turn(tmp_path: Path, groups: Any, open_buffer: Any) -> None:
    async def main() -> None:
        buffer = open_buffer(tmp_path)
        group = groups.new(0)
        buffer.draw(group, 1)
        first, second = (Player(rollout) for rollout in group)
        await buffer.append(first.turn(first.tokens(3)))
        await buffer.append(first.turn(first.tokens(2, trained=False), kind="tool"))
        await buffer.append(second.turn(second.tokens(4, model_step=2)))
        await buffer.append(first.turn(first.tokens(5, model_step=2)), durable=True)
        await buffer.close()
        buffer = open_buffer(tmp_path)
        back = restored(buffer)["sums:0"]
        assert [record(rollout) for rollout in back] == [record(rollout) for rollout in group]
        assert [rollout.status for rollout in back] == [S.ABORTED] * 2
        assert (buffer.tokens.generated, buffer.tokens.held) == (14, 14)
        await buffer.flush()
        assert not rows(tmp_path)
        await buffer.close()

    asyncio.run(main())


def test_segments_come_back_as_the_tree_they_are(tmp_path: Path, groups: Any, open_buffer: Any) -> None:
    async def main() -> None:
        buffer = open_buffer(tmp_path)
        group = groups.new(0)
        buffer.draw(group, 1)
        player = Player(group[0])
        await buffer.append(player.turn(player.tokens(4)))
        await buffer.append(player.turn(player.tokens(3), segment=1, parent=0, start=2))
        await buffer.append(player.turn(player.tokens(2), segment=2, parent=ROOT, start=1))
        await buffer.append(player.turn(player.tokens(1)))
        await buffer.append(player.turn(player.tokens(1), segment=1, parent=0, start=2), durable=True)
        await buffer.close()
        buffer = open_buffer(tmp_path)
        back = restored(buffer)["sums:0"]
        assert record(back[0]) == record(group[0])
        assert [back[0].context_ids(i) for i in range(3)] == [group[0].context_ids(i) for i in range(3)]
        await buffer.close()
        # They are content now, and a second restart reads them as such.
        buffer = open_buffer(tmp_path)
        assert record(restored(buffer)["sums:0"][0]) == record(group[0])
        await buffer.close()

    asyncio.run(main())


def test_segments_begun_side_by_side_may_finish_in_any_order(tmp_path: Path, groups: Any, open_buffer: Any) -> None:
    async def main() -> None:
        buffer = open_buffer(tmp_path)
        group = groups.new(0)
        buffer.draw(group, 1)
        player = Player(group[0])
        trunk, late, early = (player.tokens(n) for n in (4, 3, 2))
        place: dict[str, Any] = {"task_name": "sums", "group_id": "sums:0", "rollout_id": "sums:0:0"}
        for index, (segment, tokens, start) in enumerate([(0, trunk, WHOLE), (2, early, 4), (1, late, 3)]):
            turn = Turn("generate", len(tokens), FinishReason.STOP, "", segment)
            parent = 0 if segment else ROOT
            await buffer.append(
                FinishedTurn(**place, index=index, turn=turn, tokens=tokens, parent=parent, start=start), durable=True
            )
        await buffer.close()
        buffer = open_buffer(tmp_path)
        back = restored(buffer)["sums:0"][0]
        assert back.segments == (Segment(trunk), Segment(late, 0, 3), Segment(early, 0, 4))
        await buffer.close()

    asyncio.run(main())


def test_a_turn_stands_for_the_one_in_its_place_and_all_after_it(tmp_path: Path, groups: Any, open_buffer: Any) -> None:
    """An answer that failed and is made again. What it had was never counted, so nothing is wasted."""

    async def main() -> None:
        buffer = open_buffer(tmp_path)
        group = groups.new(0)
        buffer.draw(group, 1)
        player = Player(group[0])
        for n in (3, 4, 5):
            await buffer.append(player.turn(player.tokens(n)))
        buffer.forget_response(group[0], "retried")
        for n in (1, 2):
            await buffer.append(player.turn(player.tokens(n)))
        await buffer.flush()
        await buffer.close()
        buffer = open_buffer(tmp_path)
        assert record(restored(buffer)["sums:0"][0]) == record(group[0])
        assert (buffer.tokens.generated, +buffer.tokens.wasted) == (3, {})
        await buffer.close()

    asyncio.run(main())


@pytest.mark.parametrize("continued", [True, False])
def test_an_interrupted_turn_is_continued_or_made_again(
    tmp_path: Path, groups: Any, open_buffer: Any, continued: bool
) -> None:
    """The tokens it had were counted when it was stored: they go on, or they are wasted."""

    async def main() -> None:
        buffer = open_buffer(tmp_path)
        group = groups.new(0)
        buffer.draw(group, 1)
        player = Player(group[0])
        done, begun = player.tokens(3), player.tokens(2)
        player.turn(done)
        player.turn(begun)
        interrupted = Turn("generate", 2, FinishReason.ABORT)
        group[0].turns = (group[0].turns[0], interrupted)
        group[0].status, group[1].status = S.ABORTED, S.ABORTED
        buffer.put(group, "sums", model_step=1, current_train_step=2, stale_threshold=9)
        (group,) = buffer.get(1, "sums", S.ABORTED)
        more = player.tokens(4, model_step=2)
        whole = begun.append(more.ids, more.logprobs, steps=more.steps) if continued else more
        group[0].turns, group[0].response = group[0].turns[:1], done
        await buffer.append(Player.turn(player, whole), durable=True)
        await buffer.close()
        buffer = open_buffer(tmp_path)
        back = restored(buffer, checkpoint_step=1)["sums:0"][0]
        assert record(back) == record(group[0])
        tokens = buffer.tokens
        assert (tokens.generated, tokens.held, +tokens.wasted) == (
            9,
            9 if continued else 7,
            {} if continued else {"aborted": 2},
        )
        await buffer.close()
        buffer = open_buffer(tmp_path)
        buffer.restore(1, RULES)
        assert (buffer.tokens.generated, buffer.tokens.held) == (9, 9 if continued else 7)
        await buffer.close()

    asyncio.run(main())


def test_a_rollout_that_is_made_again_because_it_expired_has_its_new_turns_only(
    tmp_path: Path, groups: Any, open_buffer: Any
) -> None:
    async def main() -> None:
        buffer = open_buffer(tmp_path)
        group = groups.new(0)
        buffer.draw(group, 1)
        await groups.put(buffer, groups.play(group, tokens=4, model_step=0), step=1, threshold=2)
        buffer.refresh_staleness(3)
        (group,) = buffer.get(1, "sums", S.EXPIRED)
        for rollout in group:
            buffer.forget_response(rollout, "re_rolled")
        player = Player(group[1])
        await buffer.append(player.turn(player.tokens(3, model_step=2)), durable=True)
        await buffer.close()
        buffer = open_buffer(tmp_path)
        back = restored(buffer, checkpoint_step=2)["sums:0"]
        assert [record(rollout) for rollout in back] == [((), ()), record(group[1])]
        assert (buffer.tokens.generated, buffer.tokens.held, buffer.tokens.wasted) == (11, 3, {"re_rolled": 8})
        await buffer.close()

    asyncio.run(main())


def test_tokens_of_unknown_origin_are_those_of_the_step_in_which_the_attempt_began(
    tmp_path: Path, groups: Any, open_buffer: Any
) -> None:
    async def main() -> None:
        buffer = open_buffer(tmp_path)
        buffer.refresh_staleness(4)
        group = groups.new(0)
        buffer.draw(group, 1)
        player = Player(group[0])
        await buffer.append(player.turn(player.tokens(3, model_step=UNKNOWN_STEP)), durable=True)
        await buffer.close()
        buffer = open_buffer(tmp_path)
        assert restored(buffer, checkpoint_step=3)["sums:0"][0].model_steps.tolist() == [3, 3, 3]
        await buffer.close()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["completed", "aborted", "discarded"])
def test_a_group_that_leaves_takes_its_turns_with_it_and_only_its_own(
    tmp_path: Path, groups: Any, open_buffer: Any, new_disk: Any, how: str
) -> None:
    async def main() -> None:
        disk = new_disk()
        buffer = open_buffer(tmp_path, disk=disk, threaded=False)
        made = [groups.new(draw) for draw in range(3)]
        for group in made:
            buffer.draw(group, group[0].draw + 1)
        for group in made[:2]:
            player = Player(group[0])
            await buffer.append(player.turn(player.tokens(3)))
        assert len(rows(tmp_path)) == 2
        disk.statements.clear()
        if how == "discarded":
            buffer.discard(made[0], "sums", DiscardReason.CANCELLED, train_step=1)
        else:
            statuses = [S.ABORTED, S.COMPLETED] if how == "aborted" else None
            await groups.put(buffer, groups.play(made[0], statuses=statuses))
        assert rows(tmp_path) == [(1, "sums:1:0", 0)]
        deletes = [sql for sql in disk.statements if sql.startswith("DELETE FROM turns")]
        assert len(deletes) == 1 and disk.statements.count("COMMIT") == 1
        # Who has none pays nothing.
        disk.statements.clear()
        await groups.put(buffer, groups.play(made[2]))
        assert not [sql for sql in disk.statements if "turns" in sql]
        await buffer.close()

    asyncio.run(main())


def test_a_turn_of_a_group_that_is_not_played_is_refused(tmp_path: Path, groups: Any, open_buffer: Any) -> None:
    async def main() -> None:
        for buffer in (open_buffer(tmp_path), ReplayBuffer()):
            group = groups.new(0)
            buffer.draw(group, 1)
            player = Player(group[0])
            turn = player.turn(player.tokens(3))
            with pytest.raises(IllegalTransition, match="'sums:0' has no rollout 'sums:0:7'"):
                await buffer.append(msgspec.structs.replace(turn, rollout_id="sums:0:7"))
            with pytest.raises(IllegalTransition, match="'sums:0' of task 'code' is not running"):
                await buffer.append(msgspec.structs.replace(turn, task_name="code"))
            with pytest.raises(IllegalTransition, match="'sums:5' of task 'sums' is not running: not held"):
                await buffer.append(msgspec.structs.replace(turn, group_id="sums:5"))
            await groups.put(buffer, groups.play(group))
            with pytest.raises(IllegalTransition, match="is not running: running@0 -> completed@1"):
                await buffer.append(turn)
            await buffer.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("UPDATE turns SET place = 0 WHERE id = 2", "does not have its checksum"),
        ("DELETE FROM turns WHERE id = 2", "turn 1 of rollout 'sums:0:0' is missing"),
        ("UPDATE turns SET content = zeroblob(9)", "does not have its checksum"),
    ],
)
def test_a_turn_that_was_changed_or_lost_is_named(
    tmp_path: Path, groups: Any, open_buffer: Any, sql: str, said: str
) -> None:
    async def main() -> None:
        buffer = open_buffer(tmp_path)
        group = groups.new(0)
        buffer.draw(group, 1)
        player = Player(group[0])
        for _ in range(3):
            await buffer.append(player.turn(player.tokens(2)), durable=True)
        await buffer.close()
        connection = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
        connection.execute(sql)
        connection.close()
        buffer = open_buffer(tmp_path)
        with pytest.raises(LedgerError, match=f"is damaged: .*{said}"):
            buffer.restore(0, RULES)
        await buffer.close()

    asyncio.run(main())


class Step(msgspec.Struct, frozen=True):
    """What happens next to one of the groups."""

    draw: int
    act: str
    rollout: int = 0
    tokens: int = 1


steps = st.lists(
    st.builds(
        Step,
        st.integers(0, 2),
        st.sampled_from(["turn", "turn", "turn", "branch", "again", "store", "abort", "discard", "flush"]),
        st.integers(0, 1),
        st.integers(1, 3),
    ),
    max_size=14,
)


async def play(buffer: ReplayBuffer, groups: Any, plan: list[Step], after: Callable[[dict[str, Any]], None]) -> None:
    """Follow the plan; after each write, tell what every group that is played has in memory."""
    playing: dict[int, Group] = {}
    for draw in range(3):
        playing[draw] = groups.new(draw)
        buffer.draw(playing[draw], draw + 1)
    for step in plan:
        group = playing.get(step.draw)
        if group is None:
            continue
        player = Player(group[step.rollout])
        player._numbers = itertools.count(1000 * (len(player.rollout.turns) + 1))
        if step.act in ("turn", "branch"):
            segments = len(player.rollout.segments)
            place = {"segment": segments, "parent": 0, "start": 1} if step.act == "branch" and segments else {}
            await buffer.append(player.turn(player.tokens(step.tokens), **place))
        elif step.act == "again":
            buffer.forget_response(player.rollout, "retried")
        elif step.act == "discard":
            buffer.discard(group, "sums", DiscardReason.CANCELLED, train_step=1)
            del playing[step.draw]
        elif step.act in ("store", "abort"):
            for rollout in group:
                rollout.status = S.COMPLETED if step.act == "store" else S.ABORTED
            buffer.put(group, "sums", model_step=1, current_train_step=2, stale_threshold=9)
            if step.act == "abort":
                (again,) = buffer.get(1, "sums", S.ABORTED)
                assert again[0].group_id == group[0].group_id
                playing[step.draw] = again
            else:
                del playing[step.draw]
        else:
            await buffer.flush()
        after({f"sums:{draw}": [record(rollout) for rollout in group] for draw, group in playing.items()})


@pytest.mark.parametrize("threaded", [False, True])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=steps)
def test_a_crash_after_any_write_keeps_every_turn_that_was_flushed_and_invents_none(
    tmp_path_factory: Any, groups: Any, open_buffer: Any, new_disk: Any, copy_run: Any, threaded: bool, plan: list[Step]
) -> None:
    home = tmp_path_factory.mktemp("turns")
    disk, told, kills = new_disk(), [{}], []

    def killed() -> None:
        kills.append((copy_run(home / "live", home / f"killed{len(kills)}"), len(told) - 1))

    async def main() -> None:
        buffer = open_buffer(home / "live", disk=disk, threaded=threaded)
        disk.on_commit = killed
        await play(buffer, groups, plan, told.append)
        await buffer.flush()
        kills.append((copy_run(home / "live", home / "end"), len(told)))
        disk.on_commit = lambda: None
        await buffer.close()

    asyncio.run(main())
    for directory, known in kills:
        buffer = open_buffer(directory, threaded=False)
        back = restored(buffer)
        for group_id, group in back.items():
            mine = [record(rollout) for rollout in group]
            states = [record_of[group_id] for record_of in told if group_id in record_of]
            blank = [((), ())] * 2
            # Rollout by rollout, what is there is what it had at some time; forgotten turns may come back.
            for number, found in enumerate(mine):
                assert found in [state[number] for state in states] + [blank[number]]
            durable = told[-1] if known == len(told) else told[known] if not threaded else {}
            for now, found in zip(durable.get(group_id, []), mine, strict=False):
                assert found[1][: len(now[1])] == now[1], "a turn that was flushed is lost"
        assert buffer.tokens.held == sum(count_tokens(group) for group in back.values()) + sum(
            count_tokens(group)
            for group in buffer.take_batch({"sums": buffer.count("sums", S.COMPLETED)}, train_step=3)["sums"]
        )
        asyncio.run(buffer.close())


def test_a_crash_during_the_restart_that_gives_turns_back_changes_nothing(
    tmp_path: Path, groups: Any, open_buffer: Any, new_disk: Any, copy_run: Any
) -> None:
    async def main() -> list[Group]:
        buffer = open_buffer(tmp_path / "live")
        made = [groups.new(draw) for draw in range(3)]
        for group in made:
            buffer.draw(group, group[0].draw + 1)
        for rollout in itertools.chain(*made):
            player = Player(rollout)
            await buffer.append(player.turn(player.tokens(2)))
            await buffer.append(player.turn(player.tokens(3)))
        await buffer.close()
        return made

    made = asyncio.run(main())
    kills: list[Path] = []
    disk = new_disk()
    disk.on_commit = lambda: kills.append(copy_run(tmp_path / "live", tmp_path / f"killed{len(kills)}"))
    buffer = open_buffer(tmp_path / "live", disk=disk, threaded=False)
    buffer.restore(0, RULES)
    asyncio.run(buffer.close())
    assert len(kills) >= 4
    for directory in kills:
        buffer = open_buffer(directory, threaded=False)
        back = restored(buffer)
        for group in made:
            assert [record(rollout) for rollout in back[group[0].group_id]] == [record(rollout) for rollout in group]
        assert (buffer.tokens.generated, buffer.tokens.held) == (30, 30)
        assert not rows(directory)
        asyncio.run(buffer.close())


def test_states_of_groups_do_not_depend_on_their_turns(tmp_path: Path, groups: Any, open_buffer: Any) -> None:
    async def main() -> None:
        buffer = open_buffer(tmp_path)
        group = groups.new(0)
        buffer.draw(group, 1)
        before = buffer.position
        player = Player(group[0])
        await buffer.append(player.turn(player.tokens(2)), durable=True)
        assert buffer.position == before
        assert buffer.state_count("sums", GroupState.RUNNING) == 1
        await buffer.close()

    asyncio.run(main())
