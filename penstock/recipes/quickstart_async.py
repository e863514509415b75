"""SmolLM2-135M learns to add with a producer beside the trainer, on a CPU.

    penstock train quickstart-async

The task of `quickstart`, in float32. The engine has a process of its own: it goes on answering while the trainer
trains, up to one step ahead, and an answer that a weight sync interrupts continues under the new weights.
"""

from penstock import (
    AdditionConfig,
    AsyncProduceStrategyConfig,
    EmbeddedEngineConfig,
    EnginesConfig,
    EvaluatorConfig,
    RLDisaggregatedTrainerConfig,
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
    produce_strategy_config=AsyncProduceStrategyConfig(
        over_sample_threshold=0.25, enable_partial_rollout=True, max_staleness=1, tail_batch_trigger_size=0
    ),
)

held_out = TaskSpecConfig(
    task_name="addition",
    sampler_config=SamplerConfig(dataset=AdditionConfig(max_number=20, held_out=100, split="eval"), prompt_repeat_k=2),
    agent_loop_config=answer,
    judger_config=final_number,
)

trainer = RLDisaggregatedTrainerConfig(
    model="smollm2-135m",
    engines=EnginesConfig(engine=EmbeddedEngineConfig(max_running=64, process=True)),
    train=TrainWorkerConfig(lr=1e-5),
    tasks=[addition],
    evaluator=EvaluatorConfig(tasks=[held_out], greedy=True),
    total_steps=25,
    train_batch_size=8,
    eval_interval=25,
    seed=0,
)
