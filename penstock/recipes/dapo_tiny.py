"""DAPO on the tiny model: clip-higher, dynamic sampling, token-mean, over-long filtering and shaping.

    penstock train dapo-tiny

A group whose answers are all right or all wrong has no gradient: `has_different_rewards` refuses it and another prompt
is drawn in its place. An answer near its budget of tokens loses score, one that the budget cut off is not trained. Each
batch makes two updates, so that there is a ratio to clip.
"""

from penstock import (
    EmbeddedEngineConfig,
    EnginesConfig,
    EvalTaskConfig,
    EvaluatorConfig,
    OverlongConfig,
    PPOLossConfig,
    ReverseWordConfig,
    RLColocateTrainerConfig,
    SampleParams,
    SamplerConfig,
    SingleTurnAgentLoopConfig,
    SyncProduceStrategyConfig,
    TaskSpecConfig,
    TrainWorkerConfig,
    exact_match,
    has_different_rewards,
)

words = ReverseWordConfig(template="{word}>", alphabet="abcdefgh", min_length=4, max_length=6, held_out=400)
answer = SingleTurnAgentLoopConfig(sample_params=SampleParams(max_tokens=8))

trainer = RLColocateTrainerConfig(
    model="tiny",
    engines=EnginesConfig(engine=EmbeddedEngineConfig(max_running=128)),
    train=TrainWorkerConfig(
        lr=1e-3,
        loss=PPOLossConfig(clip_low=0.2, clip_high=0.28, aggregation="token-mean"),
        overlong=OverlongConfig(mask_truncated=True, buffer_tokens=1),
        updates_per_batch=2,
    ),
    tasks=[
        TaskSpecConfig(
            task_name="reverse",
            sampler_config=SamplerConfig(dataset=words, prompt_repeat_k=8),
            agent_loop_config=answer,
            judger_config=exact_match,
            produce_strategy_config=SyncProduceStrategyConfig(is_valid_sample_fn=has_different_rewards),
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
    train_batch_size=16,
    eval_interval=25,
    seed=0,
)
