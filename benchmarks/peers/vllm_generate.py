"""vLLM, one workload per request: everything is given to it at once. Runs in .venv-vllm."""

from __future__ import annotations

import os
import time

import serve

job = serve.next_line()
os.environ.update(
    VLLM_NO_USAGE_STATS="1",
    VLLM_DO_NOT_TRACK="1",
    VLLM_LOGGING_LEVEL="ERROR",
    # The model runs in this process: one more, waiting in a loop, would take a core from it.
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
)

import torch  # noqa: E402 - after the environment

if job["without_amx"]:
    # vLLM's own kernels ask torch, which believes a CPU that announces AMX and dies of it.
    torch.cpu._is_amx_tile_supported = lambda: False

from vllm import LLM, SamplingParams  # noqa: E402


def main() -> None:
    torch.set_num_threads(job["threads"])
    llm = LLM(
        model=job["model"],
        dtype=job["dtype"],
        max_num_seqs=job["max_running"],
        max_model_len=1024,
        enforce_eager=job["eager"],
        kv_cache_memory_bytes=2 << 30,
        enable_prefix_caching=True,
        generation_config="vllm",
        disable_log_stats=True,
        seed=job["seed"],
    )
    serve.answer(ready=True)
    while True:
        request = serve.next_line()
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        params = [
            SamplingParams(temperature=1.0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False)
            for n in request["lengths"]
        ]
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        made = [len(output.outputs[0].token_ids) for output in outputs]
        assert made == request["lengths"], "answers of other lengths than asked"
        serve.answer(seconds=seconds, tokens=sum(made))


main()
