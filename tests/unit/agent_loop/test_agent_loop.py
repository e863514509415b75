from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.agent_loop import (
    AgentLoop,
    AgentLoopConfig,
    SingleTurnAgentLoop,
    SingleTurnAgentLoopConfig,
    rollout_seed,
)
from penstock.errors import ConfigError, DataFailure, EngineUnavailable
from penstock.ports import GenerateRequest
from penstock.rollout import FinishReason, Group, Prompt, RolloutState, SampleParams, Status, Verdict, pack_ids
from penstock.testing import (
    CharTokenizer,
    EngineFaults,
    EngineScript,
    JudgerScript,
    ScriptedEngine,
    ScriptedJudger,
    constant,
    run_virtual,
)


class NoWeights:
    def tensors(self) -> Any:
        yield from ()


def group_of(k: int = 1) -> Group:
    prompt = Prompt(messages=({"role": "user", "content": "?"},), ids=pack_ids([1, 63]))
    return [RolloutState(prompt=prompt, task_name="t", group_id="t:0", rollout_id=f"t:0:{i}") for i in range(k)]


def says(*texts: str, tokens_per_s: float = 1.0, **rest: Any) -> EngineScript:
    """The n-th turn says the n-th text: as many tool answers as stand before it tell which turn it is."""

    def answers(request: GenerateRequest) -> list[int]:
        turn = request.prompt_ids.count(pack_ids([ord("]")]))
        return [*map(ord, texts[turn]), 0]

    return EngineScript(tokens_per_s=tokens_per_s, answers=answers, **rest)


def build(
    loop: type[AgentLoop] = SingleTurnAgentLoop,
    script: EngineScript | None = None,
    judger: JudgerScript | None = JudgerScript(),  # noqa: B008 - frozen
    **options: Any,
) -> AgentLoop:
    return loop(
        engine=options.pop("engine", None) or ScriptedEngine(script),
        tokenizer=CharTokenizer(),
        judger=None if judger is None else ScriptedJudger(judger),
        sample_params=options.pop("sample_params", SampleParams()),
        **options,
    )


def play(loop: AgentLoop, group: Group | None = None, *, partial: bool = False) -> Group:
    return run_virtual(loop.generate_group(group or group_of(), enable_partial_rollout=partial))


def judged(loop: AgentLoop) -> dict[str, int]:
    assert isinstance(loop.judger, ScriptedJudger)
    return dict(loop.judger.judged)


def served(loop: AgentLoop) -> dict[str, int]:
    assert isinstance(loop.engine, ScriptedEngine)
    return dict(loop.engine.served)


# One turn.


def test_a_prompt_is_answered_and_judged() -> None:
    (rollout,) = play(build(script=says("hello")))
    assert rollout.status is Status.COMPLETED
    assert rollout.response_text == "hello"
    assert rollout.finish_reason is FinishReason.STOP
    assert rollout.reward is not None
    assert rollout.response.steps == ((0, 6),)


def test_the_answer_ends_before_a_stop_string() -> None:
    loop = build(script=says("yes</answer>no"), sample_params=SampleParams(stop=("</answer>",)))
    assert play(loop)[0].response_text == "yes"


def test_siblings_play_at_the_same_time() -> None:
    async def main() -> float:
        await build(script=says("123456789")).generate_group(group_of(5), enable_partial_rollout=False)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 10.0


def test_a_completed_rollout_is_neither_played_nor_judged_again() -> None:
    loop = build()
    first, second = group_of(2)
    first.status, first.reward = Status.COMPLETED, Verdict(0.5)
    play(loop, [first, second])
    assert judged(loop) == served(loop) == {"t:0:1": 1}
    assert first.reward == Verdict(0.5)


def test_siblings_never_share_a_seed_and_a_new_try_has_a_new_one() -> None:
    group = group_of(4)
    seeds = {rollout_seed(7, rollout) for rollout in group}
    group[0].num_tries = 1
    assert len(seeds | {rollout_seed(7, group[0]), rollout_seed(8, group[1])}) == 6
    group[0].num_tries = 0
    assert rollout_seed(7, group[0]) in seeds


# What goes wrong belongs to one rollout.


@pytest.mark.parametrize(
    ("faults", "reason", "infrastructure"),
    [
        (EngineFaults(fails=1.0), "engine_error", True),
        (EngineFaults(nonsense=1.0), "engine_nonsense", True),
    ],
)
def test_an_engines_fault_fails_the_rollout(faults: EngineFaults, reason: str, infrastructure: bool) -> None:
    (rollout,) = play(build(script=EngineScript(faults=faults)))
    assert rollout.status is Status.FAILED
    assert rollout.error is not None
    assert (rollout.error.reason, rollout.error.infrastructure) == (reason, infrastructure)
    assert rollout.reward is None


