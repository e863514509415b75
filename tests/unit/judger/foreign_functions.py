"""Reward functions as TRL's and verl's documents show them, written again in their signatures."""

import asyncio
import re

# TRL.


def by_tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def by_tokens_as_spelt_elsewhere(completions_ids, **kwargs):
    return [float(len(ids)) for ids in completions_ids]


def by_characters(completions, **kwargs):
    return [float(len(text)) for text in completions]


def thinks_then_answers(completions, **kwargs):
    form = re.compile(r"^<think>.*?</think><answer>.*?</answer>$")
    return [1.0 if form.match(messages[0]["content"]) else 0.0 for messages in completions]


def boxed(completions, ground_truth, **kwargs):
    found = [re.search(r"\\boxed\{(.*?)\}", text) for text in completions]
    said = [match.group(1) if match else "" for match in found]
    return [1.0 if one == right else 0.0 for one, right in zip(said, ground_truth, strict=True)]


def only_math(prompts, completions, task, **kwargs):
    rewards = []
    for prompt, completion, kind in zip(prompts, completions, task, strict=True):
        rewards.append((1.0 if completion == str(eval_sum(prompt)) else -1.0) if kind == "math" else None)
    return rewards


def eval_sum(prompt):
    return sum(map(int, re.findall(r"\d+", prompt)))


async def after_a_wait(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 if completion else 0.0 for completion in completions]


def without_kwargs(completions):
    return [float(len(set(text))) for text in completions]


def with_a_log(completions, log_metric, log_extra, **kwargs):
    log_metric("mean_length", 3.0)
    log_extra("text", completions)
    return [1.0] * len(completions)


def by_solution(completions, solution, **kwargs):
    return [float(text == right) for text, right in zip(completions, solution, strict=True)]


def in_a_curriculum(completions, trainer_state, **kwargs):
    return [float(trainer_state.global_step)] * len(completions)


def too_few(completions, **kwargs):
    return [1.0]


def all_strings(completions, **kwargs):
    return ["good"] * len(completions)


def one_of_each(completions, **kwargs):
    return [0.5, None, float("nan"), "good"]


# verl.


def my_reward_fn(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) / 100


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth, "pred": solution_str}


def gsm8k_score(solution_str, ground_truth, method="strict", format_score=0.1, score=1.0):
    """As verl's document says it: 1 for the number after ####, 0.1 for the form alone, 0 without it."""
    pattern = r"#### (-?[\d.,]+)" if method == "strict" else r"(-?[\d.,]+)"
    found = re.findall(pattern, solution_str)
    if not found:
        return 0
    return score if found[-1].replace(",", "") == ground_truth else format_score


async def async_score(data_source, solution_str, ground_truth, extra_info, **kwargs):
    await asyncio.sleep(0)
    return {"score": 1.0 if data_source == "sums" else 0.0}


# Penstock's own, for groups.


def ranks(responses, label, extra_info):
    order = sorted(responses, key=len)
    return [order.index(text) / (len(order) - 1) for text in responses]
