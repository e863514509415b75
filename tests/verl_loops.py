"""Agent loops as users of verl write them; verl itself is not installed here."""

from __future__ import annotations

import re
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.utils.profiler import simple_timer


@register("calculator_agent")
class CalculatorLoop(AgentLoopBase):
    """One output: the model may call a calculator and goes on after its result."""

    def __init__(self, *args: Any, max_calls: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_calls = max_calls
        self.response_length = self.config.actor_rollout_ref.rollout.response_length

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        tool = {
            "type": "function",
            "function": {"name": "calculator", "parameters": {"properties": {"expression": {"type": "string"}}}},
        }
        metrics: dict[str, float] = {}
        request_id = uuid4().hex
        prompt_ids = await self.apply_chat_template(messages, tools=[tool])
        ids, mask, logprobs = list(prompt_ids), [], []
        for turn in range(self.max_calls + 1):
            with simple_timer("generate_sequences", metrics):
                output = await self.server_manager.generate(
                    request_id=request_id, prompt_ids=ids, sampling_params=sampling_params
                )
            ids += output.token_ids
            mask += [1] * len(output.token_ids)
            logprobs += output.log_probs
            text = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
            call = re.search(r'"expression": "(\d+)\+(\d+)"', text)
            if call is None or turn == self.max_calls:
                break
            told = f"\n<|tool|>{int(call[1]) + int(call[2])}<|end|>\n<|assistant|>"
            told_ids = self.tokenizer.encode(told, add_special_tokens=False)
            ids += told_ids
            mask += [0] * len(told_ids)
            logprobs += [0.0] * len(told_ids)
        response_ids = ids[len(prompt_ids) :]
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids[: self.response_length],
            response_mask=mask[: self.response_length],
            response_logprobs=logprobs[: self.response_length],
            num_turns=len(messages) + 2,
            metrics=metrics,
        )


@register("two_guesses_agent")
class TwoGuesses(AgentLoopBase):
    """A list of outputs: a guess, and then a new conversation that is only told of it. The reward is on the last."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        secret = int(kwargs["reward_model"]["ground_truth"])
        outputs = []
        told = ""
        for _ in range(2):
            messages = [*kwargs["raw_prompt"]]
            if told:
                messages = [{"role": "user", "content": f"{messages[0]['content']} {told}"}]
            prompt_ids = await self.apply_chat_template(messages)
            output = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params | {"max_tokens": 3}
            )
            guess = self.tokenizer.decode(output.token_ids, skip_special_tokens=True).strip()
            outputs.append(
                AgentLoopOutput(
                    prompt_ids=prompt_ids,
                    response_ids=output.token_ids,
                    response_mask=[1] * len(output.token_ids),
                    num_turns=2,
                    metrics={},
                )
            )
            number = int(guess) if guess.isdecimal() else 0
            told = "right" if number == secret else "higher" if number < secret else "lower"
            if told == "right":
                break
        outputs[-1].reward_score = float(told == "right")
        outputs[-1].extra_fields["reward_extra_info"] = {"guesses": len(outputs)}
        return outputs


class Retokenises(AgentLoopBase):
    """Returns what it generated, tokenised anew, and words that the model never wrote."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt_ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        output = await self.server_manager.generate(
            request_id="0", prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        added = self.tokenizer.encode(kwargs["extra_info"]["added"], add_special_tokens=False)
        ids = output.token_ids + added if kwargs["extra_info"]["keeps"] else added
        return AgentLoopOutput(
            prompt_ids=prompt_ids, response_ids=ids, response_mask=[1] * len(ids), metrics={}, reward_score=1.0
        )


class Throws(AgentLoopBase):
    """Asks twice and keeps the second answer."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        prompt_ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        for _ in range(2):
            output = await self.server_manager.generate(
                request_id="0", prompt_ids=prompt_ids, sampling_params=sampling_params
            )
        return {
            "prompt_ids": prompt_ids,
            "response_ids": output.token_ids,
            "response_mask": [1] * len(output.token_ids),
            "reward_score": 0.5,
        }


class NoLoop:
    def run(self) -> None:
        return
