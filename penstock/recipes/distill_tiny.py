"""The tiny model learns from a teacher alone: on-policy distillation, without any reward.

    penstock train distill-tiny

The student answers, the teacher says how likely it finds each token of the answer, and that difference is the whole
advantage: `advantage="none"` takes nothing from the judge, which only shows how well it goes.
"""

from penstock import (
    DistillationConfig,
    EmbeddedEngineConfig,
    EnginesConfig,
    EvalTaskConfig,
    EvaluatorConfig,
    PGLossConfig,
    ReverseWordConfig,
    RLColocateTrainerConfig,
    SampleParams,
    SamplerConfig,
    SingleTurnAgentLoopConfig,
    TaskSpecConfig,
    TeacherConfig,
    TrainWorkerConfig,
    exact_match,
)

words = ReverseWordConfig(template="{word}>", alphabet="abcdefgh", min_length=4, max_length=6, held_out=400)
answer = SingleTurnAgentLoopConfig(sample_params=SampleParams(max_tokens=8))

trainer = RLColocateTrainerConfig(
    model="tiny",
    engines=EnginesConfig(engine=EmbeddedEngineConfig(max_running=128)),
    train=TrainWorkerConfig(lr=1e-3, advantage="none", loss=PGLossConfig()),
    distillation=DistillationConfig(
        teachers=TeacherConfig(
            model="tiny-teacher", engines=EnginesConfig(engine=EmbeddedEngineConfig(max_running=128))
        ),
        coef=1.0,
    ),
    tasks=[
        TaskSpecConfig(
            task_name="reverse",
            sampler_config=SamplerConfig(dataset=words, prompt_repeat_k=2),
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
    total_steps=30,
    train_batch_size=32,
    eval_interval=25,
    seed=0,
)
