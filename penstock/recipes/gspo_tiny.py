"""GSPO on the tiny model: the ratio of a whole answer is clipped, never that of a token.

    penstock train gspo-tiny

The bounds are those of the paper, a thousandth of PPO's: a mean over an answer's tokens moves that much less. A batch
makes two updates, so that there is a ratio to clip.
"""

from penstock import (
    EmbeddedEngineConfig,
    EnginesConfig,
    EvalTaskConfig,
    EvaluatorConfig,
    GSPOLossConfig,
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
    train=TrainWorkerConfig(lr=1e-3, loss=GSPOLossConfig(clip_low=3e-4, clip_high=4e-4), updates_per_batch=2),
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
    total_steps=40,
    train_batch_size=16,
    eval_interval=25,
    seed=0,
)
