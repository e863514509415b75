from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from penstock.agent_loop import AgentLoop, SingleTurnAgentLoop
from penstock.agent_loop.judging import take_verdict
from penstock.engine import RolloutControllerConfig
from penstock.errors import CircuitOpen, EngineUnavailable, Interrupted, UserFunctionError
from penstock.produce import FailurePolicyConfig, ProduceContext, SyncProduceStrategyConfig, has_different_rewards
from penstock.replay import GroupState
from penstock.rollout import Group, Prompt, RolloutState, Status, Unjudged, Verdict
from penstock.testing import (
    EngineFaults,
    EngineScript,
    JudgerScript,
    ScriptedEngine,
    ScriptedTask,
    ScriptedWorld,
    constant,
    run_virtual,
)

NewContext = Callable[..., ProduceContext]
Seconds = Callable[..., EngineScript]


async def play(ctx: ProduceContext) -> tuple[Group, bool]:
    group = await ctx.generate_group(await ctx.sample_group())
    return group, await ctx.put_generated_group(group)


def played(world: ScriptedWorld, context: NewContext) -> tuple[Group, bool]:
    group, completed = run_virtual(play(context(world)))
    world.check()
    return group, completed


def engine_of(world: ScriptedWorld) -> ScriptedEngine:
    [engine] = world.engines or [world.engine]
    assert isinstance(engine, ScriptedEngine)
    return engine


def task(**options: object) -> ScriptedTask:
    return ScriptedTask(**options)  # type: ignore[arg-type]


def nothing_passes(samples: list[RolloutState]) -> bool:
    return False


def test_a_completed_group_waits_with_its_duration(context: NewContext, seconds: Seconds) -> None:
    world = ScriptedWorld([task(judger=JudgerScript(latency_s=constant(3.0)))], engine=seconds(10))
    group, completed = played(world, context)
    assert completed
    assert [rollout.group_generate_time_s for rollout in group] == [13.0, 13.0]
    assert world.buffer.count("task", Status.COMPLETED) == 1


def test_available_is_what_was_consumed_and_what_is_complete(context: NewContext) -> None:
    world = ScriptedWorld()
    world.manager.progress.consumed_samples["task"] = 3
    played(world, context)
    assert context(world).available_count() == 4


def test_a_filtered_group_counts_its_raw_rewards_and_is_not_held(context: NewContext) -> None:
    world = ScriptedWorld([task(strategy=SyncProduceStrategyConfig(is_valid_sample_fn=nothing_passes))])
    group, completed = played(world, context)
    window = world.manager.progress.windows["task"]
    assert not completed
    assert all(rollout.status is Status.FILTERED for rollout in group)
    assert world.buffer.discarded("task") == {"filtered": 1}
    assert (window.raw_reward_count, window.filtered, window.produced_rollouts) == (2, 2, 2)
    assert window.raw_reward_sum == pytest.approx(sum(r.reward.score for r in group if r.reward))


@pytest.mark.parametrize(("scores", "teaches"), [((1.0, 1.0), False), ((1.0, 0.0), True)])
def test_a_group_of_equal_rewards_teaches_nothing(scores: tuple[float, float], teaches: bool) -> None:
    group = [RolloutState(prompt=Prompt(), reward=Verdict(score)) for score in scores]
    assert has_different_rewards(group) is teaches


def broken(samples: list[RolloutState]) -> bool:
    raise ZeroDivisionError("in the user's code")


def test_an_error_in_the_validity_function_names_the_function(context: NewContext) -> None:
    world = ScriptedWorld([task(strategy=SyncProduceStrategyConfig(is_valid_sample_fn=broken))])
    with pytest.raises(UserFunctionError, match=r"is_valid_sample_fn .*\.broken raised ZeroDivisionError.*task:0"):
        run_virtual(play(context(world)))


def test_staleness_is_decided_by_the_consumers_live_step_not_by_the_step_produced(context: NewContext) -> None:
    async def main() -> tuple[bool, bool]:
        world = ScriptedWorld()
        _, fresh = await play(context(world, train_step=9))
        world.manager.progress.begin_consume(2)
        _, late = await play(context(world, train_step=1))
        assert world.buffer.discarded("task") == {"expired": 1}
        return fresh, late

    assert run_virtual(main()) == (True, False)


