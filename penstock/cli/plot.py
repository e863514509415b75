"""`penstock plot`: the reward and evaluation curves of runs, as a picture for a document."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from penstock.errors import RefusedError


def add_to(commands: Any) -> None:
    command = commands.add_parser("plot", help="draw the curves of runs into a picture")
    command.add_argument("runs", type=Path, metavar="RUN", nargs="+")
    command.add_argument("-o", "--out", type=Path, default=Path("curve.png"), help=".png, .svg or .pdf")
    command.add_argument("--metric", default="reward/mean", help="what is drawn beside the evaluations")
    command.set_defaults(run=plot)


def plot(options: argparse.Namespace) -> int:
    require_matplotlib("penstock plot")
    from penstock.view.plot import draw_curves

    draw_curves(options.runs, options.out, metric=options.metric)
    print(options.out)
    return 0


def require_matplotlib(asked: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise RefusedError(f"{asked} needs matplotlib: pip install 'penstock[plot]'")
