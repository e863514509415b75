"""What it costs to scan a long dataset before a run begins.

dataset.scan_300k_s   300,000 rows of about 60 tokens as JSONL, checked and rendered with SmolLM2's chat template
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from penstock.data import DatasetConfig
from penstock.models import load_tokenizer, resolve_model

QUESTION = (
    "Natalia sold clips to {n} of her friends in April, and then she sold half as many clips in May. How many clips "
    "did Natalia sell altogether in April and May? Think step by step and write the final answer after ####."
)


def write_rows(path: Path, rows: int) -> None:
    with path.open("w") as file:
        for n in range(rows):
            row = {
                "prompt": [{"role": "user", "content": QUESTION.format(n=n)}],
                "reward_model": {"style": "rule", "ground_truth": str(n)},
                "data_source": "gsm8k",
                "extra_info": {"index": n, "split": "train"},
            }
            file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=300_000)
    rows = parser.parse_args().rows
    tokenizer = load_tokenizer(resolve_model("smollm2-135m"))
    tokenizer.render([{"role": "user", "content": "What the first call loads is not the scan's."}])
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rows.jsonl"
        write_rows(path, rows)
        began, worked = time.perf_counter(), time.process_time()
        prompts = DatasetConfig(path=path).load(tokenizer, context=8192, max_tokens=1024, data_sources=None)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - worked
    detail = {"rows": len(prompts), "cpu_s": round(cpu_seconds, 2)}
    figure = f"dataset.scan_{rows // 1000}k_s"
    print(json.dumps({"figure": figure, "value": round(seconds, 2), "unit": "s", "detail": detail}))


if __name__ == "__main__":
    main()
