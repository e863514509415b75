"""`penstock models`: the known models."""

from __future__ import annotations

import argparse
from typing import Any

from penstock.cli.loading import use_model_cache


def add_to(commands: Any) -> None:
    command = commands.add_parser("models", help="list the known models, or make one ready and print its directory")
    command.add_argument("name", metavar="NAME", nargs="?")
    command.set_defaults(run=models)


def models(options: argparse.Namespace) -> None:
    from penstock.models import KNOWN_MODELS, find_cached, resolve_model

    use_model_cache()
    if options.name:
        print(resolve_model(options.name))
        return
    width = max(map(len, KNOWN_MODELS))
    for name, description in KNOWN_MODELS.items():
        place = find_cached(name) or "not made yet"
        print(f"{name:<{width}}  {description}\n{'':<{width}}  {place}")
    print("A directory in Hugging Face format or a hub id (owner/name) works too.")
