"""SmolLM2-135M learns to add numbers up to 20, on a CPU in a few minutes.

    penstock train quickstart

A step asks 8 sums, 8 times each. The answer's last number is compared with the sum: 1 or 0. GRPO raises what was
better than its siblings. 100 pairs are held out; they are asked before and after training.

Checkpoints are those before the first step and after the last: a run that is killed trains what it has again from the
ledger, without generating it, and the directory stays at 2.2 GB.
"""

from penstock import (
    AdditionConfig,
    EmbeddedEngineConfig,
    EnginesConfig,
    EvaluatorConfig,
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
    train=TrainWorkerConfig(lr=2e-5, dtype="auto"),
    tasks=[addition],
    evaluator=EvaluatorConfig(tasks=[held_out], greedy=True),
    total_steps=16,
    train_batch_size=8,
    eval_interval=16,
    checkpoint_interval=16,
    seed=0,
)
