"""`penstock recipes`: list, show or copy the recipes."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

RECIPES = Path(__file__).parent.parent / "recipes"


def add_to(commands: Any) -> None:
    command = commands.add_parser("recipes", help="list, show or copy the recipes")
    command.set_defaults(run=list_recipes)
    actions = command.add_subparsers(metavar="ACTION")
    action = actions.add_parser("show", help="print a recipe")
    action.add_argument("name", metavar="NAME")
    action.set_defaults(run=show_recipe)
    action = actions.add_parser("copy", help="copy a recipe, to change it")
    action.add_argument("name", metavar="NAME")
    action.add_argument("file", metavar="FILE", nargs="?")
    action.set_defaults(run=copy_recipe)


def list_recipes(options: argparse.Namespace) -> None:
    names = recipe_names()
    width = max(map(len, names), default=0)
    for name in names:
        print(f"{name:<{width}}  {_first_line(_recipe(name))}")


def show_recipe(options: argparse.Namespace) -> None:
    print(_recipe(options.name).read_text(encoding="utf-8"), end="")


def copy_recipe(options: argparse.Namespace) -> None:
    source = _recipe(options.name)
    target = Path(options.file or f"{options.name}.py")
    try:
        # Exclusive creation: never overwrites, also when two copies race.
        with target.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        raise ConfigError(f"{target} exists; name another file: penstock recipes copy {options.name} FILE") from None
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}") from error
    print(f"{target}: edit it, then run penstock train {target}")


def recipe_names() -> list[str]:
    stems = (path.stem for path in RECIPES.glob("*.py") if not path.stem.startswith("_"))
    return sorted(stem.replace("_", "-") for stem in stems)


def recipe_path(name: str) -> Path:
    return RECIPES / f"{name.replace('-', '_')}.py"


def _recipe(name: str) -> Path:
    from penstock.config import nearest

    if name not in recipe_names():
        raise ConfigError(f"there is no recipe {name!r}.{nearest(name, recipe_names())}")
    return recipe_path(name)


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
