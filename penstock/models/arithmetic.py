"""What a model is computed in, where that is left to the machine: found by trying its matrix products on this CPU.

The same rule is right on no two kinds of CPU: bfloat16 is several times as fast as float32 with AMX, somewhat faster
with AVX-512 that knows it, and emulated elsewhere, where it is slower unless memory is what a product waits for. int8
(VNNI) is not tried: the logprobs it gives are not those that the trainer computes, by far (`benchmarks/int8.py`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from penstock.config import Dtype
from penstock.errors import ModelError
from penstock.models.bfloat16 import has_fast_products, keep_onednn_alive, product
from penstock.models.families import describe, head_dim, is_like_llama
from penstock.models.packing import WORTH_PACKING, Packing, packing_for

Kind = Literal["float32", "bfloat16"]
KINDS = get_args(Kind)

MARGIN = 1.2
"""bfloat16 must be so much faster: it is less exact, and a trial is short."""
HOPELESS = 3.0
"""A way that takes so much longer than the best is not tried again."""
ROUNDS = 4
BUDGET_S = 0.6
"""After so long each way is timed no more than once: on a busy machine a round may take many times its time."""
_WEIGHTS = 16 << 20
"""Numbers in the matrices of a trial: more than a cache holds, as in a model."""
_MULTIPLICATIONS = 1 << 30
"""Of one round of a trial, at most: some hundredths of a second."""
_NARROWEST = 64


class Work(NamedTuple):
    """The matrix products to choose for: of one layer and its share of the output embedding, each out x in."""

    matrices: tuple[tuple[int, int], ...]
    rows: int
    """Tokens that are multiplied at once."""
    layers: int
    trains: bool = False
    """Backward passes too."""
    packed: bool | None = None
    """What the engine was asked for: packed matrices always, never, or where they are faster."""

    def packing(self, dtype: torch.dtype) -> Packing | None:
        """How an engine packs matrices of this dtype, if it does; with `packed` None, if it tries them."""
        num_bytes = dtype.itemsize * self.layers * sum(out * into for out, into in self.matrices)
        if self.trains or not (self.packed or (self.packed is None and num_bytes in WORTH_PACKING)):
            return None
        return packing_for(dtype, (into for _, into in self.matrices))


class Choice(NamedTuple):
    dtype: Kind
    seconds: dict[str, float] = {}
    """Of a round of the trial, by what was tried; empty where nothing was."""

    @property
    def other_takes(self) -> float | None:
        """How much longer the best of what was left aside takes."""
        others = [seconds for name, seconds in self.seconds.items() if name != self.dtype]
        return min(others) / self.seconds[self.dtype] if others else None

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32


def work_of(config: Any, *, rows: int, trains: bool = False, packed: bool | None = None) -> Work | None:
    """Of a transformers configuration; None for families that have no fused passes."""
    if not is_like_llama(config):
        return None
    hidden, inner, size = config.hidden_size, config.intermediate_size, head_dim(config)
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    head = max(_NARROWEST, config.vocab_size // config.num_hidden_layers)
    return Work(
        ((queries + 2 * keys, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner), (head, hidden)),
        rows=rows,
        layers=config.num_hidden_layers,
        trains=trains,
        packed=packed,
    )


def choose_for(
    model_dir: Path,
    *,
    rows: int,
    trains: bool,
    fused: bool,
    deterministic: bool,
    packed: bool | None = None,
    device: str = "cpu",
) -> Choice:
    """What `auto` is for the model in a directory, whose weights are not read; `fused` is whether fused passes may be
    used for it, `packed` what its engine was asked for. Raises ModelError."""
    try:
        described = describe(model_dir)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the model in {model_dir} cannot be loaded as a causal language model: {error}") from error
    work = work_of(described, rows=rows, trains=trains, packed=packed) if fused else None
    return choose("auto", work, deterministic=deterministic, device=device)


def choose(asked: Dtype, work: Work | None, *, deterministic: bool, device: str = "cpu") -> Choice:
    """What was asked for. `auto` is what is fastest here for `work`; float32 on a CPU where that is None, and in a
    deterministic run."""
    if asked != "auto":
        return Choice(asked)
    kind = torch.device(device).type
    if deterministic:
        return Choice("float32")
    if kind == "cuda" and torch.cuda.is_available():
        with torch.cuda.device(device):
            return Choice("bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32")
    if kind != "cpu" or work is None:
        return Choice("float32")
    return fastest(try_out(work))


def fastest(seconds: Mapping[str, float]) -> Choice:
    """float32, or bfloat16 where that was tried and takes less time by the margin."""
    wins = seconds["float32"] > MARGIN * seconds.get("bfloat16", float("inf"))
    return Choice("bfloat16" if wins else "float32", dict(seconds))


def try_out(work: Work) -> dict[str, float]:
    """Seconds of a round of products in each dtype that this CPU offers: the shortest of some, taken in turns.

    Passes that train in bfloat16 are offered only by MKL's products, whose sums and results are float32. An engine that
    was asked to pack uses packed products; asked for nothing, it uses packed or plain ones, whichever is faster.
    """
    keep_onednn_alive()
    kinds = KINDS if has_fast_products() or not work.trains else ("float32",)
    ways = {}
    for kind in kinds:
        dtype = Choice(kind).torch_dtype
        packing = work.packing(dtype)
        if packing is not None:
            ways[f"{kind} packed"] = _round_of(work, dtype, packing)
        if packing is None or not work.packed:
            ways[kind] = _round_of(work, dtype)
    found = shortest(ways)
    return {kind: min(found[name] for name in (kind, f"{kind} packed") if name in found) for kind in kinds}


def shortest(
    ways: Mapping[str, Callable[[], object]], clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Seconds of each, the shortest of `ROUNDS` in turns; the hopeless are timed once."""
    found: dict[str, float] = {}
    for way in ways.values():
        way()  # Kernels are made the first time, which may take several times as long as using them.
    end = clock() + BUDGET_S
    for _ in range(ROUNDS):
        for name, way in ways.items():
            hopeful = clock() < end and found.get(name, 0.0) <= HOPELESS * min(found.values(), default=0.0)
            if name not in found or hopeful:
                began = clock()
                way()
                found[name] = min(found.get(name, float("inf")), clock() - began)
    return found


