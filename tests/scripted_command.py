"""A run file whose trainer does what its configuration says, for tests of the command."""

from __future__ import annotations

import pytest

from penstock.cli import main

CONFIG = """\
import asyncio
import signal
from types import SimpleNamespace

import pydantic

from penstock.config import Config
from penstock.errors import DatasetError, RunError, StateLost
from penstock.events import Note, RunBegan
from penstock.learn.config import RanksConfig
from penstock.rollout import SampleParams
from penstock.trainer.signals import Stop, stopped_by_signals


class PartConfig(Config):
    lr: float = pydantic.Field(default=1e-5, gt=0)
    name: str = "part"
    params: SampleParams = SampleParams()

    def problems(self):
        if self.name == "bad":
            yield "name is 'bad'; it must be good"


class TrainConfig(Config):
    ranks: RanksConfig = RanksConfig()


class TrainerConfig(Config):
    model: str = "tiny"
    train: TrainConfig = TrainConfig()
    part: PartConfig = PartConfig()
    parts: list[PartConfig] = [PartConfig(), PartConfig()]
    ending: str = "done"
    evaluator: PartConfig | None = PartConfig()

    def problems(self):
        if self.ending == "impossible":
            yield "ending is 'impossible'; it must be possible"

    def build(self, *, run_dir, observers, resume, allow_change, profile, site):
        if self.ending == "dataset":
            raise DatasetError(["rows.jsonl:3: no prompt", "rows.jsonl:9: not JSON"])
        if self.ending.startswith("SIG"):
            signal.raise_signal(getattr(signal, self.ending))
        return Trainer(self, run_dir, observers, [resume, *allow_change])

    def evaluate(self, *, observers, out_dir, site):
        out_dir.mkdir(parents=True)
        (out_dir / "result.json").write_text("{}")
        return {"eval/accuracy": 0.5 if self.model == "smollm2-135m" else 0.0}


class Trainer:
    def __init__(self, config, run_dir, observers, resume):
        self.config, self.run_dir, self.observers, self.resume = config, run_dir, observers, resume
        self.stop = Stop()

    @property
    def told_to_end(self):
        return self.stop.requested

    def fit(self):
        if self.config.ending.startswith("early SIG"):
            signal.raise_signal(getattr(signal, self.config.ending.removeprefix("early ")))
        if self.config.ending == "run error":
            raise RunError("no engine is left")
        if self.config.ending == "interrupt":
            raise KeyboardInterrupt
        if self.config.ending == "second interrupt":
            raise asyncio.CancelledError
        if self.config.ending.startswith("lost") and self.resume == [None]:
            (self.run_dir / "checkpoints").mkdir(parents=True)
            (self.run_dir / "checkpoints" / "latest").write_text("step-3")
            asyncio.run(self.lose())
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.observers.notice(RunBegan(run_name="mine", model=self.config.model, total_steps=1))
        (self.run_dir / "lr").write_text(str(self.config.part.lr))
        (self.run_dir / "resume").write_text(str(self.resume))
        self.observers.notice(Note(text=f"trained {self.config.model}"))
        return SimpleNamespace(interrupted=self.config.ending == "cut short")

    async def lose(self):
        with stopped_by_signals(self.stop, self.observers):
            if self.config.ending == "lost after a signal":
                signal.raise_signal(signal.SIGTERM)
            raise StateLost("the weights are lost")


trainer = TrainerConfig()
"""


def fails(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(arguments) == code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said.splitlines()
