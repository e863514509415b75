"""A procedurally generated task of reasoning-gym, scored by its own scorer.

    penstock train gym
    penstock train gym --set model=Qwen/Qwen2.5-0.5B-Instruct

Needs the extra `gym`. The task here counts letters; set `name` to any other task of reasoning-gym, in both splits.
"""

from penstock import (
    EmbeddedEngineConfig,
    EnginesConfig,
    EvaluatorConfig,
    ReasoningGymConfig,
    RLColocateTrainerConfig,
    SampleParams,
    SamplerConfig,
    SingleTurnAgentLoopConfig,
    TaskSpecConfig,
    TrainWorkerConfig,
    reasoning_gym_score,
)

letters = ReasoningGymConfig(
    name="letter_counting",
    params={"min_words": 1, "max_words": 4},
    template="{question} Answer with the number only.",
    size=500,
    held_out=50,
)
answer = SingleTurnAgentLoopConfig(sample_params=SampleParams(max_tokens=16))

trainer = RLColocateTrainerConfig(
    model="smollm2-135m",
    engines=EnginesConfig(engine=EmbeddedEngineConfig(max_running=64)),
    train=TrainWorkerConfig(lr=1e-5),
    tasks=[
        TaskSpecConfig(
            task_name="letters",
            sampler_config=SamplerConfig(dataset=letters, prompt_repeat_k=8),
            agent_loop_config=answer,
            judger_config=reasoning_gym_score,
        )
    ],
    evaluator=EvaluatorConfig(
        tasks=[
            TaskSpecConfig(
                task_name="letters",
                sampler_config=SamplerConfig(dataset=letters.replace("split", "eval"), prompt_repeat_k=1),
                agent_loop_config=answer,
                judger_config=reasoning_gym_score,
            )
        ],
        greedy=True,
    ),
    total_steps=50,
    train_batch_size=8,
    eval_interval=25,
    seed=0,
)
