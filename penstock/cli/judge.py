"""`penstock judge`: saved answers, judged again."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from penstock.cli.config_file import add_config, load_config
from penstock.cli.loading import use_model_cache
from penstock.errors import ConfigError


def add_to(commands: Any) -> None:
    command = commands.add_parser("judge", help="judge saved answers again, without training")
    add_config(command)
    command.add_argument(
        "--trajectories",
        type=Path,
        required=True,
        metavar="FILE",
        help="a file of a run (runs/tiny/trajectories/step-000001.jsonl) or of `penstock eval` (answers.jsonl)",
    )
    command.add_argument("--limit", type=int, default=50, help="how many rollouts are listed (default: 50)")
    command.add_argument("--json", action="store_true", help="one JSON object per rollout, all of them")
    command.set_defaults(run=judge)


def judge(options: argparse.Namespace) -> None:
    if options.trajectories.is_dir():
        raise ConfigError(
            f"--trajectories is {options.trajectories}, a directory; name one file, as in "
            "runs/tiny/trajectories/step-000001.jsonl"
        )
    if not options.trajectories.is_file():
        raise ConfigError(f"--trajectories is {options.trajectories}; there is no such file")
    # The judge's own parts are checked when it is built; the datasets of the tasks are not needed.
    config: Any = load_config(options.config, options.set, part="engines")
    use_model_cache()
    import msgspec

    from penstock.trainer.judge_again import judge_again, judged_table

    judged = judge_again(config, options.trajectories)
    if options.json:
        for one in judged:
            print(json.dumps({**msgspec.to_builtins(one), "disagrees": one.disagrees}))
        return
    for line in judged_table(judged, max(0, options.limit)):
        print(line)
