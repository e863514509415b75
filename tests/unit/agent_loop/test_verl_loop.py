from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.agent_loop import VerlAgentLoop, VerlAgentLoopConfig
from penstock.errors import ConfigError
from penstock.models.tiny_chat import GUESS, _tokenizer
from penstock.models.tokenizer import HFTokenizer
from penstock.ports import Completion, GenerateRequest
from penstock.rollout import Prompt, RolloutState, SampleParams, Status, Verdict, pack_ids, unpack_ids
from penstock.testing import EngineScript, JudgerScript, ScriptedEngine, ScriptedJudger, run_virtual


class NoWeights:
    def tensors(self) -> Any:
        yield from ()


@pytest.fixture(scope="module")
def tokenizer() -> HFTokenizer:
    inner = _tokenizer()
    return HFTokenizer(inner, frozenset({inner.eos_token_id}), Path())


TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {"properties": {"expression": {}}}}}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+34"}}\n</tool_call>'


def rollout_of(tokenizer: HFTokenizer, text: str, tools: Any = (), **fields: Any) -> RolloutState:
    messages = ({"role": "user", "content": text},)
    prompt = Prompt(messages=messages, ids=pack_ids(tokenizer.render(messages, tools)), **fields)
    return RolloutState(prompt=prompt, task_name="t", group_id="t:0", rollout_id="t:0:0")


class Saying(ScriptedEngine):
    """The n-th request is answered with the n-th text; notes what it was asked."""

    def __init__(self, tokenizer: HFTokenizer, *texts: str) -> None:
        self._texts = [[*tokenizer.encode(text), min(tokenizer.stop_ids)] for text in texts]
        self.asked: list[GenerateRequest] = []
        self._finished = 0
        super().__init__(EngineScript(tokens_per_s=10.0, answers=lambda _: self._texts[self._finished]))

    async def generate(self, request: GenerateRequest) -> Completion:
        self.asked.append(request)
        completion = await super().generate(request)
        self._finished += completion.finish_reason != "abort"
        return completion


def build(tokenizer: HFTokenizer, engine: ScriptedEngine, name: str, **options: Any) -> VerlAgentLoop:
    settings = VerlAgentLoopConfig(
        path=f"verl_loops.{name}",
        sample_params=SampleParams(max_tokens=options.pop("max_tokens", 100)),
        **options,
    )
    settings.check()
    judger = ScriptedJudger(JudgerScript()) if name == "CalculatorLoop" else None
    loop = settings.build(engine=engine, tokenizer=tokenizer, judger=judger)
    assert isinstance(loop, VerlAgentLoop)
    return loop


def play(loop: VerlAgentLoop, rollout: RolloutState) -> RolloutState:
    [played] = run_virtual(loop.generate_group([rollout], enable_partial_rollout=True))
    found: RolloutState = played
    return found


def test_a_loop_with_one_output_runs_unchanged_and_its_tool_text_is_not_trained(tokenizer: HFTokenizer) -> None:
    engine = Saying(tokenizer, CALL, "46")
    rollout = play(build(tokenizer, engine, "CalculatorLoop"), rollout_of(tokenizer, "12+34=?", [TOOL]))
    assert rollout.status is Status.COMPLETED, rollout.error
    first, told = [*tokenizer.encode(CALL), 1], tokenizer.encode("\n<|tool|>46<|end|>\n<|assistant|>")
    last = [*tokenizer.encode("46"), 1]
    assert rollout.response_ids.tolist() == first + told + last
    assert rollout.response_mask.tolist() == [1] * len(first) + [0] * len(told) + [1] * len(last)
    assert rollout.response_text == CALL + "46"
    assert engine.asked[1].prompt_ids == rollout.prompt.ids + pack_ids(first + told)
    assert len(rollout.segments) == 1


def test_its_budget_is_the_tasks_and_its_settings_are_given_on_top(tokenizer: HFTokenizer) -> None:
    loop = build(tokenizer, Saying(tokenizer, CALL, "46"), "CalculatorLoop", max_tokens=16, loop_keys={"max_calls": 0})
    rollout = play(loop, rollout_of(tokenizer, "12+34=?", [TOOL]))
    assert rollout.num_tokens == len(tokenizer.encode(CALL)) + 1
    limited = {"actor_rollout_ref": {"rollout": {"response_length": 5}}}
    loop = build(tokenizer, Saying(tokenizer, CALL, "46"), "CalculatorLoop", trainer_config=limited)
    rollout = play(loop, rollout_of(tokenizer, "12+34=?", [TOOL]))
    # It returned five tokens; those beyond are context, and not trained.
    assert np.flatnonzero(rollout.response_mask).tolist() == [0, 1, 2, 3, 4]


