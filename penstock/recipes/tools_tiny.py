"""A tiny chat model learns to ask a calculator, in about a minute on any CPU.

    penstock train tools-tiny

It is asked for sums it cannot do. It may guess, or call the calculator and say what it was told; the reward is 1 for
the right sum. The model is made on the spot and calls rightly about every third time. `reward/parts/called_rightly` in
`metrics.jsonl` is the share of rollouts in which the calculator was asked for the right sum.
"""

from typing import Any

from penstock import (
    AdditionConfig,
    EmbeddedEngineConfig,
    EnginesConfig,
    EvalTaskConfig,
    EvaluatorConfig,
    RLColocateTrainerConfig,
    SampleParams,
    SamplerConfig,
    TaskSpecConfig,
    ToolAgentLoopConfig,
    TrainWorkerConfig,
    calculator,
    final_number,
)


def right_sum(response: str, label: Any, extra_info: dict[str, Any]) -> dict[str, float]:
    """`response` is what the model wrote; `turns` has also what the tool said."""
    told = [turn["content"] for turn in extra_info.get("turns", []) if turn["role"] == "tool"]
    return {"score": final_number(response, label, extra_info), "called_rightly": float(label in told)}


sums = AdditionConfig(max_number=99, template="{a}+{b}=?", held_out=200)
ask = ToolAgentLoopConfig(tools=[calculator], max_turns=3, sample_params=SampleParams(max_tokens=64))

trainer = RLColocateTrainerConfig(
    model="tiny-chat",
    engines=EnginesConfig(engine=EmbeddedEngineConfig(max_running=128)),
    train=TrainWorkerConfig(lr=1e-3),
    tasks=[
        TaskSpecConfig(
            task_name="sums",
            sampler_config=SamplerConfig(dataset=sums, prompt_repeat_k=8),
            agent_loop_config=ask,
            judger_config=right_sum,
        )
    ],
    evaluator=EvaluatorConfig(
        tasks=[
            EvalTaskConfig(
                task_name="sums",
                dataset=sums.replace("split", "eval"),
                agent_loop_config=ask,
                judger_config=right_sum,
            )
        ],
    ),
    total_steps=30,
    train_batch_size=16,
    eval_interval=15,
    seed=0,
)
