"""An agent written with the `openai` client, trained as it is: it asks a calculator.

    penstock train agent-openai

`answer_sum` knows nothing of Penstock: it is given a base URL and a key, and has a conversation with tools. Each call
is one rollout; what the model wrote in it is recorded where it was made, and rewarded when the final answer is right.
The model is made on the spot and calls the calculator rightly about every third time.
"""

import json
import operator
import re
from typing import Any

import openai

from penstock import (
    AdditionConfig,
    AsyncProduceStrategyConfig,
    EmbeddedEngineConfig,
    EndpointAgentLoopConfig,
    EnginesConfig,
    EvalTaskConfig,
    EvaluatorConfig,
    RLColocateTrainerConfig,
    SampleParams,
    SamplerConfig,
    TaskSpecConfig,
    TrainWorkerConfig,
    exact_match,
)

CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


def calculate(arguments: str) -> str:
    numbers = re.fullmatch(r"(\d+)\+(\d+)", str(json.loads(arguments).get("expression")))
    return str(operator.add(*map(int, numbers.groups()))) if numbers else "?"


async def answer_sum(prompt: str, base_url: str, api_key: str) -> str:
    messages: list[Any] = [{"role": "user", "content": prompt}]
    # Without certificates: loading them takes longer than a whole conversation with a model on this machine.
    http = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:
        for _ in range(3):
            answer = await client.chat.completions.create(model="any", messages=messages, tools=[CALCULATOR])
            message = answer.choices[0].message
            messages.append(message)
            calls: list[Any] = message.tool_calls or []
            if not calls:
                break
            for call in calls:
                result = calculate(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return message.content or ""


sums = AdditionConfig(template="{a}+{b}=?", max_number=99, held_out=200)
agent = EndpointAgentLoopConfig(agent=answer_sum, max_turns=4, sample_params=SampleParams(max_tokens=48))

trainer = RLColocateTrainerConfig(
    model="tiny-chat",
    engines=EnginesConfig(engine=EmbeddedEngineConfig(max_running=128)),
    train=TrainWorkerConfig(lr=5e-4),
    tasks=[
        TaskSpecConfig(
            task_name="sums",
            sampler_config=SamplerConfig(dataset=sums, prompt_repeat_k=8),
            agent_loop_config=agent,
            judger_config=exact_match,
            produce_strategy_config=AsyncProduceStrategyConfig(
                over_sample_threshold=0.25, enable_partial_rollout=True, max_staleness=1
            ),
        )
    ],
    evaluator=EvaluatorConfig(
        tasks=[
            EvalTaskConfig(
                task_name="sums",
                dataset=sums.replace("split", "eval"),
                agent_loop_config=agent,
                judger_config=exact_match,
            )
        ],
        eval_sample_num=100,
    ),
    total_steps=20,
    train_batch_size=8,
    eval_interval=20,
    seed=0,
)
