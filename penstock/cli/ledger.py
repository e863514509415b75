"""`penstock ledger`: where every group of a run is, or the story of one."""

from __future__ import annotations

import argparse
import enum
import json
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import ConfigError, RefusedError

EnumT = TypeVar("EnumT", bound=enum.StrEnum)


def add_to(commands: Any) -> None:
    command = commands.add_parser("ledger", help="where every group of a run is, or the story of one")
    command.add_argument("run_dir", type=Path, metavar="RUN")
    command.add_argument("group", nargs="?", metavar="GROUP")
    command.add_argument("--state", help="list the groups in a state: running, discarded, ...")
    command.add_argument("--reason", help="of discarded groups: failed, filtered, ...")
    command.add_argument("--find", metavar="WORDS", help="list saved rollouts whose prompt or answer has these words")
    command.add_argument(
        "--reindex",
        action="store_true",
        help="make the index that --find and the page search anew from the trajectories",
    )
    command.add_argument("--limit", type=int, default=50, help="how many are listed (default: 50)")
    command.add_argument("--json", action="store_true")
    command.set_defaults(run=ledger)


def ledger(options: argparse.Namespace) -> int:
    from penstock.replay.story import group_story, ledger_summary, render_story, render_summary

    if options.reindex:
        return _reindex(options.run_dir)
    if options.state is not None or options.find is not None:
        return _listed(options)
    whole = options.group is None
    found = ledger_summary(options.run_dir) if whole else group_story(options.run_dir, options.group)
    text = render_summary(found) if whole else render_story(found)
    print(json.dumps(found, indent=2) if options.json else text)
    return 0


def _reindex(run_dir: Path) -> int:
    from penstock.replay.lock import lock_directory
    from penstock.trainer.index import RolloutIndex

    if not (run_dir / "trajectories").is_dir():
        raise RefusedError(f"{run_dir} has no trajectories: it is not a run directory, or nothing was trained yet")
    lock = lock_directory(run_dir)  # what a run writes meanwhile would be missing
    try:
        index = RolloutIndex.rebuild(run_dir)
    finally:
        lock.release()
    print(f"{index.path} is made anew")
    return 0


def _listed(options: argparse.Namespace) -> int:
    """Groups by state, or saved rollouts by their words; the first of them."""
    from penstock.replay import DiscardReason, GroupState
    from penstock.replay.search import Asked, find_groups
    from penstock.trainer.index import RolloutIndex

    rows: list[dict[str, Any]]
    if options.find is not None:
        page = RolloutIndex(options.run_dir).find(text=options.find, limit=options.limit)
        rows = [
            {"kind": found.kind, "step": found.step, "rollout": found.rollout_id, "reward": found.reward}
            for found in page.rollouts
        ]
    else:
        state = _one_of(GroupState, "--state", options.state)
        reason = None if options.reason is None else _one_of(DiscardReason, "--reason", options.reason)
        groups = find_groups(options.run_dir, Asked(state, reason=reason), limit=options.limit)
        shown = ("group_id", "state", "train_step", "reason", "tokens")
        rows = [{name: group[name] for name in shown} for group in groups]
    if options.json:
        print(json.dumps(rows, indent=2))
    for row in rows if not options.json else []:
        print("  ".join(f"{name} {value}" for name, value in row.items() if value is not None))
    if not rows:
        print("none")
    return 0


def _one_of(kind: type[EnumT], option: str, word: str) -> EnumT:
    from penstock.config import nearest

    try:
        return kind(word)
    except ValueError:
        raise ConfigError(f"{option} is {word!r}.{nearest(word, [one.value for one in kind])}") from None