class NoVersions(SingleTurnAgentLoop):
    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        await self.generate(rollout)
        response = rollout.response
        rollout.response = type(response)().append(response.ids, response.logprobs)
        return rollout


def test_missing_versions_are_those_of_the_attempts_start(context: NewContext) -> None:
    async def main() -> Group:
        world = ScriptedWorld([task(loop=NoVersions)])
        group = await context(world, model_step=3).sample_group()
        group = await context(world, model_step=3).generate_group(group)
        await context(world, model_step=5).put_generated_group(group)
        return group

    assert {step for rollout in run_virtual(main()) for step in rollout.model_steps.tolist()} == {3}


# Failures.


def test_an_infrastructure_failure_is_retried_three_times_with_backoff_then_the_group_goes(
    context: NewContext, tmp_path: Path
) -> None:
    world = ScriptedWorld(
        [task(prompt_repeat_k=1)],
        engine=ScriptedEngine(EngineScript(length=constant(20), tokens_per_s=10.0, faults=EngineFaults(fails=1.0))),
        dead_letters=tmp_path / "dead.jsonl",
    )

    async def main() -> float:
        await play(context(world))
        return asyncio.get_running_loop().time()

    # Four attempts of a second each, and half a second, one, two between them.
    assert run_virtual(main()) == pytest.approx(4 * 1.0 + 3.5)
    assert engine_of(world).served == {"task:0:0": 4}
    assert world.buffer.discarded("task") == {"retries_exhausted": 1}
    assert world.manager.progress.windows["task"].failed == 1
    letter = msgspec.json.decode((tmp_path / "dead.jsonl").read_bytes())
    assert (letter["group_id"], letter["reason"]) == ("task:0", "retries_exhausted")
    assert letter["messages"] == [{"role": "user", "content": "0"}]
    assert "the scripted engine failed" in letter["failures"]["task:0:0"]["message"]


class Poisoned(SingleTurnAgentLoop):
    """Fails on every rollout that ends in :1."""

    played: dict[str, int] = {}

    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        self.played[rollout.rollout_id] = self.played.get(rollout.rollout_id, 0) + 1
        await self.generate(rollout)
        if rollout.rollout_id.endswith(":1"):
            raise LookupError("poison")
        return rollout


def test_a_data_failure_is_retried_once_and_healthy_siblings_are_kept(context: NewContext) -> None:
    Poisoned.played = {}
    world = ScriptedWorld([task(loop=Poisoned, prompt_repeat_k=3)])
    group, completed = played(world, context)
    assert not completed
    assert Poisoned.played == {"task:0:0": 1, "task:0:1": 2, "task:0:2": 1}
    assert world.judgers["task"].judged == {"task:0:0": 1, "task:0:2": 1}
    assert world.buffer.discarded("task") == {"failed": 1}
    assert world.dead_letters.count == 1
    assert group[1].error is not None
    assert "Poisoned raised LookupError: poison" in group[1].error.message


def test_a_retry_that_works_leaves_a_whole_group_and_one_failure_on_no_count(context: NewContext) -> None:
    world = ScriptedWorld(engine=ScriptedEngine(EngineScript(faults=EngineFaults(fails=0.4)), seed=3))
    results = [run_virtual(play(context(world))) for _ in range(30)]
    retried = [group for group, completed in results if completed and any(r.infrastructure_failures for r in group)]
    assert retried
    assert all(rollout.error is None for group in retried for rollout in group)
    world.check()


@pytest.mark.parametrize("fault", ["nonsense", "wrong_version"])
def test_an_engine_that_answers_nonsense_never_completes_a_rollout(context: NewContext, fault: str) -> None:
    engine = ScriptedEngine(EngineScript(faults=EngineFaults(**{fault: 1.0})))
    world = ScriptedWorld([task(failures=FailurePolicyConfig(backoff_s=0))], engine=engine)
    group, completed = played(world, context)
    assert not completed
    assert {r.error.reason for r in group if r.error is not None} == {"engine_nonsense"}
    assert world.buffer.discarded("task") == {"retries_exhausted": 1}


