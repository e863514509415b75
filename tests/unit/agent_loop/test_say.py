"""`AgentLoop.say`: the user's next turn, as the model's chat template writes it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from chat_families import FAMILIES, tokenizer_of
from session_clients import Spoken, assistant, user

from penstock.agent_loop import AgentLoop
from penstock.errors import Interrupted
from penstock.rollout import Group, Prompt, RolloutState, SampleParams, Status, pack_ids, unpack_ids
from penstock.testing import JudgerScript, ScriptedJudger

QWEN = tokenizer_of("qwen2.5")


class Asks(AgentLoop):
    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        first = await self.generate(rollout)
        await self.say(rollout, f"{first.text}? Are you sure?")
        await self.generate(rollout)
        return rollout


class SpeaksFirst(AgentLoop):
    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        await self.say(rollout, "hello")
        return rollout


def rollout_of(tokenizer: Any) -> RolloutState:
    prompt = Prompt(messages=(user("2+2=?"),), ids=pack_ids(tokenizer.render([user("2+2=?")])))
    return RolloutState(prompt=prompt, task_name="t", group_id="t:0", rollout_id="t:0:0")


def loop_of(loop: type[AgentLoop], tokenizer: Any, engine: Any) -> AgentLoop:
    judger = ScriptedJudger(JudgerScript())
    return loop(engine=engine, tokenizer=tokenizer, judger=judger, sample_params=SampleParams(max_tokens=64))


def play(loop: AgentLoop, rollout: RolloutState) -> Group:
    return asyncio.run(loop.generate_group([rollout], enable_partial_rollout=True))


@pytest.mark.parametrize("family", ["qwen2.5", "llama3", "gemma"])
def test_the_second_turn_is_what_the_template_writes_and_is_not_trained(family: str) -> None:
    tokenizer = tokenizer_of(family)
    end = FAMILIES[family].stops[0]
    engine = Spoken(tokenizer, ["5", "4"], end=end)
    rollout = rollout_of(tokenizer)
    play(loop_of(Asks, tokenizer, engine), rollout)
    assert rollout.status is Status.COMPLETED, rollout.error
    whole = tokenizer.render([user("2+2=?"), assistant("5"), user("5? Are you sure?")])
    asked = engine.asked[1][0]
    ids = [*unpack_ids(asked.prompt_ids), *unpack_ids(asked.response_ids)]
    assert tokenizer.inner.decode(ids) == tokenizer.inner.decode(
        whole
    )  # ids may differ at a seam: what is on record is kept
    (segment,) = rollout.segments
    answers = [tokenizer.encode(text + end) for text in ("5", "4")]
    assert sum(segment.tokens.mask) == sum(map(len, answers))
    assert rollout.response_text == "54"
    assert [(turn.kind, turn.name, turn.text) for turn in rollout.turns] == [
        ("generate", "", "5"),
        ("message", "user", "5? Are you sure?"),
        ("generate", "", "4"),
    ]


class Paused(Spoken):
    """Cut off by a pause before its second answer, once."""

    cut = False

    async def generate(self, request: Any) -> Any:
        if len(self.asked) == 1 and not self.cut:
            self.cut = True
            raise Interrupted("a pause")
        return await super().generate(request)


def test_played_again_it_is_read_from_the_record_and_said_once() -> None:
    engine = Paused(QWEN, ["5", "4"], end="<|im_end|>")
    loop = loop_of(Asks, QWEN, engine)
    rollout = rollout_of(QWEN)
    play(loop, rollout)
    assert rollout.status is Status.ABORTED
    before = rollout.turns
    play(loop, rollout)
    assert rollout.status is Status.COMPLETED, rollout.error
    assert rollout.turns[:2] == before[:2] and len(rollout.turns) == 3
    assert len(engine.asked) == 2  # the first answer was not asked for again


def test_before_the_model_has_answered_there_is_nothing_to_say() -> None:
    rollout = rollout_of(QWEN)
    play(loop_of(SpeaksFirst, QWEN, Spoken(QWEN, ["5"], end="<|im_end|>")), rollout)
    assert rollout.error is not None and "`say` comes after an answer; call `generate` first" in rollout.error.message
