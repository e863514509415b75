"""A recipe or a user's file, with `--set` values, as a checked configuration."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from penstock.cli.recipes import recipe_names, recipe_path
from penstock.errors import ConfigError, RefusedError

if TYPE_CHECKING:
    from penstock.config import Config


def add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "config", metavar="RECIPE_OR_FILE", help="a recipe's name, or a Python file that sets `trainer`"
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a field: --set train.lr=2e-5 --set manager.tasks.0.weight=2",
    )


def load_config(name: str, settings: Sequence[str] = (), *, part: str | None = None) -> Config:
    """The checked `trainer` of a recipe or file with `--set` values applied. Raises ConfigError with all problems.

    With `part` only that field is checked: evaluation does not need the training data.
    """
    from penstock.config import Config, nearest
    from penstock.models import check_model

    module = _load_module(name)
    config = getattr(module, "trainer", None)
    if not isinstance(config, Config) or not hasattr(config, "model") or not hasattr(config, "build"):
        found = [key for key, value in vars(module).items() if isinstance(value, Config)]
        hint = nearest("trainer", found)
        raise ConfigError(f"{module.__file__}: it must set `trainer` to a trainer's configuration.{hint}")
    problems: list[str] = []
    for setting in settings:
        try:
            config = _apply(config, setting)
        except ConfigError as error:
            problems += error.problems
    trainer: Any = config
    checked = trainer if part is None else getattr(trainer, part, None) or trainer
    for check in (checked.check, lambda: check_model(trainer.model)):
        try:
            check()
        except RefusedError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return config


def parse_value(text: str) -> Any:
    """JSON, else a Python literal, else the text itself: `1e-5`, `true`, `None`, `[1, 2]`, `runs/x`."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _load_module(name: str) -> ModuleType:
    path = Path(name)
    if name in recipe_names():
        return _run_file(recipe_path(name), f"penstock.recipes.{recipe_path(name).stem}")
    if path.suffix != ".py" and not path.exists():
        from penstock.config import nearest

        raise ConfigError(
            f"there is no recipe {name!r}.{nearest(name, recipe_names())} Recipes: {', '.join(recipe_names())}. "
            "A configuration of your own is a file that ends in .py."
        )
    if not path.is_file():
        raise ConfigError(f"configuration file {name} does not exist")
    # Its neighbours can be imported, and worker processes find its functions by name. Last, unlike when Python runs a
    # file: a neighbour called `json` or `torch`, or the file itself, does not stand in for the library.
    sys.path.append(str(path.parent.resolve()))
    return _run_file(path, path.stem if _is_found_as(path.stem, path) else f"penstock_configuration_{path.stem}")


def _is_found_as(module_name: str, path: Path) -> bool:
    """Whether an import of this name, now or in a worker process, finds this file."""
    if module_name in sys.modules or not module_name.isidentifier():
        return False
    spec = importlib.util.find_spec(module_name)
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path.resolve()


def _run_file(path: Path, module_name: str) -> ModuleType:
    """Import a configuration file. Whatever goes wrong in it is the file's problem, at a line of it."""
    from importlib.machinery import SourceFileLoader

    loader = SourceFileLoader(module_name, str(path))
    spec = importlib.util.spec_from_loader(module_name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        loader.exec_module(module)
    except RefusedError as error:
        where = _line_in(path, error)
        raise ConfigError([p if str(path) in p else f"{p} {where}" for p in error.problems]) from None
    except SyntaxError as error:
        raise ConfigError(f"{error.filename or path}:{error.lineno}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{_line_in(path, error)}: {type(error).__name__}: {error}") from None
    return module


def _line_in(path: Path, error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{frames[-1].lineno}" if frames else str(path)


def _apply(config: Config, setting: str) -> Config:
    key, equals, text = setting.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {setting}: it must be KEY=VALUE, like --set train.lr=2e-5")
    try:
        return config.replace(key, parse_value(text))
    except ConfigError as error:
        # A constructor names the line that called it, which is in this file; what the user wrote says more.
        problems = [p.partition(f" {__file__}:")[0] for p in error.problems]
        raise ConfigError([p if p.startswith("--set") else f"--set {setting}: {p}" for p in problems]) from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--set {setting}: {error}") from None
