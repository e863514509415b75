from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import pytest

from penstock.agent_loop import AgentLoop, SingleTurnAgentLoop
from penstock.rollout import Group, Prompt, RolloutState, SampleParams, Status, Verdict, pack_ids
from penstock.testing import (
    CharTokenizer,
    EngineScript,
    JudgerScript,
    ScriptedEngine,
    ScriptedJudger,
    constant,
    run_virtual,
)


def group_of(k: int = 1) -> Group:
    prompt = Prompt(ids=pack_ids([1, 63]))
    return [RolloutState(prompt=prompt, task_name="t", group_id="t:0", rollout_id=f"t:0:{i}") for i in range(k)]


def build(loop: type[AgentLoop], *, judger: JudgerScript | None = None, **options: Any) -> AgentLoop:
    script = EngineScript(tokens_per_s=1.0, length=constant(options.pop("length", 50)))
    return loop(
        engine=ScriptedEngine(script),
        tokenizer=CharTokenizer(),
        judger=ScriptedJudger(judger) if judger is not None else None,
        sample_params=SampleParams(),
        **options,
    )


async def play(loop: AgentLoop, k: int = 1) -> tuple[Group, float]:
    """The group, and when it came back; ends when nothing is left running."""
    group = await loop.generate_group(group_of(k), enable_partial_rollout=False)
    at = asyncio.get_running_loop().time()
    await asyncio.sleep(10_000)
    return group, at


async def hear_nothing(seconds: float) -> None:
    """As code does that retries whatever happens."""
    now = asyncio.get_running_loop().time
    until = now() + seconds
    while now() < until:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(until - now())


class Thinks(AgentLoop):
    """Two long answers, and a pause for thought between them."""

    thinks_s = 5.0

    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        await self.generate(rollout)
        await asyncio.sleep(self.thinks_s)
        await self.generate(rollout)
        return rollout


def test_the_clock_of_a_rollout_stands_still_while_it_waits_for_the_engine() -> None:
    (rollout,), at = run_virtual(play(build(Thinks, rollout_timeout_s=6.0)))
    assert rollout.status is Status.COMPLETED
    assert at == 105.0


def test_a_rollout_that_takes_too_long_by_itself_fails_with_its_stage() -> None:
    (rollout,), at = run_virtual(play(build(Thinks, rollout_timeout_s=4.0)))
    assert rollout.error is not None
    assert (rollout.error.reason, rollout.error.infrastructure) == ("rollout_deadline", True)
    assert "within 4 s; it was in: agent loop" in rollout.error.message
    assert at == 54.0


class HangsInTool(AgentLoop):
    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        await self.call_tool(rollout, asyncio.Event().wait, timeout_s=1e6)  # type: ignore[arg-type]
        return rollout


def test_a_deadline_names_the_tool_that_was_waited_for() -> None:
    (rollout,), _ = run_virtual(play(build(HangsInTool, rollout_timeout_s=4.0)))
    assert rollout.error is not None
    assert "it was in: tool" in rollout.error.message


class Deaf(SingleTurnAgentLoop):
    """The second of its siblings never hears that it is cancelled."""

    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        await self.generate(rollout)
        if rollout.rollout_id.endswith(":1"):
            await hear_nothing(1000)
            rollout.status = Status.COMPLETED
            rollout.response_text = "from beyond"
            await self.generate(rollout)
        return rollout


def test_a_loop_that_swallows_its_cancellation_is_left_behind_and_its_siblings_are_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> tuple[AgentLoop, Group, float]:
        loop = build(Deaf, rollout_timeout_s=10.0)
        mine = group_of(3)
        group = await loop.generate_group(mine, enable_partial_rollout=False)
        at = asyncio.get_running_loop().time()
        await asyncio.sleep(5000)
        # What it still does reaches only what nobody looks at any more.
        assert mine[1].response_text == "from beyond"
        return loop, group, at

    with caplog.at_level(logging.WARNING):
        loop, group, at = run_virtual(main())
    assert [rollout.status for rollout in group] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    assert group[1].error is not None
    assert group[1].error.reason == "rollout_deadline"
    assert group[1].response_text == ""
    assert at == 50.0 + 10.0 + 5.0
    assert loop.num_abandoned == 1
    assert "rollout t:0:1 does not end: Deaf swallows its cancellation" in caplog.text


