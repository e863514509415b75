"""Grade-school mathematics (GSM8K), judged by its final number and by a language model that reads the reasoning.

    penstock train gsm8k-llm-judge --set model=Qwen/Qwen2.5-0.5B-Instruct \\
        --set manager.tasks.0.sampler_config.dataset.path=gsm8k/train.jsonl \\
        --set evaluator.tasks.0.sampler_config.dataset.path=gsm8k/test.jsonl \\
        --set manager.tasks.0.judger_config.all_of.reasoning.base_url=http://127.0.0.1:8000/v1 \\
        --set manager.tasks.0.judger_config.all_of.reasoning.model=Qwen/Qwen2.5-7B-Instruct

The judge is any OpenAI-compatible endpoint. A right number is worth 1, good reasoning up to 0.3; an answer that the
judge does not rate in the asked form has no score. Evaluation looks at the number alone.
"""

from penstock import (
    ComposedJudgerConfig,
    EmbeddedEngineConfig,
    EnginesConfig,
    EvaluatorConfig,
    LLMJudgerConfig,
    NativeJudgerConfig,
    PPOLossConfig,
    RLColocateTrainerConfig,
    TrainWorkerConfig,
    final_number,
    weighted_sum,
)
from penstock.recipes.gsm8k import gsm8k

reasoning = LLMJudgerConfig(
    base_url="http://127.0.0.1:8000/v1",
    model="judge",
    template=(
        "A student solved a problem. Rate the reasoning, not the result: 0 for none or nonsense, 10 for steps that are "
        "complete, correct and easy to follow.\n\n[Problem]\n{prompt}\n\n[Solution of the textbook]\n{label}\n\n"
        "[The student's solution]\n{response}\n\nEnd with the rating in double brackets, as in: Rating: [[5]]"
    ),
    cache_size=100_000,
)
number_and_reasoning = ComposedJudgerConfig(
    all_of={"number": NativeJudgerConfig(reward_handler=final_number), "reasoning": reasoning},
    merge=weighted_sum,
    weights={"number": 1.0, "reasoning": 0.03},
)

trainer = RLColocateTrainerConfig(
    model="smollm2-135m",
    engines=EnginesConfig(engine=EmbeddedEngineConfig(max_running=64)),
    train=TrainWorkerConfig(lr=1e-6, warmup_steps=10, loss=PPOLossConfig(clip_high=0.28)),
    tasks=[gsm8k("gsm8k/train.jsonl", repeat=8).replace("judger_config", number_and_reasoning)],
    evaluator=EvaluatorConfig(tasks=[gsm8k("gsm8k/test.jsonl", repeat=1)], eval_sample_num=200),
    total_steps=500,
    train_batch_size=16,
    eval_interval=50,
    seed=0,
)
