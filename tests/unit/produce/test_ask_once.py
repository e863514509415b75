from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from penstock.errors import DeadlineExceeded
from penstock.produce import AskOnceStrategyConfig, ProduceBatchResult
from penstock.replay import GroupState
from penstock.rollout import RolloutState
from penstock.testing import EngineFaults, EngineScript, ScriptedEngine, ScriptedTask, ScriptedWorld, run_virtual

Seconds = Callable[..., EngineScript]


def odd_draws(samples: list[RolloutState]) -> bool:
    return samples[0].draw % 2 == 1


def tasks(**options: object) -> list[ScriptedTask]:
    strategy = AskOnceStrategyConfig(**options)
    return [ScriptedTask(name=name, strategy=strategy, prompts=5) for name in ("a", "b")]


def ids(result: ProduceBatchResult) -> list[str]:
    return sorted(group[0].group_id for group in result.groups)


def test_every_prompt_is_asked_once_and_sizes_are_per_task() -> None:
    async def main() -> None:
        world = ScriptedWorld(tasks())
        await world.load_weights(3)
        result = await world.manager.ask({"a": 5, "b": 2}, model_step=3)
        assert ids(result) == ["a:0", "a:1", "a:2", "a:3", "a:4", "b:0", "b:1"]
        assert {r.steps[0][0] for group in result.groups for r in group} == {3}
        world.check()

    run_virtual(main())


def test_what_is_filtered_or_fails_is_not_replaced() -> None:
    async def main() -> list[str]:
        world = ScriptedWorld(tasks(is_valid_sample_fn=odd_draws))
        return ids(await world.manager.ask({"a": 4}, model_step=0))

    assert run_virtual(main()) == ["a:1", "a:3"]


def test_nothing_needs_to_succeed() -> None:
    async def main() -> None:
        world = ScriptedWorld(tasks(), engine=EngineScript(faults=EngineFaults(fails=1.0)))
        result = await world.manager.ask({"a": 4, "b": 4}, model_step=0)
        assert result.groups == []
        assert world.buffer.discarded("a") == {"retries_exhausted": 4}

    run_virtual(main())


def test_asked_again_it_gives_the_same_ids_and_answers_and_holds_nothing() -> None:
    async def main() -> None:
        world = ScriptedWorld(tasks())
        first = await world.manager.ask({"a": 5}, model_step=0)
        await world.load_weights(2)
        again = await world.manager.ask({"a": 5}, model_step=2)
        assert ids(first) == ids(again)
        answers = [
            {r.rollout_id: r.response_text for group in result.groups for r in group} for result in (first, again)
        ]
        assert answers[0] == answers[1]
        states = world.buffer.conservation("a").states
        assert {state for state, n in states.items() if n} == {GroupState.TRAINED}

    run_virtual(main())


def test_a_call_that_was_cut_off_leaves_nothing_to_the_next(seconds: Seconds) -> None:
    async def main() -> list[str]:
        engine = ScriptedEngine(seconds(default=20))
        world = ScriptedWorld(tasks(), engine=engine)
        asking = asyncio.create_task(world.manager.ask({"a": 3}, model_step=0))
        await asyncio.sleep(5)
        asking.cancel()
        await asyncio.wait([asking])
        result = await world.manager.ask({"a": 3}, model_step=0)
        assert world.buffer.discarded("a") == {"cancelled": 3}
        world.check()
        return ids(result)

    assert run_virtual(main()) == ["a:0", "a:1", "a:2"]


class DeafToPauses(ScriptedEngine):
    async def pause_generation(self) -> None:
        return


def test_a_call_that_is_cut_off_waits_for_no_engine_and_leaves_nothing_to_the_next() -> None:
    async def main() -> list[str]:
        first_is_fast = EngineScript(tokens_per_s=1.0, answers=lambda r: [65] * (2 if ":0:" in r.request_id else 100))
        world = ScriptedWorld(tasks(pause_timeout_s=200.0), engine=DeafToPauses(first_is_fast))
        asking = asyncio.create_task(world.manager.ask({"a": 3}, model_step=0))
        await asyncio.sleep(5)
        asking.cancel()
        await asyncio.wait([asking])
        assert asyncio.get_running_loop().time() == 5
        states = world.buffer.conservation("a").states
        assert (states[GroupState.COMPLETED], states[GroupState.RUNNING]) == (1, 2)
        result = await world.manager.ask({"a": 3}, model_step=0)
        assert world.buffer.discarded("a") == {"cancelled": 3}
        world.check()
        return ids(result)

    assert run_virtual(main()) == ["a:0", "a:1", "a:2"]


def test_an_evaluation_that_hangs_ends_with_the_stage() -> None:
    async def main() -> None:
        engine = EngineScript(faults=EngineFaults(hangs=1.0))
        world = ScriptedWorld(tasks(pause_timeout_s=1.0), engine=engine, stall_timeout_s=100.0)
        await world.manager.ask({"a": 1}, model_step=0)

    with pytest.raises(DeadlineExceeded, match="a:0:0 in engine"):
        run_virtual(main())
