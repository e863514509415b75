"""A model of two layers learns to write words backwards, in under a minute on any CPU.

    penstock train tiny

For a first look, for tests, and for trying out a change: the whole pipeline with real learning and nothing to
download. The model is made on the spot and answers about every third word right. Two runs give the same weights.
"""

from penstock import (
    EmbeddedEngineConfig,
    EnginesConfig,
    EvalTaskConfig,
    EvaluatorConfig,
    ReverseWordConfig,
    RLColocateTrainerConfig,
    SampleParams,
    SamplerConfig,
    SingleTurnAgentLoopConfig,
    TaskSpecConfig,
    TrainWorkerConfig,
    exact_match,
)

words = ReverseWordConfig(template="{word}>", alphabet="abcdefgh", min_length=4, max_length=6, held_out=400)
answer = SingleTurnAgentLoopConfig(sample_params=SampleParams(max_tokens=8))

trainer = RLColocateTrainerConfig(
    model="tiny",
    engines=EnginesConfig(engine=EmbeddedEngineConfig(max_running=128)),
    train=TrainWorkerConfig(lr=1e-3),
    tasks=[
        TaskSpecConfig(
            task_name="reverse",
            sampler_config=SamplerConfig(dataset=words, prompt_repeat_k=8),
            agent_loop_config=answer,
            judger_config=exact_match,
        )
    ],
    evaluator=EvaluatorConfig(
        tasks=[
            EvalTaskConfig(
                task_name="reverse",
                dataset=words.replace("split", "eval"),
                agent_loop_config=answer,
                judger_config=exact_match,
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
