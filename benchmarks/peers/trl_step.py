"""TRL's GRPOTrainer, one train step per request. Runs in the environment of TRL.

per_device_train_batch_size is the whole batch, so that nothing is accumulated; no reference model, no checkpointing of
activations, no reports: the fastest of its settings that does the same work.
"""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import serve

job = serve.next_line()

import torch  # noqa: E402 - the job comes first: its environment decides what torch finds
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

REWARDS = Path(__file__).parents[2] / "penstock" / "judger" / "rewards.py"


def load_reward() -> Any:
    """The very function that Penstock judges with; its file imports nothing that is not here."""
    spec = importlib.util.spec_from_file_location("rewards", REWARDS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, job["reward"])


def reward_with(judge: Any) -> Any:
    def reward(completions: list[Any], ground_truth: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [judge(text, label, {}) for text, label in zip(texts, ground_truth, strict=True)]

    return reward


def adapter(lora: dict[str, Any] | None) -> Any:
    """Of the same size on the same layers; imported only where it is compared."""
    if lora is None:
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=lora["rank"], lora_alpha=lora["alpha"], target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.0
    )


class TimedTrainer(GRPOTrainer):
    """Also says how long the part before training took: generation, rewards, advantages."""

    generation_s = 0.0
    prepare_s = 0.0
    answer_tokens = 0
    prompt_tokens = 0

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        made = super()._generate_single_turn(*args, **kwargs)
        self.generation_s = time.perf_counter() - started
        return made

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        started = time.perf_counter()
        inputs = super()._prepare_inputs(generation_batch)
        self.prepare_s = time.perf_counter() - started
        self.answer_tokens = int(inputs["completion_mask"].sum())
        self.prompt_tokens = int(inputs["prompt_mask"].sum())
        return inputs

    def score(self, prompts: list[list[int]], answers: list[list[int]]) -> list[list[float]]:
        """Logprobs of the answers' tokens by the very function that training uses."""
        width, longest = max(map(len, prompts)), max(map(len, answers))
        ids = torch.zeros(len(prompts), width + longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (prompt, given) in enumerate(zip(prompts, answers, strict=True)):
            ids[row, width - len(prompt) : width + len(given)] = torch.tensor(prompt + given)
            mask[row, width - len(prompt) : width + len(given)] = 1
        with torch.no_grad():
            found = self._get_per_token_logps_and_entropies(self.model, ids, mask, longest)[0]
        return [row[: len(given)].tolist() for row, given in zip(found, answers, strict=True)]


class OneStepPerRequest(TrainerCallback):
    def __init__(self) -> None:
        self.trainer: TimedTrainer | None = None
        self._started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        serve.next_line()
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        seconds = time.perf_counter() - self._started
        trainer = self.trainer
        assert trainer is not None
        serve.answer(
            step_s=seconds,
            generate_s=trainer.generation_s,
            train_s=seconds - trainer.prepare_s,
            answer_tokens=trainer.answer_tokens,
            prompt_tokens=trainer.prompt_tokens,
        )


def main() -> None:
    torch.set_num_threads(job["threads"])
    bf16 = job["dtype"] == "bfloat16"
    config = GRPOConfig(
        output_dir=job["scratch"],
        use_cpu=True,
        bf16=bf16,
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        per_device_train_batch_size=job["groups"] * job["group_size"],
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        num_generations=job["group_size"],
        max_completion_length=job["max_tokens"],
        temperature=1.0,
        beta=0.0,
        num_iterations=1,
        max_steps=10_000,
        shuffle_dataset=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        seed=job["seed"],
    )
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    callback = OneStepPerRequest()
    trainer = TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["weights"])),
        reward_funcs=reward_with(load_reward()),
        args=config,
        train_dataset=Dataset.from_list(job["rows"]),
        processing_class=tokenizer,
        callbacks=[callback],
        peft_config=adapter(job["lora"]),
    )
    callback.trainer = trainer
    prompts, answers = job["score"]
    first = tokenizer.apply_chat_template(job["rows"][0]["prompt"], add_generation_prompt=True, return_dict=False)
    serve.answer(scores=trainer.score(prompts, answers), first_prompt=first)
    trainer.train()


main()
