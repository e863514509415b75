"""A short run that learns with vLLM, as the text of a configuration file."""

from __future__ import annotations

import textwrap
from pathlib import Path

CONFIG = """
    from penstock.agent_loop import SingleTurnAgentLoopConfig
    from penstock.data import ReverseWordConfig, SamplerConfig
    from penstock.engine import EnginesConfig, VllmEngineConfig
    from penstock.learn import KLConfig, LoRAConfig, TrainWorkerConfig
    from penstock.produce import AgentLoopManagerConfig, AsyncProduceStrategyConfig, TaskSpecConfig
    from penstock.rollout import SampleParams
    from penstock.trainer.config import RLDisaggregatedTrainerConfig

    def vowels(response, label, extra_info):
        return sum(letter in "aeiou" for letter in response) / 10

    task = TaskSpecConfig(
        task_name="vowels",
        sampler_config=SamplerConfig(dataset=ReverseWordConfig(), prompt_repeat_k=8),
        agent_loop_config=SingleTurnAgentLoopConfig(sample_params=SampleParams(max_tokens=10)),
        judger_config=vowels,
        produce_strategy_config=AsyncProduceStrategyConfig(enable_partial_rollout=True, max_staleness=1),
    )
    trainer = RLDisaggregatedTrainerConfig(
        model="{model}",
        engines=EnginesConfig(
            engine=VllmEngineConfig(dtype="float32", max_running=64, max_context=256, kv_cache_gb=0.1)
        ),
        train={train},
        manager=AgentLoopManagerConfig(tasks=[task]),
        total_steps=8,
        train_batch_size=4,
    )
"""


def vllm_run(model_dir: Path, *, train: str = "TrainWorkerConfig(lr=1e-2)") -> str:
    return textwrap.dedent(CONFIG.format(model=model_dir, train=train))