class Breaks(SingleTurnAgentLoop):
    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        if rollout.rollout_id.endswith(":1"):
            raise KeyError("a user's bug")
        return await super().generate_sample(rollout)


def test_a_users_exception_fails_its_rollout_and_keeps_the_siblings() -> None:
    group = play(build(Breaks), group_of(3))
    assert [rollout.status for rollout in group] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    assert group[1].error is not None
    assert "Breaks raised KeyError" in group[1].error.message
    assert not group[1].error.infrastructure


class Silent(AgentLoop):
    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        return rollout


def test_a_loop_that_makes_no_token_fails_the_rollout() -> None:
    (rollout,) = play(build(Silent))
    assert rollout.error is not None
    assert rollout.error.reason == "empty_answer"


class SilentFirst(SingleTurnAgentLoop):
    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        return rollout if rollout.rollout_id.endswith(":0") else await super().generate_sample(rollout)


def test_an_empty_answer_is_not_whole_when_its_group_is_cut_off() -> None:
    async def main() -> Group:
        group = group_of(2)
        loop = build(SilentFirst, says("abcdef"))
        playing = asyncio.create_task(loop.generate_group(group, enable_partial_rollout=True))
        await asyncio.sleep(1)
        playing.cancel()
        await asyncio.wait([playing])
        return group

    empty, _ = run_virtual(main())
    assert (empty.status, empty.finish_reason) == (Status.FAILED, None)


def test_a_loop_must_say_how_it_plays() -> None:
    (rollout,) = play(build(AgentLoop))
    assert rollout.error is not None
    assert "must define generate_sample" in rollout.error.message


class NoEngine(AgentLoop):
    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        raise EngineUnavailable("none left")


def test_a_run_that_cannot_go_on_is_not_one_rollouts_failure() -> None:
    with pytest.raises(EngineUnavailable, match="none left"):
        play(build(NoEngine), group_of(2))


# Judging.


@pytest.mark.parametrize("fault", ["unjudged", "not_finite", "raises", "hangs"])
@pytest.mark.parametrize("relative", [False, True])
def test_a_rollout_without_a_verdict_is_failed_as_unjudged(fault: str, relative: bool) -> None:
    loop = build(judger=JudgerScript(relative=relative, **{fault: 1.0}), judge_timeout_s=20.0)
    for rollout in play(loop, group_of(2)):
        assert rollout.status is Status.FAILED
        assert rollout.error is not None
        assert rollout.error.reason == "unjudged"
        assert rollout.reward is None
        assert len(rollout.response)


class ForgetsToJudge(SingleTurnAgentLoop):
    async def judge_sample(self, rollout: RolloutState) -> None:
        pass


def test_an_override_that_sets_no_reward_leaves_no_completed_rollout() -> None:
    assert play(build(ForgetsToJudge))[0].status is Status.FAILED


def test_a_loop_without_a_judger_needs_no_reward() -> None:
    (rollout,) = play(build(judger=None))
    assert (rollout.status, rollout.reward) == (Status.COMPLETED, None)


def test_a_relative_judger_waits_until_every_sibling_is_whole() -> None:
    loop = build(Breaks, judger=JudgerScript(relative=True))
    group = play(loop, group_of(3))
    assert judged(loop) == {}
    assert [rollout.status for rollout in group] == [Status.ABORTED, Status.FAILED, Status.ABORTED]
    # The whole ones keep their answers and are judged when the third is whole too.
    group[1].rollout_id, group[1].status, group[1].error = "t:0:9", Status.INIT, None
    again = play(loop, group)
    assert {rollout.status for rollout in again} == {Status.COMPLETED}
    assert served(loop) == {"t:0:0": 1, "t:0:2": 1, "t:0:9": 1}
    assert all(count == 1 for count in judged(loop).values())


@pytest.mark.parametrize("relative", [False, True])
def test_cancelled_while_it_is_judged_an_answer_is_whole_but_not_complete(relative: bool) -> None:
    async def main() -> Group:
        loop = build(script=says("hi"), judger=JudgerScript(latency_s=constant(100.0), relative=relative))
        group = group_of(2)
        playing = asyncio.create_task(loop.generate_group(group, enable_partial_rollout=False))
        await asyncio.sleep(50)
        assert set((await loop.stages()).values()) == {"judger"}
        playing.cancel()
        await asyncio.wait([playing])
        assert await loop.stages() == {}
        return group

    for rollout in run_virtual(main()):
        assert rollout.status is not Status.COMPLETED
        assert rollout.finish_reason is FinishReason.STOP


