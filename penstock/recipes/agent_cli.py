"""A program as the agent: a process per rollout, which is told a base URL, a key and its task.

    penstock train agent-cli

The program is `_cli_agent.py` beside this file: forty lines that ask OpenAI's API and a calculator. What it prints is
its answer. Any command works in its place; `{prompt}` in an argument is what the user asks, and the whole task is on
standard input.
"""

import sys
from pathlib import Path

import penstock.recipes
from penstock import (
    AdditionConfig,
    AsyncProduceStrategyConfig,
    EmbeddedEngineConfig,
    EndpointAgentLoopConfig,
    EnginesConfig,
    RLColocateTrainerConfig,
    SampleParams,
    SamplerConfig,
    TaskSpecConfig,
    TrainWorkerConfig,
    exact_match,
)

program = Path(penstock.recipes.__path__[0]) / "_cli_agent.py"

trainer = RLColocateTrainerConfig(
    model="tiny-chat",
    engines=EnginesConfig(engine=EmbeddedEngineConfig(max_running=64)),
    train=TrainWorkerConfig(lr=5e-4),
    tasks=[
        TaskSpecConfig(
            task_name="sums",
            sampler_config=SamplerConfig(
                dataset=AdditionConfig(template="{a}+{b}=?", max_number=99), prompt_repeat_k=8
            ),
            agent_loop_config=EndpointAgentLoopConfig(
                command=[sys.executable, str(program), "{prompt}"],
                max_turns=4,
                sample_params=SampleParams(max_tokens=48),
            ),
            judger_config=exact_match,
            produce_strategy_config=AsyncProduceStrategyConfig(enable_partial_rollout=True, max_staleness=1),
        )
    ],
    total_steps=12,
    train_batch_size=8,
    seed=0,
)
