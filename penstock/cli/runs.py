"""`penstock runs`: the runs below a directory, with their state and what they came to."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    command = commands.add_parser("runs", help="list runs with their state and result")
    command.add_argument("directory", type=Path, metavar="DIR", nargs="?", default=Path("runs"))
    command.add_argument("--json", action="store_true")
    command.set_defaults(run=runs)


def runs(options: argparse.Namespace) -> int:
    from penstock.view.runs import Runs

    known = Runs(options.directory)
    found = [run.brief() for name in known.names() if (run := known.get(name)) is not None]
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    width = max(len(brief["name"]) for brief in found)
    for brief in found:
        steps = f"step {brief['step']} of {brief['total_steps']}"
        name, state, took = brief["name"], brief["state"], _took(brief["seconds"])
        print(f"{name:<{width}}  {state:<8} {steps:<16}  {_reward(brief):<24} {took}")
    return 0


def _reward(run: dict[str, Any]) -> str:
    first, last = run["reward_first"], run["reward_last"]
    return "no reward yet" if first is None or last is None else f"reward {first:.3f} -> {last:.3f}"


def _took(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
