"""SmolLM2-135M learns to add on Ray: `quickstart` with two of every part, on one machine or several.

    penstock train quickstart-ray --address local
    penstock train quickstart-ray --address auto

Two engines answer, two actors play, two judge, two train ranks share every step. On one machine they share its cores:
the same work, divided; on several each node takes its part.
"""

from penstock import (
    AcceleratorResourcesConfig,
    AdditionConfig,
    EmbeddedEngineConfig,
    EnginesConfig,
    EvaluatorConfig,
    NativeJudgerConfig,
    RLColocateTrainerConfig,
    RunResourcesConfig,
    SampleParams,
    SamplerConfig,
    SingleTurnAgentLoopConfig,
    TaskSpecConfig,
    TrainWorkerConfig,
    WorkerResourcesConfig,
    final_number,
)

MiB, GiB = 1 << 20, 1 << 30

answer = SingleTurnAgentLoopConfig(
    sample_params=SampleParams(max_tokens=12),
    num_ray_actors=2,
    num_cpus_per_actor=0.2,
    cpu_memory_per_actor=600 * MiB,
)
judge = NativeJudgerConfig(
    reward_handler=final_number,
    num_workers=1,
    num_ray_actors=2,
    num_cpus_per_actor=0.2,
    cpu_memory_per_actor=200 * MiB,
)

addition = TaskSpecConfig(
    task_name="addition",
    sampler_config=SamplerConfig(dataset=AdditionConfig(max_number=20, held_out=100), prompt_repeat_k=8),
    agent_loop_config=answer,
    judger_config=judge,
)

held_out = TaskSpecConfig(
    task_name="addition",
    sampler_config=SamplerConfig(dataset=AdditionConfig(max_number=20, held_out=100, split="eval"), prompt_repeat_k=2),
    agent_loop_config=answer,
    judger_config=judge,
)

trainer = RLColocateTrainerConfig(
    model="smollm2-135m",
    engines=EnginesConfig(engine=EmbeddedEngineConfig(max_running=64, dtype="auto", process=True), num_engines=2),
    train=TrainWorkerConfig(lr=2e-5, dtype="auto"),
    tasks=[addition],
    evaluator=EvaluatorConfig(tasks=[held_out], greedy=True),
    resources=RunResourcesConfig(
        train=AcceleratorResourcesConfig(num_workers=2, num_cpus_per_worker=0.2, cpu_memory_per_worker=3 * GiB),
        engines=WorkerResourcesConfig(num_cpus_per_worker=0.2, cpu_memory_per_worker=3 * GiB // 2),
    ),
    total_steps=16,
    train_batch_size=8,
    eval_interval=16,
    checkpoint_interval=16,
    seed=0,
)