def test_an_answer_that_only_lacks_its_verdict_is_judged_without_being_made_again() -> None:
    async def main() -> tuple[AgentLoop, Group]:
        loop = build(script=says("hi"), judger=JudgerScript(latency_s=constant(100.0)))
        group = group_of()
        playing = asyncio.create_task(loop.generate_group(group, enable_partial_rollout=False))
        await asyncio.sleep(50)
        playing.cancel()
        await asyncio.wait([playing])
        group[0].status = Status.ABORTED
        return loop, await loop.generate_group(group, enable_partial_rollout=False)

    loop, (rollout,) = run_virtual(main())
    assert rollout.status is Status.COMPLETED
    assert served(loop) == {"t:0:0": 1}


# Several turns, interrupted.


class Asks(AgentLoop):
    """Writes, asks a tool, writes again."""

    tool_calls = 0
    heard: list[str] = []

    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        first = await self.generate(rollout)
        said = await self.call_tool(rollout, self._tool, timeout_s=30.0)
        last = await self.generate(rollout)
        type(self).heard = [first.text, said, last.text]
        return rollout

    async def _tool(self) -> str:
        type(self).tool_calls += 1
        await asyncio.sleep(2)
        return "[42]"


async def interrupted_at(second: float, *, partial: bool) -> tuple[AgentLoop, RolloutState, Status]:
    Asks.tool_calls = 0
    loop = build(Asks, says("first", "second"))
    group = group_of()
    playing = asyncio.create_task(loop.generate_group(group, enable_partial_rollout=partial))
    await asyncio.sleep(second)
    await loop.engine.pause_generation()
    await playing
    status = group[0].status
    await loop.engine.load_weights(NoWeights(), 1)
    await loop.engine.continue_generation()
    await loop.generate_group(group, enable_partial_rollout=partial)
    return loop, group[0], status


# Tokens: first_ (6 s), tool (2 s), second_ (7 s).
@pytest.mark.parametrize(
    ("second", "steps", "tool_calls"),
    [(3.5, ((0, 3), (1, 14)), 1), (7.0, ((0, 10), (1, 7)), 1), (10.5, ((0, 12), (1, 5)), 1)],
)
def test_an_interrupted_loop_is_answered_from_the_record_and_goes_on(
    second: float, steps: tuple[tuple[int, int], ...], tool_calls: int
) -> None:
    _, rollout, status = run_virtual(interrupted_at(second, partial=True))
    assert status is Status.ABORTED
    assert rollout.status is Status.COMPLETED
    assert rollout.response_text == "firstsecond"
    assert rollout.response.steps == steps
    assert Asks.tool_calls == tool_calls
    assert Asks.heard == ["first", "[42]", "second"]


def test_without_partial_rollout_an_interrupted_loop_starts_from_nothing() -> None:
    _, rollout, _ = run_virtual(interrupted_at(10.5, partial=False))
    assert rollout.response_text == "firstsecond"
    assert rollout.response.steps == ((1, 17),)
    assert Asks.tool_calls == 2


def test_tool_text_is_not_trained_and_has_no_logprob() -> None:
    (rollout,) = play(build(Asks, says("first", "second")))
    assert rollout.response_mask.tolist() == [1] * 6 + [0] * 4 + [1] * 7
    assert not rollout.logprobs[6:10].any()


class Waits(AgentLoop):
    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        await self.generate(rollout)
        await self.call_tool(rollout, asyncio.Event().wait, timeout_s=30.0)  # type: ignore[arg-type]
        return rollout


def test_a_tool_has_a_deadline() -> None:
    (rollout,) = play(build(Waits))
    assert rollout.error is not None
    assert rollout.error.reason == "tool_deadline"


def test_a_continued_answer_has_only_the_rest_of_its_budget() -> None:
    async def main() -> RolloutState:
        script = EngineScript(tokens_per_s=1.0, length=constant(100))
        loop = build(script=script, sample_params=SampleParams(max_tokens=10))
        group = group_of()
        playing = asyncio.create_task(loop.generate_group(group, enable_partial_rollout=True))
        await asyncio.sleep(4.5)
        await loop.engine.pause_generation()
        await playing
        await loop.engine.continue_generation()
        await loop.generate_group(group, enable_partial_rollout=True)
        return group[0]

    rollout = run_virtual(main())
    assert (len(rollout.response), rollout.finish_reason) == (10, FinishReason.LENGTH)


