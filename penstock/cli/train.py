"""`penstock train`."""

from __future__ import annotations

import argparse
import contextlib
import gc
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.command_file import CommandFile, joined, remembered_settings
from penstock.cli.config_file import add_config, load_config
from penstock.cli.loading import loading, make_observers, use_model_cache
from penstock.cli.output import say
from penstock.cli.plot import require_matplotlib
from penstock.cli.run_directory import given_directory, is_taken, newest, next_free
from penstock.cli.site import add_address, check_address, open_site
from penstock.errors import ConfigError, EngineUnavailable, StateLost
from penstock.garbage import keep_what_is_loaded

if TYPE_CHECKING:
    from penstock.trainer.signals import Stop

ROOM_S = 300.0
"""How long a run that lost a node waits for room."""
LOOK_FOR_ROOM_S = 2.0


def add_to(commands: Any) -> None:
    command = commands.add_parser("train", help="train a model as a recipe or your own file says")
    add_config(command)
    add_address(command)
    command.add_argument(
        "--run-dir",
        metavar="DIR",
        help="where the run is kept (default: runs/<recipe>, then runs/<recipe>-2, -3, ...)",
    )
    command.add_argument(
        "--resume",
        nargs="?",
        const="newest",
        metavar="CHECKPOINT",
        help="go on from the newest checkpoint of the run directory (default: the newest of runs/<recipe>, -2, ...), "
        "or from this one; `auto` begins a run if none was. The --set values of the run are taken from it",
    )
    command.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY",
        help="resume although this field, or one below it, has another value than the run was trained with",
    )
    command.add_argument(
        "--profile",
        action="store_true",
        help="write where the time goes to profile.json in the run directory, for chrome://tracing or Perfetto",
    )
    command.add_argument(
        "--curve",
        action="store_true",
        help="draw reward and evaluations into curve.png in the run directory when it ends (needs the extra plot)",
    )
    command.set_defaults(run=train)


def train(options: argparse.Namespace) -> int:
    run_dir = _run_dir(options)
    if options.curve:
        require_matplotlib("--curve")
    if options.allow_change and options.resume is None:
        raise ConfigError("--allow-change goes with --resume; a new run may have any configuration")
    settings = joined(remembered_settings(run_dir), options.set) if options.resume is not None else options.set
    config = load_config(options.config, settings)
    check_address(options, config)
    use_model_cache()
    summary = _fit_through_losses(options, config, settings, run_dir)
    if summary.interrupted:
        _say_how_to_resume(options, run_dir)
        return 0
    if options.curve:
        from penstock.view.plot import draw_curves

        draw_curves([run_dir], run_dir / "curve.png")
        say(f"The curves: {run_dir / 'curve.png'}")
    say(f"Look at it with: penstock view {shlex.quote(str(run_dir))}")
    return 0


def _fit_through_losses(options: argparse.Namespace, config: Any, settings: list[str], run_dir: Path) -> Any:
    """What only `--resume` helps against is resumed here, as often as ranks may be lost, without a checkpoint between.

    A node that goes may take the newest weights with it, or all engines and what they served. A run that was told to
    end before that is not resumed.
    """
    from penstock.trainer.signals import Stop

    losses = (StateLost,) if options.address is None else (StateLost, EngineUnavailable)
    resume, lost, came_to, room_by, stop = options.resume, 0, "", 0.0, Stop()
    while True:
        try:
            return _fit(options, config, settings, run_dir, resume, stop)
        except ConfigError:
            # It was accepted before: what is missing is room, and the node may come back.
            if not lost or time.monotonic() > room_by:
                raise
            time.sleep(LOOK_FOR_ROOM_S)
        except losses as error:
            latest = run_dir / "checkpoints" / "latest"
            reached = latest.read_text() if latest.exists() else ""
            lost, came_to = lost + 1 if reached == came_to else 1, reached
            if stop.requested and reached:
                _say_how_to_resume(options, run_dir)
            if stop.requested or not reached or lost > config.train.ranks.max_restarts:
                raise
            say(f"{type(error).__name__}: {error}\nThe run goes on by itself from its newest checkpoint.")
            resume, room_by = "newest", time.monotonic() + ROOM_S


def _say_how_to_resume(options: argparse.Namespace, run_dir: Path) -> None:
    place = f" --address {shlex.quote(options.address)}" if options.address is not None else ""
    place += " --trusted-network" if options.trusted_network else ""
    name, directory = shlex.quote(options.config), shlex.quote(str(run_dir))
    say(f"Resume with: penstock train {name}{place} --run-dir {directory} --resume")


def _fit(
    options: argparse.Namespace, config: Any, settings: list[str], run_dir: Path, resume: str | None, stop: Stop
) -> Any:
    observers = make_observers()
    try:
        with contextlib.ExitStack() as stack:
            ending = stack.enter_context(loading(config.model, observers))
            site = stack.enter_context(open_site(options, observers))
            built = config.build(
                run_dir=run_dir,
                observers=observers,
                resume=resume,
                allow_change=options.allow_change,
                profile=options.profile,
                site=site,
            )
            observers.add("command.json", CommandFile(run_dir, options.config, settings))
            keep_what_is_loaded()
            # The run hears signals itself, but for a moment before and after.
            ending.said = f"before the run began or after it ended; what there is of it is in {run_dir}"
            try:
                return built.fit()
            finally:
                stop.requested |= built.told_to_end
    finally:
        gc.unfreeze()
        observers.close()


def _run_dir(options: argparse.Namespace) -> Path:
    if options.run_dir is None:
        usual = Path("runs") / Path(options.config).stem
        return next_free(usual) if options.resume is None else newest(usual)
    directory = given_directory("--run-dir", options.run_dir)
    if options.resume is None and is_taken(directory):
        from penstock.replay.lock import LOCK_FILE, check_free

        check_free(directory / LOCK_FILE)
        raise ConfigError(
            f"{directory} exists and is not empty; go on with --resume, or name another with --run-dir "
            f"{next_free(directory)}"
        )
    return directory
