"""Grade-school mathematics (GSM8K) from your own files, with a model of your choice.

    penstock train gsm8k --set model=Qwen/Qwen2.5-0.5B-Instruct \\
        --set manager.tasks.0.sampler_config.dataset.path=gsm8k/train.jsonl \\
        --set evaluator.tasks.0.sampler_config.dataset.path=gsm8k/test.jsonl

Files are as published: one JSON object a line with `question` and `answer`; the answer ends in `#### 42`. The default
model is small enough to try the recipe on a CPU, and too small to get far.
"""

from pathlib import Path
from typing import Any

from penstock import (
    DatasetConfig,
    EmbeddedEngineConfig,
    EnginesConfig,
    EvaluatorConfig,
    JsonlTrackerConfig,
    PPOLossConfig,
    RLColocateTrainerConfig,
    RolloutState,
    SampleParams,
    SamplerConfig,
    SingleTurnAgentLoopConfig,
    TaskSpecConfig,
    TensorBoardTrackerConfig,
    TrainWorkerConfig,
    final_number,
    new_rollout,
)


def to_rollout(row: dict[str, Any]) -> RolloutState:
    question = f"{row['question']}\nThink step by step. End with the answer as a number."
    return new_rollout(question, ground_truth=row["answer"], data_source="gsm8k")


def gsm8k(path: str, repeat: int) -> TaskSpecConfig:
    return TaskSpecConfig(
        task_name="gsm8k",
        sampler_config=SamplerConfig(
            dataset=DatasetConfig(path=Path(path), to_rollout=to_rollout, max_prompt_tokens=512, over_long="drop"),
            prompt_repeat_k=repeat,
        ),
        agent_loop_config=SingleTurnAgentLoopConfig(sample_params=SampleParams(max_tokens=256)),
        judger_config=final_number,
    )


trainer = RLColocateTrainerConfig(
    model="smollm2-135m",
    engines=EnginesConfig(engine=EmbeddedEngineConfig(max_running=64)),
    train=TrainWorkerConfig(lr=1e-6, warmup_steps=10, loss=PPOLossConfig(clip_high=0.28)),
    tasks=[gsm8k("gsm8k/train.jsonl", repeat=8)],
    evaluator=EvaluatorConfig(tasks=[gsm8k("gsm8k/test.jsonl", repeat=1)], eval_sample_num=200),
    trackers=[JsonlTrackerConfig(), TensorBoardTrackerConfig()],
    total_steps=500,
    train_batch_size=16,
    eval_interval=50,
    seed=0,
)
