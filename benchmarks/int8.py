"""Why `auto` does not take int8: what it would change in the logprobs of an engine, and what it would save.

int8.mismatch_vs_bf16  how far an engine's logprobs are from the trainer's (k3, mean over the tokens of sampled answers)
                       with int8 products, over the same with bfloat16 products
int8.product_time      time of a decode step's products in torch's int8 (oneDNN, VNNI where the processor has it) over
                       that of the fastest way in which the engine computes them

SmolLM2-135M, 8 prompts x 8 answers of 32 tokens, sampled in float32. int8 has weights scaled by row and inputs by
token, exact sums, no care for outliers, and the output embedding left as it is. The trainer's logprobs are float32.

python benchmarks/int8.py [--tokens 32]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peers import report
from torch import Tensor, nn

from penstock.data import AdditionConfig
from penstock.models import load_tokenizer, resolve_model
from penstock.models.arithmetic import cpu_name, work_of
from penstock.models.bfloat16 import has_fast_products, keep_onednn_alive
from penstock.models.bfloat16 import product as bfloat16_product
from penstock.models.families import describe
from penstock.models.load import load_causal_lm
from penstock.models.packing import Packing, packing_for

PROMPTS, REPEAT, ROWS, ROUNDS = 8, 8, 64, 15
LARGEST = 127

Product = Callable[[Tensor, Tensor], Tensor]


def in_bfloat16(x: Tensor, weight: Tensor) -> Tensor:
    """As the engine: operands are rounded, sums and results are float32."""
    return x.bfloat16().float() @ weight.bfloat16().float().t()


def in_int8(x: Tensor, weight: Tensor) -> Tensor:
    return _rounded(x) @ _rounded(weight).t()


def _rounded(rows: Tensor) -> Tensor:
    """To the nearest of 255 numbers, spread evenly over each row."""
    scale = rows.abs().amax(-1, keepdim=True).clamp_min(1e-12) / LARGEST
    return (rows / scale).round() * scale


@contextlib.contextmanager
def computing_with(model: Any, product: Product | None) -> Iterator[None]:
    """The linear layers of the blocks multiply so; None: as they do."""
    inner = [layer for layer in model.model.modules() if isinstance(layer, nn.Linear)] if product else []
    for layer in inner:
        layer.forward = functools.partial(_multiplied, product, layer.weight)
    yield
    for layer in inner:
        del layer.forward


def _multiplied(product: Product, weight: Tensor, x: Tensor) -> Tensor:
    return product(x, weight)


def logprobs(model: Any, ids: Tensor, begin: list[int]) -> Tensor:
    """Of the tokens from `begin` on, of every row."""
    scores = model(ids).logits[:, :-1].float().log_softmax(-1)
    found = scores.gather(-1, ids[:, 1:, None])[..., 0]
    return torch.cat([row[first - 1 :] for row, first in zip(found, begin, strict=True)])


def mismatch(of_engine: Tensor, of_trainer: Tensor) -> dict[str, float]:
    """k3 over tokens that the trainer sampled, and the distance of two logprobs of a token."""
    apart = of_engine.double() - of_trainer.double()
    return {
        "k3": float((apart.exp() - 1 - apart).mean()),
        "mean": float(apart.abs().mean()),
        "most": float(apart.abs().max()),
    }


def measure_mismatch(model_dir: Path, tokens: int) -> tuple[dict[str, float], dict[str, float]]:
    """In bfloat16 and in int8. One prompt after the other: rows are as long as each other."""
    model: Any = load_causal_lm(model_dir).float().eval()
    tokenizer = load_tokenizer(model_dir)
    ways: dict[str, Product | None] = {"float32": None, "bfloat16": in_bfloat16, "int8": in_int8}
    found: dict[str, list[Tensor]] = {name: [] for name in ways}
    for prompt in itertools.islice(AdditionConfig(max_number=100).prompts(), PROMPTS):
        asked = torch.tensor([tokenizer.render(prompt.messages)] * REPEAT)
        ids = model.generate(asked, do_sample=True, top_k=0, max_new_tokens=tokens, min_new_tokens=tokens)
        for name, product in ways.items():
            with computing_with(model, product):
                found[name].append(logprobs(model, ids, [asked.shape[1]] * REPEAT))
    exact = torch.cat(found["float32"])
    in_bf16, in_eight = (mismatch(torch.cat(found[name]), exact) for name in ("bfloat16", "int8"))
    return in_bf16, in_eight


def product_seconds(model_dir: Path) -> dict[str, float]:
    """Of all layers and the output embedding, medians: in int8, and as the engine may compute them."""
    work = work_of(describe(model_dir), rows=ROWS)
    assert work is not None
    shapes = [shape for _ in range(work.layers) for shape in work.matrices]
    ways = {"int8": _int8_way(shapes)}
    for dtype in (torch.float32, torch.bfloat16):
        packing = packing_for(dtype, (into for _, into in shapes))
        ways[str(dtype)] = _plain_way(dtype, shapes) if packing is None else _packed_way(packing, dtype, shapes)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(times) for name, times in seconds.items()}


def _int8_way(shapes: list[tuple[int, int]]) -> Callable[[], None]:
    torch.backends.quantized.engine = "onednn"
    layers = []
    for out, into in shapes:
        given = torch.randn(out, into)
        weight = torch.quantize_per_channel(
            given, given.abs().amax(1) / LARGEST, torch.zeros(out, dtype=torch.int64), 0, torch.qint8
        )
        layers.append((torch.randn(ROWS, into), torch.ops.quantized.linear_prepack(weight, None)))

    def run() -> None:
        for x, packed in layers:
            torch.ops.quantized.linear_dynamic(x, packed, False)

    return run


def _plain_way(dtype: torch.dtype, shapes: list[tuple[int, int]]) -> Callable[[], None]:
    multiply = bfloat16_product if dtype == torch.bfloat16 and has_fast_products() else torch.mm
    layers = [(torch.randn(ROWS, into).to(dtype), torch.randn(out, into).to(dtype)) for out, into in shapes]

    def run() -> None:
        for x, weight in layers:
            multiply(x, weight.t())

    return run


def _packed_way(packing: Packing, dtype: torch.dtype, shapes: list[tuple[int, int]]) -> Callable[[], None]:
    layers = [
        (torch.randn(ROWS, into).to(dtype), packing.pack(torch.randn(out, into).to(dtype)), torch.empty(ROWS, out))
        for out, into in shapes
    ]

    def run() -> None:
        for x, packed, room in layers:
            packing.multiply(x, packed, room)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    arguments = parser.parse_args()
    keep_onednn_alive()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    model_dir = resolve_model("smollm2-135m")
    with torch.inference_mode():
        in_bf16, in_eight = measure_mismatch(model_dir, arguments.tokens)
        report("int8.mismatch_vs_bf16", in_eight["k3"] / in_bf16["k3"], cpu=cpu_name(), bf16=in_bf16, int8=in_eight)
        seconds = product_seconds(model_dir)
    best = min(took for way, took in seconds.items() if way != "int8")
    report("int8.product_time", seconds["int8"] / best, cpu=cpu_name(), seconds=seconds)


if __name__ == "__main__":
    main()
