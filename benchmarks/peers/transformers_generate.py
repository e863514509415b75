"""transformers, one workload per request: `generate` on left-padded batches, or its continuous batching.

Runs in the environment of TRL. `generate` ends a batch with its longest answer: that is the API's way, so what is past
an answer's own length is not counted as tokens.
"""

from __future__ import annotations

import time
from typing import Any

import serve

job = serve.next_line()

import torch  # noqa: E402 - the job comes first: its environment decides what torch finds
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig  # noqa: E402
from transformers.generation.continuous_batching.utils import WorkloadHints  # noqa: E402

PAGE = 32
PAD = 2
"""What a prompt is filled up with; the mask hides it."""


def generate(model: Any, prompts: list[list[int]], lengths: list[int], batch: int) -> list[int]:
    made = []
    for first in range(0, len(prompts), batch):
        chunk, wanted = prompts[first : first + batch], lengths[first : first + batch]
        width = max(map(len, chunk))
        ids = torch.full((len(chunk), width), PAD)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(chunk):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        longest = max(wanted)
        # No end-of-text id: every answer goes on to its length, without the logits processor that would see to it.
        config = GenerationConfig(max_new_tokens=longest, do_sample=True, top_k=0, pad_token_id=PAD, eos_token_id=None)
        with torch.inference_mode():
            out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        assert out.shape[1] == width + longest, out.shape
        made += wanted
    return made


def generate_continuously(model: Any, prompts: list[list[int]], lengths: list[int], batch: int) -> list[int]:
    config = GenerationConfig(max_new_tokens=max(lengths), do_sample=True, top_k=0, pad_token_id=PAD, eos_token_id=-1)
    longest_prompt = max(map(len, prompts))
    hints = WorkloadHints(
        max_prompt_length=longest_prompt, max_generated_length=max(lengths), num_requests=len(prompts)
    )
    # A cache for all that run at once. Left to itself it takes most of the memory there is, and time to fill it.
    pages = batch * -(-(longest_prompt + max(lengths)) // PAGE)
    settings = ContinuousBatchingConfig(max_requests_per_batch=batch, page_size=PAGE, num_blocks=pages + 1)
    answers: dict[str, int] = {}
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=settings, workload_hints=hints, timeout=30
    ) as manager:
        for prompt, length in zip(prompts, lengths, strict=True):
            manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
        while len(answers) < len(prompts):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                assert result.error is None, result.error
                answers[result.request_id] = len(result.generated_tokens)
            assert manager.is_running() or len(answers) == len(prompts), "continuous batching ended early"
    assert sorted(answers.values()) == sorted(lengths), "answers of other lengths than asked"
    return list(answers.values())


def main() -> None:
    torch.set_num_threads(job["threads"])
    models = {
        dtype: AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, dtype)).eval()
        for dtype in job["dtypes"]
    }
    ways = {"generate": generate, "continuous": generate_continuously}
    torch.manual_seed(job["seed"])
    serve.answer(ready=True)
    while True:
        request = serve.next_line()
        way, model = ways[request["way"]], models[request["dtype"]]
        started = time.perf_counter()
        made = way(model, request["prompts"], request["lengths"], request["batch"])
        seconds = time.perf_counter() - started
        serve.answer(seconds=seconds, tokens=sum(made))


main()
