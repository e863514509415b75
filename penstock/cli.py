"""The `penstock` command.

    penstock train RECIPE_OR_FILE [--set path.to.key=value ...] [--run-dir DIR] [--resume [CHECKPOINT | auto]]
    penstock eval RECIPE_OR_FILE --model PATH [--set ...] [--out DIR]
    penstock ledger RUN [GROUP | --state STATE [--reason REASON] | --find WORDS] [--json]
    penstock recipes [show NAME | copy NAME [FILE]]
    penstock models [NAME]

Exit codes: 0 done, 1 the run could not go on, 2 refused before anything ran, 130 interrupted. A configuration is
checked before torch is imported, so that a typo costs a second. The environment is read here and nowhere else:
PENSTOCK_HOME moves the model cache.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import enum
import gc
import importlib
import importlib.util
import json
import os
import shlex
import signal
import sys
import threading
import traceback
from asyncio import CancelledError
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from penstock import __version__
from penstock.errors import ConfigError, PenstockError, RefusedError

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.trainer.observers import Observers

EnumT = TypeVar("EnumT", bound=enum.StrEnum)

INTERRUPTED = 130
RECIPES = Path(__file__).parent / "recipes"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
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
        _close_output()
        return 0


def train(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.set)
    run_dir = _run_dir(options)
    _use_model_cache()
    observers = _observers()
    try:
        trainer: Any = config
        with _loading(trainer.model, observers):
            built = trainer.build(run_dir=run_dir, observers=observers, resume=options.resume, profile=options.profile)
            # What was loaded stays. To look through it for garbage would stop everything for 0.2 s each time.
            gc.collect()
            gc.freeze()
        summary = built.fit()
    finally:
        gc.unfreeze()
        observers.close()
    if summary.interrupted:
        settings = "".join(f" --set {shlex.quote(setting)}" for setting in options.set)
        _say(f"Resume with: penstock train {options.config}{settings} --run-dir {run_dir} --resume")
    return 0


def ledger(options: argparse.Namespace) -> int:
    from penstock.replay.story import group_story, ledger_summary, render_story, render_summary

    if options.state is not None or options.find is not None:
        return _listed(options)
    whole = options.group is None
    found = ledger_summary(options.run_dir) if whole else group_story(options.run_dir, options.group)
    text = render_summary(found) if whole else render_story(found)
    print(json.dumps(found, indent=2) if options.json else text)
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


def evaluate(options: argparse.Namespace) -> None:
    config = load_config(options.config, [f"model={json.dumps(options.model)}", *options.set], part="evaluator")
    if getattr(config, "evaluator", None) is None:
        raise ConfigError(f"{options.config}: trainer.evaluator is None; there is nothing to evaluate")
    out = options.out or next_free(Path("evals") / Path(options.config).stem)
    if _is_taken(out):
        raise ConfigError(f"{out} exists and is not empty; name another with --out")
    _use_model_cache()
    from penstock.trainer.display import eval_line

    observers = _observers()
    try:
        trainer: Any = config
        with _loading(trainer.model, observers):
            metrics = trainer.evaluate(observers=observers, out_dir=out)
    finally:
        observers.close()
    _say(eval_line(metrics))
    _say(f"answers and figures are in {out}")


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


def models(options: argparse.Namespace) -> None:
    from penstock.models import KNOWN_MODELS, find_cached, resolve_model

    _use_model_cache()
    if options.name:
        print(resolve_model(options.name))
        return
    width = max(map(len, KNOWN_MODELS))
    for name, description in KNOWN_MODELS.items():
        place = find_cached(name) or "not made yet"
        print(f"{name:<{width}}  {description}\n{'':<{width}}  {place}")
    print("A directory in Hugging Face format or a hub id (owner/name) works too.")


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
        hint = nearest("trainer", found) if found else ""
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


def recipe_names() -> list[str]:
    stems = (path.stem for path in RECIPES.glob("*.py") if not path.stem.startswith("_"))
    return sorted(stem.replace("_", "-") for stem in stems)


def recipe_path(name: str) -> Path:
    return RECIPES / f"{name.replace('-', '_')}.py"


def next_free(directory: Path) -> Path:
    """The directory itself, or `-2`, `-3`, ... when it is taken."""
    candidate, number = directory, 1
    while candidate.is_file() or _is_taken(candidate):
        number += 1
        candidate = directory.with_name(f"{directory.name}-{number}")
    return candidate


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock",
        description="Reinforcement learning for language models.",
        epilog="Models are kept in ~/.cache/penstock/models; the environment variable PENSTOCK_HOME moves them.",
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("train", help="train a model as a recipe or your own file says")
    _add_config(command)
    place = command.add_mutually_exclusive_group()
    place.add_argument("--run-dir", type=Path, metavar="DIR", help="where the run is kept (default: runs/<recipe>)")
    place.add_argument("--next-run-dir", action="store_true", help="take runs/<recipe>-2, -3, ... when it exists")
    command.add_argument(
        "--resume",
        nargs="?",
        const="newest",
        metavar="CHECKPOINT",
        help="go on from the newest checkpoint of the run directory, or from this one; `auto` begins a run if none was",
    )
    command.add_argument(
        "--profile",
        action="store_true",
        help="write where the time goes to profile.json in the run directory, for chrome://tracing or Perfetto",
    )
    command.set_defaults(run=train)

    command = commands.add_parser("eval", help="evaluate a model as a recipe says, without training")
    _add_config(command)
    command.add_argument("--model", required=True, metavar="PATH", help="a model's directory or name")
    command.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where answers.jsonl and result.json are written (default: evals/<recipe>, then -2, -3, ...)",
    )
    command.set_defaults(run=evaluate)

    command = commands.add_parser("ledger", help="where every group of a run is, or the story of one")
    command.add_argument("run_dir", type=Path, metavar="RUN")
    command.add_argument("group", nargs="?", metavar="GROUP")
    command.add_argument("--state", help="list the groups in a state: running, discarded, ...")
    command.add_argument("--reason", help="of discarded groups: failed, filtered, ...")
    command.add_argument("--find", metavar="WORDS", help="list saved rollouts whose prompt or answer has these words")
    command.add_argument("--limit", type=int, default=50, help="how many are listed (default: 50)")
    command.add_argument("--json", action="store_true")
    command.set_defaults(run=ledger)

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

    command = commands.add_parser("models", help="list the known models, or make one ready and print its directory")
    command.add_argument("name", metavar="NAME", nargs="?")
    command.set_defaults(run=models)
    return parser


def _add_config(command: argparse.ArgumentParser) -> None:
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


def _run_dir(options: argparse.Namespace) -> Path:
    directory: Path = options.run_dir or Path("runs") / Path(options.config).stem
    if options.next_run_dir:
        return next_free(directory)
    if options.resume is None and _is_taken(directory):
        from penstock.replay.ledger import LOCK_FILE
        from penstock.replay.lock import check_free

        check_free(directory / LOCK_FILE)
        raise ConfigError(
            f"{directory} exists and is not empty; go on with --resume, or name another with --run-dir {directory}-2"
        )
    return directory


def _is_taken(directory: Path) -> bool:
    try:
        return any(directory.iterdir())
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigError(f"run directory {directory} cannot be used: {error}") from error


def _use_model_cache() -> None:
    home = os.environ.get("PENSTOCK_HOME")
    if home:
        from penstock.models import set_cache_directory

        set_cache_directory(Path(home).expanduser() / "models")


def _say(text: str) -> None:
    """What a run leaves to say; it was done, whether anybody can read this or not."""
    try:
        print(text, flush=True)
    except (OSError, ValueError):
        _close_output()


def _close_output() -> None:
    """Python would complain about what it could not write once more when it exits."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _observers() -> Observers:
    from penstock.trainer.display import make_display
    from penstock.trainer.observers import Observers

    # There is no output at all when the process was started without one.
    return Observers(display=make_display(sys.stdout is not None and sys.stdout.isatty()))


@contextlib.contextmanager
def _loading(name: str, observers: Observers) -> Iterator[None]:
    """What goes on is said, and a signal ends it with a word: nothing was trained yet."""
    # Bars of other libraries would tear the picture; the display says what goes on.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from penstock.events import Note, StageBegan
    from penstock.models import KNOWN_MODELS, find_cached

    if name in KNOWN_MODELS and find_cached(name) is None:
        observers.notice(Note(text=f"making the model {name} ready, this once: {KNOWN_MODELS[name]}"))
    observers.notice(StageBegan(stage="load"))

    def stopped(number: int, frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    before = {number: signal.signal(number, stopped) for number in numbers}
    try:
        yield
    except KeyboardInterrupt as interrupt:
        print(f"penstock: {interrupt or 'interrupted'} while loading; nothing was trained", file=sys.stderr)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _recipe(name: str) -> Path:
    from penstock.config import nearest

    if name not in recipe_names():
        raise ConfigError(f"there is no recipe {name!r}.{nearest(name, recipe_names())}")
    return recipe_path(name)


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


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


if __name__ == "__main__":
    sys.exit(main())
