"""DPPO on the tiny model, with a producer beside the trainer: the loss of the asynchronous camp.

    penstock train dppo-tiny-async

Answers are up to two syncs old when they are trained. A token counts until its probability has moved by 0.2 from what
it was sampled with, to where its advantage pushes it; ratios are not clipped.
"""

from penstock import (
    AsyncProduceStrategyConfig,
    DPPOLossConfig,
    EmbeddedEngineConfig,
    EnginesConfig,
    EvalTaskConfig,
    EvaluatorConfig,
    ReverseWordConfig,
    RLDisaggregatedTrainerConfig,
    SampleParams,
    SamplerConfig,
    SingleTurnAgentLoopConfig,
    TaskSpecConfig,
    TrainWorkerConfig,
    exact_match,
)

words = ReverseWordConfig(template="{word}>", alphabet="abcdefgh", min_length=4, max_length=6, held_out=400)
answer = SingleTurnAgentLoopConfig(sample_params=SampleParams(max_tokens=8))

trainer = RLDisaggregatedTrainerConfig(
    model="tiny",
    engines=EnginesConfig(engine=EmbeddedEngineConfig(max_running=128, process=True)),
    train=TrainWorkerConfig(lr=1e-3, loss=DPPOLossConfig()),
    tasks=[
        TaskSpecConfig(
            task_name="reverse",
            sampler_config=SamplerConfig(dataset=words, prompt_repeat_k=8),
            agent_loop_config=answer,
            judger_config=exact_match,
            produce_strategy_config=AsyncProduceStrategyConfig(
                over_sample_threshold=0.25,
                enable_partial_rollout=True,
                max_staleness=2,
                tail_batch_trigger_size=0,
            ),
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
