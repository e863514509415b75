"""Penstock's embedded engine, one workload per request: all requests at once through its port."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import serve

job = serve.next_line()

import torch  # noqa: E402 - the job comes first: its environment decides what torch finds

from penstock.engine import EmbeddedEngineConfig  # noqa: E402
from penstock.engine.torch_engine.products import choose_products, packed_where_faster  # noqa: E402
from penstock.models import load_tokenizer  # noqa: E402
from penstock.models.threads import release_threads  # noqa: E402
from penstock.ports import Engine, GenerateRequest  # noqa: E402
from penstock.rollout import SampleParams, pack_ids, unpack_ids  # noqa: E402

numbers = itertools.count()


async def generate(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    prompts = [pack_ids(ids) for ids in request["prompts"]]
    started = time.perf_counter()
    asked = [
        GenerateRequest(
            request_id=f"request-{number}",
            prompt_ids=prompt,
            params=SampleParams(max_tokens=length, min_tokens=length),
            seed=number,
        )
        for prompt, length, number in zip(prompts, request["lengths"], numbers, strict=False)
    ]
    answers = await asyncio.gather(*map(engine.generate, asked))
    seconds = time.perf_counter() - started
    made = [len(unpack_ids(answer.ids)) for answer in answers]
    assert made == request["lengths"], "answers of other lengths than asked"
    return {"seconds": seconds, "tokens": sum(made)}


def matmul_seconds(dtype: torch.dtype, rows: int, steps: int) -> float:
    """The matrix products of one decode step and nothing else, with the engine's own kernel and SmolLM2's shapes."""
    hidden, heads, kv_heads, head, mlp, vocab, layers = 576, 9, 3, 64, 1536, 49152, 30
    products = choose_products(dtype, torch.device("cpu"), deterministic=False)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).mul_(0.02).to(dtype)

    weights = [
        (matrix((heads + 2 * kv_heads) * head, hidden), matrix(hidden, heads * head), matrix(2 * mlp, hidden),
         matrix(hidden, mlp))
        for _ in range(layers)
    ]  # fmt: skip
    output = matrix(vocab, hidden)
    products = packed_where_faster(products, [*itertools.chain(*weights), output])
    x, inner, wide = (torch.randn(rows, size).to(products.dtype) for size in (hidden, heads * head, mlp))
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        for qkv, out, gate_up, down in weights:
            products.apply(x, qkv, None)
            products.apply(inner, out, None)
            products.apply(x, gate_up, None)
            products.apply(wide, down, None)
        products.apply(x, output, None)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


async def main() -> None:
    torch.set_num_threads(job["threads"])
    tokenizer = load_tokenizer(Path(job["model"]))
    engines = {
        dtype: EmbeddedEngineConfig(dtype=dtype, max_running=job["max_running"]).build(
            job["model"], tokenizer, threads=job["threads"]
        )
        for dtype in job["dtypes"]
    }
    serve.answer(ready=True)
    while True:
        request = serve.next_line()
        if request["way"] == "bound":
            seconds = matmul_seconds(getattr(torch, request["dtype"]), request["batch"], request["steps"])
            release_threads()
            serve.answer(seconds=seconds, tokens=request["batch"])
        else:
            serve.answer(**await generate(engines[request["dtype"]], request))


asyncio.run(main())