def test_an_answer_of_weights_that_do_not_exist_is_not_kept_for_another_judging(context: NewContext) -> None:
    failures = FailurePolicyConfig(backoff_s=0)
    world = ScriptedWorld(
        [task(failures=failures, judger=JudgerScript(unjudged=1.0), prompt_repeat_k=1)],
        engine=ScriptedEngine(EngineScript(faults=EngineFaults(wrong_version=1.0))),
    )
    (rollout,), completed = played(world, context)
    assert not completed
    assert rollout.error is not None
    assert rollout.error.reason == "engine_nonsense"
    assert engine_of(world).served["task:0:0"] == 4


def test_an_engine_that_does_not_answer_meets_its_deadline(context: NewContext) -> None:
    engine = EngineScript(faults=EngineFaults(hangs=1.0))
    controller = RolloutControllerConfig(request_timeout_s=60.0, failures_to_fence=99)
    world = ScriptedWorld([task(failures=FailurePolicyConfig(backoff_s=0))], engine=engine, controller=controller)
    group, completed = played(world, context)
    assert not completed
    assert all(rollout.error is not None and rollout.error.reason == "engine_deadline" for rollout in group)


def test_an_interruption_without_a_pause_is_the_engines_failure(context: NewContext) -> None:
    world = ScriptedWorld([task(failures=FailurePolicyConfig(backoff_s=1.0))])

    async def main() -> tuple[Group, bool]:
        await world.engine.pause_generation()
        return await play(context(world))

    group, completed = run_virtual(main())
    assert not completed
    assert {r.error.reason for r in group if r.error is not None} == {"engine_abort"}


class JudgesByTheEngine(SingleTurnAgentLoop):
    """Its judge is interrupted every time."""

    async def judge_sample(self, rollout: RolloutState) -> None:
        raise Interrupted("the judge's engine was paused by somebody else")


def test_judging_that_is_interrupted_without_a_pause_has_a_budget(context: NewContext) -> None:
    world = ScriptedWorld([task(loop=JudgesByTheEngine)])
    group, completed = played(world, context)
    assert not completed
    assert {rollout.error.reason for rollout in group if rollout.error} == {"unjudged"}
    assert world.buffer.discarded("task") == {"unjudged": 1}


class Unplayed(AgentLoop):
    async def generate_group(self, group: Group, *, enable_partial_rollout: bool) -> Group:
        if group[0].draw % 2:
            raise OSError("the loop broke")
        return group


def test_a_loop_that_breaks_or_leaves_rollouts_unplayed_fails_them(context: NewContext) -> None:
    world = ScriptedWorld([task(loop=Unplayed)])
    messages = []
    for _ in range(2):
        group, completed = played(world, context)
        assert not completed
        messages += [rollout.error.message for rollout in group if rollout.error is not None]
    assert ["left the rollout unplayed" in m for m in messages] == [True, True, False, False]
    assert all("Unplayed raised OSError: the loop broke" in m for m in messages[2:])


class NoEngineLeft(SingleTurnAgentLoop):
    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        raise EngineUnavailable("no engine is left: engine-0 exited with 1")


def test_a_run_without_engines_stops_with_that_error(context: NewContext) -> None:
    with pytest.raises(EngineUnavailable, match="engine-0"):
        run_virtual(play(context(ScriptedWorld([task(loop=NoEngineLeft)]))))


# Judging.


@pytest.mark.parametrize("fault", ["unjudged", "not_finite", "raises", "hangs"])
def test_a_rollout_without_a_verdict_is_judged_once_more_and_never_gets_a_number(
    context: NewContext, fault: str
) -> None:
    world = ScriptedWorld([task(judger=JudgerScript(**{fault: 1.0}), judge_timeout_s=30.0, prompt_repeat_k=1)])
    (rollout,), completed = played(world, context)
    assert not completed
    assert rollout.reward is None
    assert rollout.error is not None
    assert rollout.error.reason == "unjudged"
    assert world.buffer.discarded("task") == {"unjudged": 1}
    assert world.judgers["task"].judged == {"task:0:0": 2}
    # The answer was whole: it was not made again.
    assert engine_of(world).served == {"task:0:0": 1}


