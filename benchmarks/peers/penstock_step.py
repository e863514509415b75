"""Penstock's colocated trainer, one train step per request: the real one, with its ledger, trajectories and metrics.

Only checkpoints and evaluation are left out: none falls due before the last request.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Mapping

import serve

job = serve.next_line()

import numpy as np  # noqa: E402 - the job comes first: its environment decides what torch finds

from penstock.agent_loop import SingleTurnAgentLoopConfig  # noqa: E402
from penstock.data import AdditionConfig, SamplerConfig  # noqa: E402
from penstock.engine import EmbeddedEngineConfig, EnginesConfig  # noqa: E402
from penstock.judger import rewards  # noqa: E402
from penstock.learn import KLConfig, LoRAConfig, TrainWorkerConfig  # noqa: E402
from penstock.learn.batch import TrainAnswer, TrainBatch, TrainGroup, TrainSegment  # noqa: E402
from penstock.produce import AgentLoopManagerConfig, TaskSpecConfig  # noqa: E402
from penstock.rollout import ROOT, SampleParams  # noqa: E402
from penstock.trainer.config import RLColocateTrainerConfig  # noqa: E402
from penstock.trainer.display import PlainDisplay  # noqa: E402
from penstock.trainer.observers import Observers  # noqa: E402

STEPS = 10_000


class OneStepPerRequest(PlainDisplay):
    """The trainer shows a step when it is over: here that is the answer, and the next step waits for its request."""

    def __init__(self) -> None:
        # Everything but steps is dropped.
        super().__init__(open("/dev/null", "w"))  # noqa: SIM115, PTH123 - as long as the process
        self._started: float | None = None

    def stage(self, name: str) -> None:
        if name == "produce" and self._started is None:
            self._wait()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self._started is not None
        answers = job["groups"] * job["group_size"]
        serve.answer(
            # The clock, not the sum of the stages: also what lies between them.
            step_s=time.perf_counter() - self._started,
            generate_s=metrics["time/produce_s"],
            train_s=metrics["time/train_s"],
            stages={name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")},
            answer_tokens=round(metrics["length/mean"] * answers),
            reward=metrics["reward/mean"],
            equal_group_share=metrics["reward/equal_group_share"],
        )
        self._wait()

    def _wait(self) -> None:
        serve.next_line()
        self._started = time.perf_counter()


async def differs(response: str, label: str, extra_info: Mapping[str, object]) -> float:
    """A reward with which no group's answers are all as good, so that none is left out of the backward pass."""
    return zlib.crc32(response.encode()) / 2**32


def make_config() -> RLColocateTrainerConfig:
    task = TaskSpecConfig(
        task_name="addition",
        sampler_config=SamplerConfig(
            dataset=AdditionConfig(**job["dataset"]), prompt_repeat_k=job["group_size"], shuffle=False
        ),
        agent_loop_config=SingleTurnAgentLoopConfig(sample_params=SampleParams(max_tokens=job["max_tokens"])),
        judger_config=differs if job["reward"] == "differs" else getattr(rewards, job["reward"]),
    )
    return RLColocateTrainerConfig(
        model=job["model"],
        engines=EnginesConfig(
            engine=EmbeddedEngineConfig(max_running=job["groups"] * job["group_size"], dtype=job["dtype"])
        ),
        train=TrainWorkerConfig(
            lr=job["lr"],
            dtype=job["dtype"],
            lora=LoRAConfig(**job["lora"]) if job["lora"] else None,
            kl=KLConfig(coef=job["kl_coef"]) if job["kl_coef"] else None,
        ),
        manager=AgentLoopManagerConfig(tasks=[task]),
        total_steps=STEPS,
        train_batch_size=job["groups"],
        eval_interval=STEPS,
        checkpoint_interval=STEPS,
        cpu_threads=job["threads"],
        seed=job["seed"],
    )


def scoring_batch(prompts: list[list[int]], answers: list[list[int]]) -> TrainBatch:
    groups = []
    for index, (prompt, given) in enumerate(zip(prompts, answers, strict=True)):
        zeros = np.zeros(len(given), np.float32)
        mask, steps = np.ones(len(given), np.uint8), np.zeros(len(given), np.int32)
        scored = TrainSegment(np.asarray(given, np.int32), zeros, zeros, mask, steps, ROOT, len(prompt))
        answer = TrainAnswer(f"score/{index}", 0.0, 0.0, [scored])
        groups.append(TrainGroup("score", np.asarray(prompt, np.int32), [answer]))
    return TrainBatch(1, groups)


def main() -> None:
    trainer = make_config().build(run_dir=job["scratch"], observers=Observers(display=OneStepPerRequest()))
    scores = asyncio.run(trainer.parts.worker.score(scoring_batch(*job["score"])))
    found = trainer.parts.arithmetic
    serve.answer(
        scores=[segment.tolist() for [segment] in scores.values()],
        dtype=found.train or job["dtype"],
        engine_dtype=found.engine or job["dtype"],
    )
    trainer.fit()


main()
