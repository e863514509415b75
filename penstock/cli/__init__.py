"""The `penstock` command.

    penstock train RECIPE_OR_FILE [--set path.to.key=value ...] [--run-dir DIR] [--address auto | HOST:PORT | local]
                   [--resume [CHECKPOINT | auto] [--allow-change path.to.key ...]] [--profile]
    penstock eval RECIPE_OR_FILE --model PATH [--set ...] [--out DIR] [--address ...]
    penstock judge RECIPE_OR_FILE --trajectories FILE [--set ...] [--limit N] [--json]
    penstock ledger RUN [GROUP | --state STATE [--reason REASON] | --find WORDS] [--json]
    penstock engines RUN [add | drain NAME] [--json]
    penstock recipes [show NAME | copy NAME [FILE]]
    penstock models [NAME]

Exit codes: 0 done, 1 the run could not go on, 2 refused before anything ran, 130 interrupted. A configuration is
checked before torch is imported, so that a typo costs a second. The environment is read here and nowhere else:
PENSTOCK_HOME moves the model cache.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    from penstock.cli.commands import run  # not before: `__main__.py` first says where modules are found

    return run(arguments)