def test_a_rollout_that_stays_unjudged_leaves_a_group_that_is_large_enough(context: NewContext) -> None:
    failures = FailurePolicyConfig(min_group_size=1)
    world = ScriptedWorld([task(judger=JudgerScript(unjudged=0.7), prompt_repeat_k=4, failures=failures)], seed=5)
    sizes = set()
    for _ in range(20):
        group, completed = played(world, context)
        if completed:
            sizes.add(len(group))
            assert all(rollout.reward is not None for rollout in group)
    assert {1, 2, 3} & sizes
    assert world.buffer.tokens.wasted["unjudged"] > 0
    assert world.buffer.discarded("task").get("unjudged", 0) >= 0


def test_without_min_group_size_one_unjudged_rollout_discards_the_group(context: NewContext) -> None:
    world = ScriptedWorld([task(judger=JudgerScript(unjudged=0.7), prompt_repeat_k=4)], seed=5)
    results = [played(world, context) for _ in range(20)]
    assert {len(group) for group, _ in results} == {4}
    assert world.buffer.discarded("task")["unjudged"] > 10


# The breaker.


def many(world: ScriptedWorld, context: NewContext, n: int) -> None:
    async def main() -> None:
        for _ in range(n):
            await play(context(world))

    run_virtual(main())


def test_the_run_stops_when_too_large_a_share_of_a_window_failed(context: NewContext) -> None:
    failures = FailurePolicyConfig(breaker_window=8, breaker_share=0.5)
    world = ScriptedWorld([task(loop=Poisoned, failures=failures)])
    with pytest.raises(CircuitOpen, match=r"8 of the last 8 groups failed \(limit 50%\); the last: task:7:1: .*poison"):
        many(world, context, 100)
    assert world.buffer.conservation("task").drawn == 8


class HasABug(SingleTurnAgentLoop):
    """Its judge cannot work, and says so."""

    async def judge_sample(self, rollout: RolloutState) -> None:
        raise UserFunctionError("the judge my_run.reward failed the same way 8 times and never gave a verdict")


@pytest.mark.parametrize("relative", [False, True])
def test_a_judge_that_cannot_work_stops_the_run_at_once_as_itself(relative: bool) -> None:
    world = ScriptedWorld([task(loop=HasABug)])
    if relative:

        async def judge_group(rollouts: Group) -> list[Verdict]:
            raise UserFunctionError("the judge my_run.reward failed")

        world = ScriptedWorld([task(judger=JudgerScript(relative=True))])
        world.judgers["task"].judge_group = judge_group  # type: ignore[method-assign,assignment]
    with pytest.raises(UserFunctionError, match=r"the judge my_run\.reward failed"):
        run_virtual(world.manager.produce_batch(4, 1, model_step=0))
    assert world.dead_letters.count == 0


class IsNotJudged(SingleTurnAgentLoop):
    async def judge_sample(self, rollout: RolloutState) -> None:
        rollout.response_text = "forty-two"
        take_verdict(rollout, Unjudged("raised ValueError: not a number", "Traceback: my_run.py, line 3, in reward"))


def test_a_dead_letter_has_the_answer_and_the_traceback_of_its_judge(context: NewContext, tmp_path: Path) -> None:
    file = tmp_path / "dead.jsonl"
    played(ScriptedWorld([task(loop=IsNotJudged, prompt_repeat_k=1)], dead_letters=file), context)
    letter = msgspec.json.decode(file.read_bytes())
    assert letter["reason"] == "unjudged" and letter["answers"] == {"task:0:0": "forty-two"}
    failure = letter["failures"]["task:0:0"]
    assert failure["message"] == "raised ValueError: not a number"
    assert failure["detail"] == "Traceback: my_run.py, line 3, in reward"


class OneInFour(Poisoned):
    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        if rollout.draw % 4 == 0:
            return await super().generate_sample(rollout)
        await self.generate(rollout)
        return rollout


def test_a_poison_prompt_now_and_then_does_not_stop_the_run(context: NewContext) -> None:
    failures = FailurePolicyConfig(breaker_window=8, breaker_share=0.5)
    world = ScriptedWorld([task(loop=OneInFour, failures=failures)])
    many(world, context, 40)
    assert world.buffer.discarded("task") == {"failed": 10}
    assert world.dead_letters.count == 10


def test_the_run_stops_when_nothing_passes_the_filter(context: NewContext) -> None:
    strategy = SyncProduceStrategyConfig(is_valid_sample_fn=nothing_passes)
    world = ScriptedWorld([task(strategy=strategy, failures=FailurePolicyConfig(max_filtered_in_a_row=10))])
    with pytest.raises(CircuitOpen, match=r"10 finished groups in a row .*nothing_passes"):
        many(world, context, 100)