class Swallows(AgentLoop):
    """Takes whatever is raised for the end of its answer, or for a reason to try again."""

    again = False

    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        for _ in range(10**6):
            try:
                await self.generate(rollout)
                break
            except Exception:
                if not self.again:
                    break
        return rollout


class Rewords(AgentLoop):
    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        try:
            await self.generate(rollout)
        except Exception as error:
            raise ValueError("no answer") from error
        return rollout


@pytest.mark.parametrize("kind", [Swallows, Rewords])
def test_an_answer_that_was_cut_off_is_not_judged_whatever_the_loop_makes_of_it(kind: type[AgentLoop]) -> None:
    async def main() -> tuple[Status, RolloutState]:
        loop = build(kind, says("abcdefgh"))
        (rollout,) = group = group_of()
        playing = asyncio.create_task(loop.generate_group(group, enable_partial_rollout=True))
        await asyncio.sleep(3.5)
        await loop.engine.pause_generation()
        await playing
        status = rollout.status
        assert (rollout.finish_reason, judged(loop)) == (None, {})
        await loop.engine.continue_generation()
        await loop.generate_group(group, enable_partial_rollout=True)
        return status, rollout

    status, rollout = run_virtual(main())
    assert status is Status.ABORTED
    assert (rollout.status, rollout.response_text) == (Status.COMPLETED, "abcdefgh")


def test_a_loop_that_calls_again_whatever_is_raised_does_not_keep_the_event_loop() -> None:
    class Insists(Swallows):
        again = True

    async def main() -> float:
        loop = build(Insists, says("abcdefgh"), rollout_timeout_s=2.0)
        playing = asyncio.create_task(loop.generate_group(group_of(), enable_partial_rollout=True))
        await asyncio.sleep(3.5)
        await loop.engine.pause_generation()
        (rollout,) = await playing
        assert rollout.error is not None
        assert rollout.error.reason == "rollout_deadline"
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(5.5)


def test_pausing_a_loop_ends_only_its_own_requests() -> None:
    async def main() -> list[Status]:
        engine = ScriptedEngine(EngineScript(tokens_per_s=1.0, length=constant(50)))
        loops = [build(engine=engine) for _ in range(2)]
        groups = [group_of(), group_of()]
        groups[1][0].rollout_id = "other"
        playing = [
            asyncio.create_task(loop.generate_group(group, enable_partial_rollout=True))
            for loop, group in zip(loops, groups, strict=True)
        ]
        await asyncio.sleep(5)
        await loops[0].pause()
        await asyncio.gather(*playing)
        return [group[0].status for group in groups]

    assert run_virtual(main()) == [Status.ABORTED, Status.COMPLETED]


def test_the_stage_says_what_a_rollout_waits_for() -> None:
    async def main() -> list[str]:
        loop = build(Asks, says("first", "second"), JudgerScript(latency_s=constant(5.0)))
        playing = asyncio.create_task(loop.generate_group(group_of(), enable_partial_rollout=False))
        stages = []
        for second in (3, 4, 12):
            await asyncio.sleep(second)
            stages.append((await loop.stages())["t:0:0"])
        await playing
        assert await loop.stages() == {}
        return stages

    assert run_virtual(main()) == ["engine", "tool", "judger"]


# Configuration.


class Greets(SingleTurnAgentLoop):
    def __init__(self, *, greeting: str, **rest: Any) -> None:
        super().__init__(**rest)
        self.greeting = greeting


def test_a_loop_is_built_from_a_class_or_its_name_with_its_arguments() -> None:
    parts: dict[str, Any] = {"engine": ScriptedEngine(), "tokenizer": CharTokenizer(), "judger": None}
    loop = AgentLoopConfig(loop=Greets, arguments={"greeting": "hello"}).build(**parts)
    assert isinstance(loop, Greets)
    assert loop.greeting == "hello"
    named = AgentLoopConfig(loop="penstock.agent_loop.SingleTurnAgentLoop").build(**parts)
    assert type(named) is type(SingleTurnAgentLoopConfig().build(**parts)) is SingleTurnAgentLoop


def test_actors_without_a_cluster_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_ray_actors is 2"):
        SingleTurnAgentLoopConfig(num_ray_actors=2).build(
            engine=ScriptedEngine(), tokenizer=CharTokenizer(), judger=None
        )


def test_a_failure_that_a_loop_raises_keeps_its_reason() -> None:
    class Refuses(AgentLoop):
        async def generate_sample(self, rollout: RolloutState) -> RolloutState:
            raise DataFailure("the page is gone")

    (rollout,) = play(build(Refuses))
    assert rollout.error is not None
    assert (rollout.error.reason, rollout.error.message) == ("agent_loop_error", "the page is gone")
