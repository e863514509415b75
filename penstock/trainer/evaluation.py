"""An evaluation as a part of a run: asked, kept, and told."""

from __future__ import annotations

import asyncio

from penstock.events import EvaluationDone, Observer
from penstock.trainer.evaluator import Evaluator
from penstock.trainer.loops import Stages
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
