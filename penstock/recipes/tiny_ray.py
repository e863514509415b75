"""The tiny model on Ray, every part in actors: the same run as `tiny`, on one machine or several.

    penstock train tiny-ray --address local

`local` starts a Ray on this machine and stops it again; `auto` or HOST:PORT takes a cluster that is there. Two actors
play, two judge, two are engines, two are train ranks; each says what it takes, so that nothing starts that does not
fit.
"""

from penstock import (
    AcceleratorResourcesConfig,
    EmbeddedEngineConfig,
    EnginesConfig,
    EvalTaskConfig,
    EvaluatorConfig,
    NativeJudgerConfig,
    ReverseWordConfig,
    RLColocateTrainerConfig,
    RunResourcesConfig,
    SampleParams,
    SamplerConfig,
    SingleTurnAgentLoopConfig,
    TaskSpecConfig,
    TrainWorkerConfig,
    WorkerResourcesConfig,
    exact_match,
)

MiB = 1 << 20

words = ReverseWordConfig(template="{word}>", alphabet="abcdefgh", min_length=4, max_length=6, held_out=400)
answer = SingleTurnAgentLoopConfig(
    sample_params=SampleParams(max_tokens=8),
    num_ray_actors=2,
    num_cpus_per_actor=0.2,
    cpu_memory_per_actor=600 * MiB,
)
judge = NativeJudgerConfig(
    reward_handler=exact_match,
    num_workers=1,
    num_ray_actors=2,
    num_cpus_per_actor=0.2,
    cpu_memory_per_actor=200 * MiB,
)

trainer = RLColocateTrainerConfig(
    model="tiny",
    engines=EnginesConfig(engine=EmbeddedEngineConfig(max_running=128, process=True), num_engines=2),
    resources=RunResourcesConfig(
        train=AcceleratorResourcesConfig(num_workers=2, num_cpus_per_worker=0.2, cpu_memory_per_worker=800 * MiB),
        engines=WorkerResourcesConfig(num_cpus_per_worker=0.2, cpu_memory_per_worker=600 * MiB),
    ),
    train=TrainWorkerConfig(lr=1e-3),
    tasks=[
        TaskSpecConfig(
            task_name="reverse",
            sampler_config=SamplerConfig(dataset=words, prompt_repeat_k=8),
            agent_loop_config=answer,
            judger_config=judge,
        )
    ],
    evaluator=EvaluatorConfig(
        tasks=[
            EvalTaskConfig(
                task_name="reverse",
                dataset=words.replace("split", "eval"),
                agent_loop_config=answer,
                judger_config=judge,
            )
        ],
        greedy=True,
    ),
    total_steps=50,
    train_batch_size=16,
    eval_interval=25,
    seed=0,
    deterministic=True,
)