def test_cancelling_a_group_does_not_wait_for_a_loop_that_swallows_it() -> None:
    async def main() -> tuple[float, dict[str, str]]:
        loop = build(Deaf, rollout_timeout_s=1e6)
        playing = asyncio.create_task(loop.generate_group(group_of(2), enable_partial_rollout=False))
        await asyncio.sleep(60)
        playing.cancel()
        await asyncio.wait([playing])
        assert playing.cancelled()
        at, stages = asyncio.get_running_loop().time(), await loop.stages()
        await asyncio.sleep(5000)
        return at, stages

    assert run_virtual(main()) == (65.0, {})


class DeafJudge(SingleTurnAgentLoop):
    async def judge_sample(self, rollout: RolloutState) -> None:
        await hear_nothing(1000)
        rollout.reward = Verdict(1.0)

    async def judge_group(self, group: Group) -> None:
        await hear_nothing(1000)


@pytest.mark.parametrize("relative", [False, True])
def test_judging_that_swallows_its_cancellation_leaves_the_answer_unjudged(relative: bool) -> None:
    loop = build(DeafJudge, judger=JudgerScript(relative=relative), judge_timeout_s=20.0)
    (rollout,), at = run_virtual(play(loop))
    assert rollout.status is Status.FAILED
    assert rollout.error is not None
    assert rollout.error.reason == "unjudged"
    assert rollout.reward is None
    assert len(rollout.response)
    assert at == 50.0 + 20.0 + 5.0


class Stubborn(SingleTurnAgentLoop):
    """Hears its cancellation and says that all is well."""

    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        await self.generate(rollout)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1000)
        return rollout


def test_an_answer_after_the_deadline_is_no_answer() -> None:
    (rollout,), at = run_virtual(play(build(Stubborn, rollout_timeout_s=10.0)))
    assert rollout.error is not None
    assert rollout.error.reason == "rollout_deadline"
    assert at == 60.0


class AsksOn(AgentLoop):
    """Swallows whatever comes, and asks again."""

    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        for _ in range(60):
            with contextlib.suppress(BaseException):
                await self.generate(rollout)
                await asyncio.sleep(3.0)
        return rollout


def test_a_loop_that_asks_on_after_its_deadline_is_given_its_moment_and_no_more() -> None:
    loop = build(AsksOn, rollout_timeout_s=10.0, length=5)
    (rollout,), at = run_virtual(play(loop))
    assert rollout.error is not None
    assert rollout.error.reason == "rollout_deadline"
    # Four answers, the deadline in the thought after the fourth, and the moment after it.
    assert at == 4 * 5.0 + 10.0 + 5.0
    assert rollout.num_tokens == 4 * 5
    assert loop.num_abandoned == 1


class LeavesOneBehind(AgentLoop):
    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        if rollout.rollout_id.endswith(":1"):
            await self.generate(rollout)
            return rollout
        transcript = self.transcript(rollout)
        await hear_nothing(10.0)
        with contextlib.suppress(Exception):
            await transcript.call_tool(lambda: asyncio.sleep(0, "late"), timeout_s=1.0)
        return rollout


def test_code_that_was_left_behind_writes_nothing_while_its_siblings_still_play() -> None:
    (left, sibling), at = run_virtual(play(build(LeavesOneBehind, rollout_timeout_s=1.0), 2))
    assert at == 50.0
    assert (left.status, sibling.status) == (Status.FAILED, Status.COMPLETED)
    assert (left.turns, left.num_tokens) == ((), 0)
