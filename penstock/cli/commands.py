"""From arguments to a command, and from what it raised to an exit code."""

from __future__ import annotations

import argparse
import sys
from asyncio import CancelledError
from collections.abc import Sequence

from penstock import __version__
from penstock.cli import engines, judge, ledger, models, plot, recipes, runs, serve, train, view
from penstock.cli import eval as eval_command
from penstock.cli.output import close_output, open_missing_descriptors, replace_missing_letters
from penstock.errors import PenstockError, RefusedError

INTERRUPTED = 130
COMMANDS = (train, eval_command, judge, serve, runs, view, plot, ledger, engines, recipes, models)
"""In the order in which `penstock --help` lists them."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    open_missing_descriptors()
    replace_missing_letters()
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options) or 0
        return code
    except RefusedError as error:
        for problem in error.problems:
            print(f"penstock: {problem}", file=sys.stderr)
        return 2
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, CancelledError):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of a listing left (`penstock recipes | head`).
        close_output()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock",
        description="Reinforcement learning for language models.",
        epilog="Models are kept in ~/.cache/penstock/models; the environment variable PENSTOCK_HOME moves them.",
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return parser
