"""A tiny chat model learns to guess a number in three tries, in about a minute on any CPU.

    penstock train guess-tiny

An environment of twenty lines knows the number and answers `higher` or `lower`. Who listens finds any number from 1 to
7 in three tries; the model, made on the spot, hardly does at first. The reward is 1 when the number is found.
"""

from collections.abc import Iterator
from typing import Any

from penstock import (
    EmbeddedEngineConfig,
    EnginesConfig,
    EnvAgentLoopConfig,
    EvaluatorConfig,
    GeneratorConfig,
    Prompt,
    RLColocateTrainerConfig,
    SampleParams,
    SamplerConfig,
    TaskSpecConfig,
    TrainWorkerConfig,
    new_rollout,
)

HIGHEST, TRIES = 7, 3


class GuessEnv:
    def reset(self, row: dict[str, Any]) -> None:
        self.secret = int(row["ground_truth"])
        self.tries = 0

    def step(self, answer: str) -> tuple[str, float, bool]:
        self.tries += 1
        guess = int(answer) if answer.strip().isdecimal() else 0
        if guess == self.secret:
            return "right", 1.0, True
        return ("higher" if guess < self.secret else "lower"), 0.0, self.tries == TRIES


class SecretsConfig(GeneratorConfig):
    """Each number once."""

    placeholders = frozenset()

    template: str = f"Guess a number from 1 to {HIGHEST}."
    data_source: str = "guess"

    def prompts(self) -> Iterator[Prompt]:
        for secret in range(1, HIGHEST + 1):
            yield new_rollout(self.template, ground_truth=str(secret), data_source=self.data_source).prompt


def task(repeat: int) -> TaskSpecConfig:
    return TaskSpecConfig(
        task_name="guess",
        sampler_config=SamplerConfig(dataset=SecretsConfig(), prompt_repeat_k=repeat),
        agent_loop_config=EnvAgentLoopConfig(
            env=GuessEnv, max_tokens_per_turn=4, sample_params=SampleParams(max_tokens=40)
        ),
    )


trainer = RLColocateTrainerConfig(
    model="tiny-chat",
    engines=EnginesConfig(engine=EmbeddedEngineConfig(max_running=128)),
    train=TrainWorkerConfig(lr=1e-3),
    tasks=[task(16)],
    evaluator=EvaluatorConfig(tasks=[task(30)]),
    total_steps=50,
    train_batch_size=14,
    eval_interval=25,
    seed=0,
)
