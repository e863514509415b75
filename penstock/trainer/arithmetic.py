"""What a run computes in where its configuration says `auto`: found once, when it begins, and kept when it is resumed.

Each checkpoint names it. A run that goes on, also on another CPU, goes on in what it began with: a change in the middle
would be a change of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.engine import EmbeddedEngineConfig
from penstock.events import ArithmeticChosen
from penstock.trainer.config import RLTrainerConfig

if TYPE_CHECKING:
    from penstock.models.arithmetic import Choice

STATE = "arithmetic"
"""In the state of a checkpoint."""
FIELDS = {"train": "train.dtype", "engine": "engines.engine.dtype"}


class Arithmetic(msgspec.Struct, frozen=True, kw_only=True):
    """What `auto` stands for, of those that say it, and on which CPU that was found."""

    train: str | None = None
    engine: str | None = None
    cpu: str = ""

    def settle(self, config: RLTrainerConfig) -> RLTrainerConfig:
        """What is built: the configuration with what was found in the place of `auto`."""
        for part, field in FIELDS.items():
            if (dtype := getattr(self, part)) is not None:
                config = config.replace(field, dtype)
        return config


def find_arithmetic(
    config: RLTrainerConfig, model_dir: Path, saved: Mapping[str, Any] | None, *, trains: bool
) -> tuple[Arithmetic, ArithmeticChosen | None]:
    """`saved` is the state of the checkpoint that is resumed. The event is None where nothing was left open.

    Blocks while something is tried; the model is not loaded for it. Trainer and engine together take 0.4 s for
    SmolLM2-135M on two idle cores, 0.9 s beside one busy process, 3.5 s beside two.
    """
    wanted = [part for part in _undecided(config) if trains or part == "engine"]
    if not wanted:
        return Arithmetic(), None
    from penstock.models.arithmetic import cpu_name

    cpu = cpu_name()
    before = msgspec.convert((saved or {}).get(STATE, {}), Arithmetic)
    kept = {part: dtype for part in wanted if (dtype := getattr(before, part)) is not None}
    found = {part: _choose(config, model_dir, part) for part in wanted if part not in kept}
    chosen = kept | {part: choice.dtype for part, choice in found.items()}
    others = {part: round(choice.other_takes, 2) for part, choice in found.items() if choice.other_takes is not None}
    began_on = before.cpu if kept else ""
    event = ArithmeticChosen(**chosen, cpu=cpu, began_on=began_on, others_take=others)
    return Arithmetic(**chosen, cpu=began_on or cpu), event


def kernels_note(config: RLTrainerConfig) -> str | None:
    """That the engine does without `models/kernels.c`, where this CPU could use it: it was not compiled."""
    engine = config.engines.engine
    if not isinstance(engine, EmbeddedEngineConfig) or config.deterministic or engine.device != "cpu":
        return None
    from penstock.models.kernels import kernels, kinds

    if not kinds() or kernels() is not None:
        return None
    return (
        "the engine is slower than it could be: its kernels are not compiled; install gcc and python3-dev, "
        "then Penstock again"
    )


def _undecided(config: RLTrainerConfig) -> list[str]:
    asked = {"train": config.train.dtype, "engine": getattr(config.engines.engine, "dtype", None)}
    return [part for part, dtype in asked.items() if dtype == "auto"]


def _choose(config: RLTrainerConfig, model_dir: Path, part: str) -> Choice:
    from penstock.models.arithmetic import choose_for

    settings: Any = config.train if part == "train" else config.engines.engine
    fused = settings.fused and (part == "engine" or config.train.sharding == "none")
    return choose_for(
        model_dir,
        rows=config.train.max_tokens_per_micro_batch if part == "train" else settings.max_running,
        trains=part == "train",
        fused=fused,
        deterministic=config.deterministic,
        packed=None if part == "train" else settings.packed,
        device=settings.device,
    )
