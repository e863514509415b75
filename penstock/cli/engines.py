"""`penstock engines`: the engines of a run that is under way; they may come and go."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError


def add_to(commands: Any) -> None:
    command = commands.add_parser("engines", help="list the engines of a running run, add one, or drain one")
    command.add_argument("run_dir", type=Path, metavar="RUN")
    command.add_argument(
        "action", nargs="?", choices=("add", "drain"), metavar="add | drain", help="default: list them"
    )
    command.add_argument("name", nargs="?", metavar="NAME", help="of the engine to drain")
    command.add_argument("--json", action="store_true")
    command.set_defaults(run=engines)


def engines(options: argparse.Namespace) -> None:
    from penstock.trainer.control import Wish, ask

    if (options.action == "drain") != (options.name is not None):
        raise ConfigError("penstock engines RUN drain NAME drains one engine; the others take no name")
    outcome = ask(options.run_dir, Wish(do=options.action or "list", name=options.name or ""))
    if options.json:
        import msgspec

        print(msgspec.json.encode(outcome).decode())
        return
    if outcome.name:
        print(f"{outcome.name} {'serves' if options.action == 'add' else 'has left'}")
    width = max(len(member.name) for member in outcome.members)
    for member in outcome.members:
        told = f"; {member.failure}" if member.failure and member.state != "active" else ""
        print(f"{member.name:<{width}}  {member.state}, {member.requests} requests{told}")
