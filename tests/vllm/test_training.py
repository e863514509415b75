"""Real runs with vLLM as the engine: a short one that learns, and SmolLM2's logprobs beside the trainer's."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_contract import has_made
from transformers import AutoModelForCausalLM
from vllm_run import vllm_run

from penstock.engine import VllmEngineConfig
from penstock.models import load_tokenizer, resolve_model
from penstock.ports import GenerateRequest
from penstock.rollout import FinishReason, SampleParams, pack_ids, unpack_ids

NUM_REQUESTS = 64


def steps_of(tmp_path: Path, text: str, *options: str) -> list[dict[str, Any]]:
    """The metrics of each step of `penstock train` with that configuration file."""
    (tmp_path / "short.py").write_text(text)
    train = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "train", "short.py", "--run-dir", "run", *options],
        cwd=tmp_path,
        env=os.environ | {"PENSTOCK_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert train.returncode == 0, train.stdout + train.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "reward/mean" in line]


def test_a_short_run_learns_and_its_metrics_tell_of_staleness_mismatch_and_sync(
    model_dir: Path, tmp_path: Path
) -> None:
    steps = steps_of(tmp_path, vllm_run(model_dir))
    assert len(steps) == 8
    rewards = [line["reward/mean"] for line in steps]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.05, rewards
    assert all(0 <= line["staleness/max"] <= 1 for line in steps)
    # Only where nothing is stale is the trainer's view of the tokens that of the weights that made them.
    fresh = [line["train/mismatch/max_abs"] for line in steps if line["staleness/max"] == 0]
    assert fresh and max(fresh) < 1e-3
    assert any("time/sync" in key for line in steps for key in line), sorted(steps[0])


def test_a_run_that_sends_the_adapter_alone_samples_from_what_it_trains(model_dir: Path, tmp_path: Path) -> None:
    lora = 'TrainWorkerConfig(lr=2e-2, lora=LoRAConfig(rank=4, sync="adapter"), kl=KLConfig(coef=1e-6))'
    fresh = ["--set", "manager.tasks.0.produce_strategy_config.max_staleness=0", "--set", "total_steps=3"]
    steps = steps_of(tmp_path, vllm_run(model_dir, train=lora), *fresh)
    assert [line["staleness/max"] for line in steps] == [0, 0, 0]
    assert max(line["train/mismatch/max_abs"] for line in steps) < 1e-3
    # The reference is the base under the adapter, which is what an engine without a sync would still have.
    assert steps[0]["train/reference_kl"] == 0 and steps[2]["train/reference_kl"] > 1e-3


def test_smollm2_hands_back_every_token_when_paused_and_its_logprobs_are_near_the_trainers(
    run: Callable[..., Any],
) -> None:
    directory = resolve_model("smollm2-135m")
    tokenizer = load_tokenizer(directory)
    prompt = tokenizer.render([{"role": "user", "content": "Count from 1 to 100."}])
    engine = VllmEngineConfig(dtype="bfloat16", max_running=NUM_REQUESTS, max_context=512).build(
        str(directory), tokenizer, threads=1
    )

    def request(number: int, max_tokens: int) -> GenerateRequest:
        params = SampleParams(max_tokens=max_tokens)
        return GenerateRequest(request_id=f"{number}", prompt_ids=pack_ids(prompt), params=params, seed=number)

    async def generate() -> list[Any]:
        await engine.check_health()
        answers = await asyncio.gather(*(engine.generate(request(i, 24)) for i in range(8)))
        before = (await engine.stats()).generated_tokens
        tasks = [asyncio.create_task(engine.generate(request(i, 400))) for i in range(NUM_REQUESTS)]
        await has_made(engine, before + NUM_REQUESTS)
        await engine.pause_generation()
        completions = await asyncio.gather(*tasks)
        assert FinishReason.ABORT in {completion.finish_reason for completion in completions}
        made = sum(len(completion.ids) // 4 for completion in completions)
        assert made == (await engine.stats()).generated_tokens - before
        await engine.close()
        return answers

    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    differences = []
    for completion in run(generate()):
        ids = unpack_ids(completion.ids).tolist()
        with torch.inference_mode():
            table = torch.log_softmax(model(torch.tensor([[*prompt, *ids]])).logits[0].float(), -1)
        trained = table[len(prompt) - 1 : -1].gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()
        differences.append(np.abs(trained - np.frombuffer(completion.logprobs, np.float32)))
    mismatch = np.concatenate(differences)
    print(f"mismatch of SmolLM2 in bfloat16: mean {mismatch.mean():.4f}, max {mismatch.max():.3f}")
    assert mismatch.mean() < 0.05
