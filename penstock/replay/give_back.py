"""Where a group that a restart found waits, and with what.

What was being played is ABORTED, with the turns that its rollouts finished; what was leased, or trained after the
checkpoint, is COMPLETED; what waited goes on waiting.
"""

from __future__ import annotations

from penstock.replay.accounting import TokenAccount
from penstock.replay.lifecycle import WAITING, GroupState
from penstock.replay.restore import HeldGroup
from penstock.replay.shelf import Entry
from penstock.replay.staleness import ModelSteps
from penstock.replay.turns import put_back_turns
from penstock.rollout import Group, Status, reset_rollout_response


def give_back(entry: Entry, held: HeldGroup, tokens: TokenAccount) -> tuple[GroupState, Group | None]:
    """The state in which it waits, and its content when that changed."""
    assert entry.state is not None
    if entry.state is GroupState.RUNNING:
        changed = _put_back(entry, held, tokens) if Status.EXPIRED in entry.statuses or held.turns else None
        entry.interrupt()
        return GroupState.ABORTED, changed
    if entry.state in (GroupState.LEASED, GroupState.TRAINED):
        return GroupState.COMPLETED, None
    if entry.state is GroupState.ABORTED:
        # Killed between the two moves of a put: the second one is made now.
        return WAITING[entry.status], None
    return entry.state, None


def _put_back(entry: Entry, held: HeldGroup, tokens: TokenAccount) -> Group:
    """What the rollouts of a running group had, and the turns that they finished since."""
    group = entry.group
    for rollout in group:
        if rollout.status is Status.COMPLETED:
            continue
        if rollout.status is Status.EXPIRED:
            # It was being made again; what it had is as stale as before.
            tokens.drop(entry, "re_rolled", rollout.num_tokens)
            reset_rollout_response(rollout)
        rows = [row for row in held.turns if row.rollout_id == rollout.rollout_id]
        gone = put_back_turns(rollout, rows, model_step=max(0, held.train_step - 1)) if rows else 0
        tokens.drop(entry, "aborted", gone)
    entry.made = ModelSteps.of(group)
    tokens.count(entry, group)
    return group
