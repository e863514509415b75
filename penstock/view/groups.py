"""Where the groups of a run are, and what was not trained: the ledger, asked through its indexes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import LedgerError
from penstock.replay import DiscardReason, GroupState
from penstock.replay.ledger import LEDGER_FILE
from penstock.replay.lock import LOCK_FILE, has_ended, read_holder
from penstock.replay.schema import CURSORS, LIVE
from penstock.replay.search import Asked, find_groups
from penstock.replay.story import group_stories, group_story, open_read_only

WAITING = [state for state in GroupState if state not in (GroupState.TRAINED, GroupState.DISCARDED)]
PAGE = 50


class Cost(msgspec.Struct, frozen=True):
    """Groups that were not trained for one reason, and what they had cost."""

    groups: int
    tokens: int

    @property
    def tokens_per_group(self) -> float:
        return self.tokens / self.groups if self.groups else 0.0


class Groups:
    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._costs: tuple[int, dict[str, Any]] | None = None

    @property
    def exist(self) -> bool:
        return (self._run_dir / LEDGER_FILE).is_file()

    @property
    def driver_is_gone(self) -> bool:
        """Whether the process that wrote the ledger has ended."""
        holder = read_holder(self._run_dir / LOCK_FILE)
        return holder is None or has_ended(holder)

    def states(self) -> dict[str, dict[str, int]]:
        """Groups by task and state, counted in the indexes alone."""
        if not self.exist:
            return {}
        with open_read_only(self._run_dir) as connection:
            trained = connection.execute(
                "SELECT task, count(*) FROM groups INDEXED BY groups_trained WHERE state = 'trained' GROUP BY task"
            ).fetchall()
            tasks = [row.task for row in CURSORS.read(connection, self._run_dir / LEDGER_FILE)]
            live = connection.execute(f"SELECT task, state, count(*) FROM groups WHERE {LIVE} GROUP BY task, state")
            found = {task: {state.value: 0 for state in GroupState} for task in tasks}
            for task, state, count in live.fetchall():
                found[task][state] = count
            gone = connection.execute(
                "SELECT task, count(*) FROM groups INDEXED BY groups_discarded WHERE state = 'discarded' GROUP BY task"
            )
            for task, count in gone.fetchall():
                found[task][GroupState.DISCARDED.value] = count
            for task, count in trained:
                found[task][GroupState.TRAINED.value] = count
        return found

    def untrained(self) -> dict[str, Any]:
        """Discarded groups by reason with their tokens, tokens that living groups lost, and the length of what was
        dropped beside that of what was trained."""
        if not self.exist:
            return {"discarded": {}, "wasted": {}, "trained": None}
        with open_read_only(self._run_dir) as connection:
            (position,) = connection.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()
            if self._costs is not None and self._costs[0] == position:
                return self._costs[1]
            rows = connection.execute(
                "SELECT reason, count(*), sum(tokens) FROM groups WHERE state = 'discarded' GROUP BY reason"
            ).fetchall()
            wasted = connection.execute("SELECT reason, sum(tokens) FROM waste GROUP BY reason").fetchall()
            trained = connection.execute(
                "SELECT count(*), coalesce(sum(tokens), 0) FROM (SELECT tokens FROM groups WHERE state = 'trained' "
                "ORDER BY sequence DESC LIMIT 10000)"
            ).fetchone()
        discarded = {reason: Cost(count, tokens or 0) for reason, count, tokens in rows}
        found = {
            "discarded": {
                reason: {"groups": cost.groups, "tokens": cost.tokens, "tokens_per_group": cost.tokens_per_group}
                for reason, cost in discarded.items()
            },
            "wasted": dict(wasted),
            "trained": {"tokens_per_group": trained[1] / trained[0]} if trained[0] else None,
        }
        self._costs = (position, found)
        return found

    def page(self, state: str, reason: str | None, task: str | None, after: int) -> list[dict[str, Any]]:
        """Raises ValueError for a state or reason that there is not."""
        if not self.exist:
            return []
        asked = Asked(GroupState(state), task=task, reason=None if reason is None else DiscardReason(reason))
        return find_groups(self._run_dir, asked, after=after, limit=PAGE)

    def story(self, group_id: str) -> dict[str, Any] | None:
        """None when there is no such group."""
        if not self.exist:
            return None
        try:
            return group_story(self._run_dir, group_id)
        except LedgerError:
            return None

    def batch(self, train_step: int) -> list[dict[str, Any]]:
        """The groups of a train step: when each was drawn, finished, taken and trained, and by which weights."""
        if not self.exist:
            return []
        found = [
            group["group_id"]
            for state in (GroupState.TRAINED, GroupState.LEASED)
            for group in find_groups(self._run_dir, Asked(state, train_step=train_step), limit=512)
        ]
        return [
            {
                **{name: story[name] for name in ("group_id", "task", "tokens", "model_steps")},
                "moves": [(move["state"], move["time"], move["reason"]) for move in story["transitions"]],
            }
            for story in group_stories(self._run_dir, found)
        ]


def total(states: dict[str, dict[str, int]]) -> Counter[str]:
    summed: Counter[str] = Counter()
    for of_task in states.values():
        summed.update(of_task)
    return summed