def test_a_list_of_outputs_becomes_segments_with_the_reward_of_the_last(tokenizer: HFTokenizer) -> None:
    engine = Saying(tokenizer, "4", "6")
    rollout = play(build(tokenizer, engine, "TwoGuesses"), rollout_of(tokenizer, GUESS, ground_truth="6"))
    assert rollout.status is Status.COMPLETED, rollout.error
    assert rollout.reward == Verdict(1.0, {"guesses": 2.0})
    assert [(segment.parent, bytes(segment.tokens.mask)) for segment in rollout.segments] == [
        (-1, b"\x01\x01"),
        (-1, b"\x00" * 5 + b"\x01\x01"),
    ]
    second = rollout.segments[1]
    told = tokenizer.render([{"role": "user", "content": f"{GUESS} higher"}])
    assert rollout.context_ids(1) + second.tokens.ids[: 4 * 5] == pack_ids(told)
    assert engine.asked[1].prompt_ids == pack_ids(told)
    assert rollout.response_text == "6"


def test_ids_that_were_not_generated_here_are_never_trained(
    tokenizer: HFTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    added = {"added": "higher", "keeps": True}
    with caplog.at_level(logging.WARNING):
        rollout = play(
            build(tokenizer, Saying(tokenizer, "46"), "Retokenises"), rollout_of(tokenizer, "?", extra_info=added)
        )
    assert rollout.status is Status.COMPLETED, rollout.error
    assert rollout.response_ids.tolist() == [*tokenizer.encode("46"), 1]
    assert rollout.response_mask.tolist() == [1, 1, 1]
    assert "1 ids with mask 1 were not generated here" in caplog.text


def test_a_loop_that_returns_nothing_of_what_was_generated_fails_its_rollout(tokenizer: HFTokenizer) -> None:
    foreign = {"added": "higher", "keeps": False}
    rollout = play(
        build(tokenizer, Saying(tokenizer, "46"), "Retokenises"), rollout_of(tokenizer, "?", extra_info=foreign)
    )
    assert rollout.status is Status.FAILED
    assert rollout.error is not None and "was generated here" in rollout.error.message
    assert rollout.reward is None


def test_an_answer_that_was_thrown_away_is_not_trained(tokenizer: HFTokenizer) -> None:
    rollout = play(build(tokenizer, Saying(tokenizer, "46", "7"), "Throws"), rollout_of(tokenizer, "?"))
    assert rollout.status is Status.COMPLETED, rollout.error
    assert [(unpack_ids(s.tokens.ids).tolist(), list(s.tokens.mask)) for s in rollout.segments] == [
        ([*tokenizer.encode("46"), 1], [0, 0, 0]),
        ([*tokenizer.encode("7"), 1], [1, 1]),
    ]
    assert rollout.response_text == "7"


@pytest.mark.parametrize("tenths", [0, 5, 13, 14, 15, 16, 17, 30])
def test_a_rollout_goes_on_where_a_pause_came(tokenizer: HFTokenizer, tenths: int) -> None:
    async def main() -> RolloutState:
        engine = Saying(tokenizer, CALL, "46")
        loop = build(tokenizer, engine, "CalculatorLoop")
        rollout = rollout_of(tokenizer, "12+34=?", [TOOL])
        playing = asyncio.create_task(loop.generate_group([rollout], enable_partial_rollout=True))
        await asyncio.sleep(tenths / 10)
        await engine.pause_generation()
        await playing
        await engine.load_weights(NoWeights(), 1)
        await engine.continue_generation()
        if rollout.status is not Status.COMPLETED:
            rollout.status = Status.INIT
            await loop.generate_group([rollout], enable_partial_rollout=True)
        return rollout

    rollout = run_virtual(main())
    assert rollout.status is Status.COMPLETED, rollout.error
    assert rollout.response_text == CALL + "46"
    made = int((rollout.model_steps[rollout.response_mask == 1] == 0).sum())
    assert made == min(tenths, int(rollout.response_mask.sum()))


@pytest.mark.parametrize(
    ("path", "told"),
    [("verl_loops.NoLoop", "no agent loop of verl's"), ("verl_loops.Absent", "cannot be imported")],
)
def test_what_is_no_agent_loop_is_refused_by_the_configuration(path: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        VerlAgentLoopConfig(path=path).check()


def test_a_setting_that_is_missing_is_named_with_where_to_give_it(tokenizer: HFTokenizer) -> None:
    loop = build(tokenizer, Saying(tokenizer, "46"), "Throws")
    with pytest.raises(AttributeError, match=r"trainer_config\.actor_rollout_ref\.rollout\.absent is not set"):
        loop._settings.actor_rollout_ref.rollout.absent  # noqa: B018
