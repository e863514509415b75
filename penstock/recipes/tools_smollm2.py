"""SmolLM2-135M learns to ask a calculator reliably, on a CPU in some minutes.

    penstock train tools-smollm2

Its chat template knows no tools, so two examples before each question show how to call: an answer that is nothing but
JSON is a call, and what the calculator says follows as a message of the role `tool`. At first two of three calls are
well written, and far fewer sums right than that, because the result must be repeated too.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from penstock import (
    AdditionConfig,
    EmbeddedEngineConfig,
    EnginesConfig,
    EvaluatorConfig,
    Prompt,
    RLColocateTrainerConfig,
    SampleParams,
    SamplerConfig,
    TaskSpecConfig,
    ToolAgentLoopConfig,
    TrainWorkerConfig,
    calculator,
    final_number,
    new_rollout,
)


def example(expression: str, result: str) -> list[dict[str, Any]]:
    call = f'{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}'
    return [
        {"role": "user", "content": f"{expression}=?"},
        {"role": "assistant", "content": call},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
    ]


EXAMPLES = [{"role": "system", "content": "You have a calculator."}, *example("12+7", "19"), *example("305+48", "353")]


class ShownSumsConfig(AdditionConfig):
    """Sums after two examples of how the calculator is asked; two thousand of the million that there are."""

    def prompts(self) -> Iterator[Prompt]:
        for asked in itertools.islice(super().prompts(), 2000):
            yield new_rollout(
                [*EXAMPLES, *asked.messages], ground_truth=asked.ground_truth, data_source=asked.data_source
            ).prompt


def right_sum(response: str, label: Any, extra_info: dict[str, Any]) -> dict[str, float]:
    told = [turn["content"] for turn in extra_info.get("turns", []) if turn["role"] == "tool"]
    return {"score": final_number(response, label, extra_info), "called_rightly": float(label in told)}


sums = ShownSumsConfig(max_number=999, template="{a}+{b}=?", held_out=50)
ask = ToolAgentLoopConfig(
    tools=[calculator], parser="json", max_turns=2, max_tokens_per_turn=32, sample_params=SampleParams(max_tokens=96)
)


def task(split: str, repeat: int) -> TaskSpecConfig:
    return TaskSpecConfig(
        task_name="sums",
        sampler_config=SamplerConfig(dataset=sums.replace("split", split), prompt_repeat_k=repeat),
        agent_loop_config=ask,
        judger_config=right_sum,
    )


trainer = RLColocateTrainerConfig(
    model="smollm2-135m",
    engines=EnginesConfig(engine=EmbeddedEngineConfig(max_running=64, dtype="auto")),
    train=TrainWorkerConfig(lr=1e-5, dtype="auto"),
    tasks=[task("train", 8)],
    evaluator=EvaluatorConfig(tasks=[task("eval", 1)]),
    total_steps=15,
    train_batch_size=8,
    eval_interval=15,
    seed=0,
)
