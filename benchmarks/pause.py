"""How long a pause takes with 256 requests in flight: until every one has ended and handed back its partial tokens.

engine.pause_256_s.embedded  the embedded engine in a process of its own, a tiny random model
engine.pause_256_s.vllm      vLLM with the same model; in `detail` SmolLM2-135M too, beside the time of one of its steps

The value is the median of the rounds; `detail` has every round. Tokens that were made and not handed back are an error,
and so is an environment without vLLM.

python benchmarks/pause.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from penstock.engine import EmbeddedEngineConfig, EngineConfig, VllmEngineConfig
from penstock.errors import ConfigError
from penstock.models import load_tokenizer, resolve_model
from penstock.ports import Engine, GenerateRequest
from penstock.rollout import FinishReason, SampleParams, pack_ids

NUM_REQUESTS = 256
STEPS_MEASURED = 3


def save_tiny(directory: Path) -> None:
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # the smallest that vLLM has on a CPU
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    inner = Tokenizer(models.WordLevel({"<end>": 0}, unk_token="<end>"))
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>").save_pretrained(directory)


class Measured:
    """Pauses of one engine with one model."""

    def __init__(self, config: EngineConfig, directory: Path, prompt: list[int], max_tokens: int, rounds: int) -> None:
        self.pauses: list[float] = []
        self.steps: list[float] = []
        self._config = config
        self._directory = directory
        self._prompt = prompt
        self._max_tokens = max_tokens
        self._rounds = rounds

    async def measure(self) -> Measured:
        threads = max(1, (os.cpu_count() or 2) // 2)  # as in a run, where the trainer has the other half
        engine = self._config.build(str(self._directory), load_tokenizer(self._directory), threads=threads)
        try:
            for number in range(self._rounds):
                await self._round(engine, number)
        finally:
            await engine.close()
        return self

    async def _round(self, engine: Engine, number: int) -> None:
        await engine.check_health()
        before = (await engine.stats()).generated_tokens
        asked = [asyncio.create_task(engine.generate(self._request(number, i))) for i in range(NUM_REQUESTS)]
        await reach(engine, before + 2 * NUM_REQUESTS)
        at, started = (await engine.stats()).generated_tokens, time.perf_counter()
        now = await reach(engine, at + STEPS_MEASURED * NUM_REQUESTS)
        self.steps.append((time.perf_counter() - started) * NUM_REQUESTS / (now - at))
        started = time.perf_counter()
        await engine.pause_generation()
        completions = await asyncio.gather(*asked)
        self.pauses.append(time.perf_counter() - started)
        handed_back = sum(len(completion.ids) // 4 for completion in completions)
        made = (await engine.stats()).generated_tokens - before
        in_flight = sum(completion.finish_reason is FinishReason.ABORT for completion in completions)
        if handed_back != made or in_flight != NUM_REQUESTS:
            sys.exit(f"{made} tokens were made and {handed_back} handed back; {in_flight} requests were in flight")
        await engine.continue_generation()

    def _request(self, number: int, i: int) -> GenerateRequest:
        params = SampleParams(max_tokens=self._max_tokens, min_tokens=self._max_tokens)
        return GenerateRequest(
            request_id=f"{number}-{i}",
            prompt_ids=pack_ids(self._prompt),
            params=params,
            seed=i,
            group_id=f"{number}-{i // 8}",
        )


async def reach(engine: Engine, tokens: int) -> int:
    """Waits until the engine has made so many; returns how many it has."""
    while (made := (await engine.stats()).generated_tokens) < tokens:  # noqa: ASYNC110 - an engine has no event
        await asyncio.sleep(0.001)
    return made


def report(figure: str, value: float, **detail: Any) -> None:
    print(json.dumps({"figure": figure, "value": round(value, 4), "unit": "s", "detail": detail}), flush=True)


def rounded(seconds: list[float]) -> list[float]:
    return [round(each, 4) for each in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    logging.disable_progress_bar()
    try:
        VllmEngineConfig().check()
    except ConfigError as error:
        sys.exit(f"benchmarks/pause.py: {error}")
    with tempfile.TemporaryDirectory() as name:
        tiny = Path(name)
        save_tiny(tiny)
        config: EngineConfig = EmbeddedEngineConfig(process=True, max_running=NUM_REQUESTS)
        embedded = asyncio.run(Measured(config, tiny, [1, 2, 3], 2000, rounds).measure())
        report(
            "engine.pause_256_s.embedded",
            statistics.median(embedded.pauses),
            requests=NUM_REQUESTS,
            rounds=rounded(embedded.pauses),
            step_s=round(statistics.median(embedded.steps), 4),
        )
        config = VllmEngineConfig(dtype="float32", max_running=NUM_REQUESTS, max_context=2048, kv_cache_gb=1.0)
        vllm = asyncio.run(Measured(config, tiny, [1, 2, 3], 2000, rounds).measure())
    smollm = asyncio.run(measure_smollm(rounds))
    report(
        "engine.pause_256_s.vllm",
        statistics.median(vllm.pauses),
        requests=NUM_REQUESTS,
        tiny_s=round(statistics.median(vllm.pauses), 4),
        tiny_rounds=rounded(vllm.pauses),
        tiny_step_s=round(statistics.median(vllm.steps), 4),
        smollm_s=round(statistics.median(smollm.pauses), 4),
        smollm_rounds=rounded(smollm.pauses),
        smollm_step_s=round(statistics.median(smollm.steps), 4),
        smollm_step_rounds=rounded(smollm.steps),
    )


async def measure_smollm(rounds: int) -> Measured:
    directory = resolve_model("smollm2-135m")
    prompt = load_tokenizer(directory).render([{"role": "user", "content": "Count from 1 to 100."}])
    config = VllmEngineConfig(dtype="bfloat16", max_running=NUM_REQUESTS, max_context=512)
    return await Measured(config, directory, prompt, 400, rounds).measure()


if __name__ == "__main__":
    main()