def test_the_run_stops_when_every_group_is_too_stale_as_it_finishes(context: NewContext) -> None:
    world = ScriptedWorld([task(failures=FailurePolicyConfig(max_filtered_in_a_row=10))])
    world.manager.progress.begin_consume(5)
    with pytest.raises(CircuitOpen, match="too stale as it finished"):
        many(world, context, 100)


def test_a_group_cancelled_before_its_first_step_goes_back_as_it_was(context: NewContext) -> None:
    async def main() -> tuple[bool, int]:
        world = ScriptedWorld()
        ctx = context(world)
        group = await ctx.sample_group()
        for rollout in group:
            rollout.status = Status.ABORTED
        completed = await ctx.put_generated_group(group)
        world.check()
        return completed, world.buffer.state_count("task", GroupState.ABORTED)

    assert run_virtual(main()) == (False, 1)


def test_a_pause_during_the_backoff_ends_it_at_once_and_the_group_waits(context: NewContext) -> None:
    failures = FailurePolicyConfig(backoff_s=1000.0)
    world = ScriptedWorld([task(failures=failures)], engine=EngineScript(faults=EngineFaults(fails=1.0)))

    async def main() -> float:
        ctx = context(world)
        playing = asyncio.create_task(ctx.generate_group(await ctx.sample_group()))
        await asyncio.sleep(10)
        ctx.update_event.set()
        group = await playing
        assert {rollout.status for rollout in group} == {Status.ABORTED}
        await ctx.put_generated_group(group)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 10.0
    assert world.buffer.count("task", Status.ABORTED) == 1
    world.check()


class TwoTurns(AgentLoop):
    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        await self.generate(rollout)
        await asyncio.sleep(1000)
        return rollout


def test_what_was_cut_off_is_stored_without_tokens_of_weights_that_do_not_exist(context: NewContext) -> None:
    engine = ScriptedEngine(EngineScript(faults=EngineFaults(wrong_version=1.0)))
    world = ScriptedWorld([task(loop=TwoTurns)], engine=engine)

    async def main() -> None:
        ctx = context(world)
        attempt = ctx.begin(await ctx.sample_group(), enable_partial_rollout=True)
        playing = asyncio.create_task(ctx.play(attempt))
        await asyncio.sleep(100)
        playing.cancel()
        await asyncio.wait([playing])
        assert all(rollout.num_tokens for rollout in attempt.group)
        stored = attempt.interrupted()
        assert not await ctx.put_generated_group(stored)
        assert [rollout.num_tokens for rollout in stored.group] == [0, 0]
        assert world.buffer.count("task", Status.ABORTED) == 1
        assert world.buffer.tokens.wasted["retried"] > 0
        world.check()

    run_virtual(main())


class MindChanged(AgentLoop):
    """Played again after a pause, it makes another call than the one on record; from its beginning, none is."""

    interrupted = False

    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        if not self.interrupted:
            await self.call_tool(rollout, self._tool, timeout_s=10.0)
        await self.generate(rollout)
        return rollout

    async def _tool(self) -> str:
        return "said by a tool"


def test_a_rollout_whose_record_does_not_fit_starts_again(context: NewContext, seconds: Seconds) -> None:
    world = ScriptedWorld([task(loop=MindChanged, prompt_repeat_k=1)], engine=seconds(default=10))

    async def main() -> Group:
        MindChanged.interrupted = False
        ctx = context(world)
        playing = asyncio.create_task(ctx.generate_group(await ctx.sample_group(), enable_partial_rollout=True))
        await asyncio.sleep(5)
        ctx.update_event.set()
        await world.engine.pause_generation()
        await ctx.put_generated_group(await playing)
        MindChanged.interrupted = True
        await world.engine.continue_generation()
        ctx.update_event.clear()
        group = await ctx.generate_group(await ctx.sample_group([Status.ABORTED]), enable_partial_rollout=True)
        assert await ctx.put_generated_group(group)
        return group

    (rollout,) = run_virtual(main())
    assert rollout.response_text == "a" * 10
    assert (rollout.data_failures, [turn.kind for turn in rollout.turns]) == (1, ["generate"])
    world.check()
