"""What a weight sync costs: the whole transaction to an engine process, beside plain memory bandwidth in the same run.

weights.shared_memory_vs_memcpy  bytes/s of publish (copy, checksum at both ends, load, confirm), as a share of the
                                 bytes/s of a two-thread memcpy of as many bytes
weights.extra_memory_mb          shared memory (two copies, written in turn), and the most that both processes grew by

python benchmarks/weights.py [--layers 30] [--rounds 7]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from penstock.engine import EmbeddedEngineConfig
from penstock.engine.process import ProcessEngine
from penstock.models import load_tokenizer
from penstock.weights import WriterSettings, build_channel

MB = 1 << 20
WARM = 4


def make_model(layers: int) -> LlamaForCausalLM:
    """Random weights in the shape of SmolLM2-135M."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def save(model: LlamaForCausalLM, directory: Path) -> None:
    model.save_pretrained(directory)
    inner = Tokenizer(models.WordLevel({"<end>": 0}, unk_token="<end>"))
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>").save_pretrained(directory)


class Weights:
    def __init__(self, model: LlamaForCausalLM) -> None:
        self.state = dict(model.named_parameters())
        self.num_bytes = sum(tensor.nbytes for tensor in self.state.values())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, tensor.detach()) for name, tensor in self.state.items())


class Memcpy:
    """Two threads, each copying one half. The buffers are touched before the first measurement."""

    def __init__(self, num_bytes: int) -> None:
        self._source = np.ones(num_bytes, np.uint8)
        self._target = np.full(num_bytes, 2, np.uint8)

    def bytes_per_second(self) -> float:
        size = len(self._source)
        halves = (slice(0, size // 2), slice(size // 2, size))
        with ThreadPoolExecutor(2) as pool:
            started = time.perf_counter()
            list(pool.map(lambda half: np.copyto(self._target[half], self._source[half]), halves))
            return size / (time.perf_counter() - started)


class PeakMemory:
    """Watches the private memory of processes, in bytes above where it was at the start."""

    def __init__(self, *pids: int | str) -> None:
        self._pids = pids
        self._start = self._now()
        self.peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return self.peak

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.peak = max(self.peak, self._now() - self._start)

    def _now(self) -> int:
        total = 0
        for pid in self._pids:
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    total += int(line.split()[1]) * 1024
        return total


async def measure(directory: Path, weights: Weights, rounds: int, threads: int) -> None:
    config = EmbeddedEngineConfig(process=True, max_running=4, max_context=512)
    engine = config.build(str(directory), load_tokenizer(directory), threads=threads)
    assert isinstance(engine, ProcessEngine)
    channel = build_channel(weights, engine, WriterSettings(kind="shared_memory"))
    memcpy = Memcpy(weights.num_bytes)
    try:
        await engine.check_health()
        assert engine.pid is not None
        memory = PeakMemory("self", engine.pid)
        first = await channel.publish(1)
        # Both segments are written twice before anything counts: their pages are there from then on.
        for step in range(2, WARM + 1):
            await channel.publish(step)
        speeds, copies = [], []
        for step in range(WARM + 1, WARM + rounds + 1):
            copies.append(memcpy.bytes_per_second())
            published = await channel.publish(step)
            speeds.append(published.num_bytes / published.seconds)
        private = memory.stop()
    finally:
        await channel.close()
        await engine.close()
    speed, copy = statistics.median(speeds), statistics.median(copies)
    ratio = statistics.median(s / c for s, c in zip(speeds, copies, strict=True))
    report(
        "weights.shared_memory_vs_memcpy",
        ratio,
        "ratio",
        bytes=weights.num_bytes,
        sync_gb_per_s=round(speed / 1e9, 3),
        memcpy_gb_per_s=round(copy / 1e9, 3),
        sync_s=round(weights.num_bytes / speed, 4),
        first_sync_s=round(first.seconds, 4),
        ratios=[round(s / c, 3) for s, c in zip(speeds, copies, strict=True)],
    )
    report(
        "weights.extra_memory_mb",
        (2 * weights.num_bytes + private) / MB,
        "MB",
        weights_mb=round(weights.num_bytes / MB),
        shared_mb=round(2 * weights.num_bytes / MB),
        private_mb=round(private / MB),
    )


def report(figure: str, value: float, unit: str, **detail: Any) -> None:
    print(json.dumps({"figure": figure, "value": round(value, 4), "unit": unit, "detail": detail}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    model = make_model(arguments.layers)
    with tempfile.TemporaryDirectory() as directory:
        save(model, Path(directory))
        asyncio.run(measure(Path(directory), Weights(model), arguments.rounds, arguments.threads))


if __name__ == "__main__":
    main()
