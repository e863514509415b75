"""SmolLM2-135M learns to add with vLLM as the engine, on a CPU.

    make setup-vllm
    penstock train quickstart-vllm
    penstock train quickstart-vllm --set engines.num_engines=2

The task of `quickstart-async`. vLLM makes the answers in a process of its own, in bfloat16.
"""

from penstock import (
    AdditionConfig,
    AsyncProduceStrategyConfig,
    EnginesConfig,
    EvaluatorConfig,
    RLDisaggregatedTrainerConfig,
    SampleParams,
    SamplerConfig,
    SingleTurnAgentLoopConfig,
    TaskSpecConfig,
    TrainWorkerConfig,
    VllmEngineConfig,
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
    engines=EnginesConfig(engine=VllmEngineConfig(dtype="bfloat16", max_running=64, max_context=256, kv_cache_gb=0.5)),
    train=TrainWorkerConfig(lr=2e-5),
    tasks=[addition],
    evaluator=EvaluatorConfig(tasks=[held_out], greedy=True),
    total_steps=25,
    train_batch_size=8,
    eval_interval=25,
    seed=0,
)
