"""A picture of the curves of some runs: what was trained on above, what was evaluated below."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from penstock.config import nearest
from penstock.errors import RefusedError
from penstock.view.runs import Run, Runs

FORMATS = (".png", ".svg", ".pdf")
EVALUATED = ("eval/accuracy", "eval/greedy_accuracy", "eval/score")


def draw_curves(directories: list[Path], out: Path, *, metric: str = "reward/mean") -> None:
    """Raises RefusedError when there is nothing to draw or the picture cannot be written."""
    if out.suffix not in FORMATS:
        raise RefusedError(f"--out is {str(out)!r}; a picture ends in {', '.join(FORMATS)}")
    runs = [_opened(directory) for directory in directories]
    _require_metric(runs, metric)
    evaluated = next((name for name in EVALUATED if any(_points(run, name) for run in runs)), None)
    names = [metric] if evaluated is None else [metric, evaluated]
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(6.4, 2.6 * len(names)), layout="constrained")
        for axes, name in zip(figure.subplots(len(names), 1, squeeze=False)[:, 0], names, strict=True):
            for run in runs:
                points = _points(run, name)
                axes.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=2.5, label=run.name)
            axes.set_ylabel(name)
            axes.grid(alpha=0.3)
            if len(runs) > 1:
                axes.legend(frameon=False)
        axes.set_xlabel("train step")
        try:
            figure.savefig(out, dpi=160)
        except OSError as error:
            raise RefusedError(f"{out} cannot be written: {error}") from error


def _opened(directory: Path) -> Run:
    runs = Runs(directory)
    names = runs.names()
    if names != [directory.resolve().name] and len(names) > 1:
        raise RefusedError(f"{directory} has {len(names)} runs; name them: {', '.join(names[:5])}")
    run = runs.get(names[0])
    assert run is not None
    return run


def _require_metric(runs: list[Run], metric: str) -> None:
    known = sorted({name for run in runs for point in run.history.steps for name in point.metrics})
    if not known:
        raise RefusedError("no step of these runs was trained yet; there is nothing to draw")
    if metric not in known:
        raise RefusedError(f"--metric is {metric!r}; no run has it.{nearest(metric, known)}")


def _points(run: Run, name: str) -> list[tuple[int, float]]:
    found: list[tuple[int, float]] = run.curves([name])["curves"][name]
    return found
