"""SmolLM2-135M learns to add numbers up to 20 by a LoRA adapter: `quickstart`, with two million numbers to train.

    penstock train lora-smollm2

The adapter has fifty times the rate of the weights: at rank 8 and alpha 16 its first steps then change what the layers
compute about as much as those of `quickstart`. A checkpoint holds the adapter alone;
`hf/final` is the whole model, and `hf/final/adapter` is what peft loads.
"""

from penstock import (
    AdditionConfig,
    EmbeddedEngineConfig,
    EnginesConfig,
    EvaluatorConfig,
    LoRAConfig,
    RLColocateTrainerConfig,
    SampleParams,
    SamplerConfig,
    SingleTurnAgentLoopConfig,
    TaskSpecConfig,
    TrainWorkerConfig,
    final_number,
)

answer = SingleTurnAgentLoopConfig(sample_params=SampleParams(max_tokens=12))

addition = TaskSpecConfig(
    task_name="addition",
    sampler_config=SamplerConfig(dataset=AdditionConfig(max_number=20, held_out=100), prompt_repeat_k=8),
    agent_loop_config=answer,
    judger_config=final_number,
)

held_out = TaskSpecConfig(
    task_name="addition",
    sampler_config=SamplerConfig(dataset=AdditionConfig(max_number=20, held_out=100, split="eval"), prompt_repeat_k=2),
    agent_loop_config=answer,
    judger_config=final_number,
)

trainer = RLColocateTrainerConfig(
    model="smollm2-135m",
    engines=EnginesConfig(engine=EmbeddedEngineConfig(max_running=64, dtype="auto")),
    train=TrainWorkerConfig(lr=5e-4, dtype="auto", lora=LoRAConfig(rank=8, alpha=16)),
    tasks=[addition],
    evaluator=EvaluatorConfig(tasks=[held_out], greedy=True),
    total_steps=16,
    train_batch_size=8,
    eval_interval=16,
    checkpoint_interval=16,
    seed=0,
)
