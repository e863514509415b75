"""An evaluation as a part of a run: asked, kept, and told; given up where a run that is to end stands still for it."""

from __future__ import annotations

import asyncio

from penstock.events import EvaluationDone, Note, Observer
from penstock.trainer.evaluator import Evaluator
from penstock.trainer.loops import Stages
from penstock.trainer.signals import Stop
from penstock.trainer.trajectories import Trajectories

LANE = "evaluation"


class RunEvaluator:
    """The `LoopEvaluator` of a real run."""

    def __init__(self, evaluator: Evaluator, trajectories: Trajectories, observer: Observer) -> None:
        self._evaluator = evaluator
        self._trajectories = trajectories
        self._observer = observer

    async def evaluate(self, model_step: int) -> None:
        stages = Stages(self._observer, lane=LANE)
        with stages("eval"):
            evaluation = await self._evaluator.evaluate(model_step)
            await asyncio.to_thread(self._trajectories.save_evaluation, model_step, evaluation.groups)
        metrics = evaluation.metrics | stages.metrics()
        self._observer.notice(EvaluationDone(model_step=model_step, metrics=metrics))


class StandingEvaluator:
    """The `LoopEvaluator` of a run that stands still meanwhile.

    A run that is to end gives its evaluation up: these weights are those of the checkpoint that it ends with, and a
    resume asks them again.
    """

    def __init__(self, evaluator: RunEvaluator, stop: Stop, observer: Observer) -> None:
        self._evaluator = evaluator
        self._stop = stop
        self._observer = observer

    async def evaluate(self, model_step: int) -> None:
        if await self._stop.cuts_off(self._evaluator.evaluate(model_step)):
            text = f"the evaluation of model step {model_step} was given up; it is made when the run goes on"
            self._observer.notice(Note(text=text))