def _round_of(work: Work, dtype: torch.dtype, packing: Packing | None = None) -> Callable[[], None]:
    passes = 3 if work.trains else 1
    room = min(_WEIGHTS, _MULTIPLICATIONS // (work.rows * passes))
    layer = sum(out * into for out, into in work.matrices)
    cut, copies = min(1.0, room / layer), min(work.layers, max(1, room // layer))
    shapes = [(max(_NARROWEST, int(out * cut)), into) for out, into in work.matrices] * copies
    # Any number but 0 and those that are too small to be normal takes the same time.
    matrices = [torch.full(shape, 0.01, dtype=dtype) for shape in shapes]
    states = {into: torch.full((work.rows, into), 0.01, dtype=dtype) for _, into in shapes}
    multiply = product if dtype == torch.bfloat16 and has_fast_products() else torch.mm
    rooms = {out: torch.empty(work.rows, out, dtype=torch.float32) for out, _ in shapes} if packing is not None else {}
    packed = [packing.pack(matrix) for matrix in matrices] if packing is not None else []

    def run_packed(packing: Packing) -> None:
        with torch.inference_mode():
            for (out, into), copy in zip(shapes, packed, strict=True):
                packing.multiply(states[into], copy, rooms[out])

    def run() -> None:
        with torch.inference_mode():
            for matrix in matrices:
                x = states[matrix.shape[1]]
                result = multiply(x, matrix.t())
                if work.trains:
                    _back(multiply, x, matrix, result.to(dtype))

    return run if packing is None else functools.partial(run_packed, packing)


def _back(multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, matrix: Tensor, grad: Tensor) -> None:
    multiply(grad, matrix)
    multiply(grad.t(), x)


def cpu_name() -> str:
    """Of the processor and the widest arithmetic that it has: `AMD EPYC (AVX2)`."""
    found = torch.cpu.get_capabilities()
    kinds = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 with bf16", "avx512_f": "AVX-512", "avx2": "AVX2"}
    kind = next((name for flag, name in kinds.items() if found.get(flag)), str(found.get("architecture", "")))
    return f"{found.get('cpu_name') or 'a CPU'} ({kind})"
