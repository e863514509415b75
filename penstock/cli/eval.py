"""`penstock eval`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from penstock.cli.config_file import add_config, load_config
from penstock.cli.loading import loading, make_observers, use_model_cache
from penstock.cli.output import say
from penstock.cli.run_directory import given_directory, is_taken, next_free
from penstock.cli.site import add_address, check_address, open_site
from penstock.errors import ConfigError


def add_to(commands: Any) -> None:
    command = commands.add_parser("eval", help="evaluate a model as a recipe says, without training")
    add_config(command)
    add_address(command)
    command.add_argument("--model", required=True, metavar="PATH", help="a model's directory or name")
    command.add_argument(
        "--out",
        metavar="DIR",
        help="where answers.jsonl and result.json are written (default: evals/<recipe>, then -2, -3, ...)",
    )
    command.set_defaults(run=evaluate)


def evaluate(options: argparse.Namespace) -> None:
    config = load_config(options.config, [f"model={json.dumps(options.model)}", *options.set], part="evaluator")
    evaluator = getattr(config, "evaluator", None)
    if evaluator is None:
        raise ConfigError(f"{options.config}: trainer.evaluator is None; there is nothing to evaluate")
    check_address(options, evaluator)
    usual = Path("evals") / Path(options.config).stem
    out = next_free(usual) if options.out is None else given_directory("--out", options.out)
    if is_taken(out):
        raise ConfigError(f"{out} exists and is not empty; name another with --out")
    use_model_cache()
    from penstock.trainer.lines import eval_line

    observers = make_observers()
    try:
        trainer: Any = config
        with loading(trainer.model, observers), open_site(options, observers) as site:
            metrics = trainer.evaluate(observers=observers, out_dir=out, site=site)
    finally:
        observers.close()
    say(eval_line(metrics))
    say(f"answers and figures are in {out}")
