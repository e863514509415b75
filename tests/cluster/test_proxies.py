"""What lives in an actor looks like what lives here."""

from __future__ import annotations

import asyncio
import inspect

import pytest
from cluster import hosted

from penstock import errors
from penstock.cluster.launcher import CPUActorLauncher
from penstock.cluster.placement import RayPlacement
from penstock.ports import Description
from penstock.rollout import RolloutState, Unjudged, Verdict, new_rollout

SMALL = 100 << 20


@pytest.fixture
def placement(session):
    return RayPlacement(CPUActorLauncher(session))


def judger(placement, n: int = 1, **arguments):
    return placement.place(
        Description(
            name="length",
            port="judger",
            build=hosted.Length,
            arguments=arguments,
            num_actors=n,
            num_cpus=0.5,
            memory=SMALL,
        ),
        {},
    )


def answer(text: str) -> RolloutState:
    rollout = new_rollout("?", ground_truth=(1, "two"))
    rollout.response_text = text
    return rollout


ERRORS = [
    name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, errors.PenstockError)
]


def test_every_error_raised_in_an_actor_arrives_as_itself(placement):
    remote = judger(placement)

    async def run():
        for name in ERRORS:
            with pytest.raises(errors.PenstockError) as caught:
                await remote.judge(answer(f"raise {name}"))
            expected = hosted.make_error(name)
            assert type(caught.value) is type(expected)
            assert str(caught.value) == str(expected)
            assert vars(caught.value) == vars(expected)
        with pytest.raises(RuntimeError, match="Foreign: of a class"):
            await remote.judge(answer("foreign"))

    asyncio.run(run())
    assert len(ERRORS) > 20


def test_control_calls_are_answered_while_an_actor_is_full(placement):
    remote = judger(placement, unit=2.0)

    async def run():
        assert await remote.judge(answer("abc")) == Verdict(6.0, {"pid": pytest.approx(0, abs=1e9)})
        waiting = [asyncio.create_task(remote.judge(answer("wait"))) for _ in range(1500)]
        await asyncio.sleep(0)
        assert (await remote.metrics())["calls"] == 1.0
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(await remote.judge(answer("abcd")), Verdict)

    asyncio.run(run())


def test_a_judger_on_two_actors_takes_turns_and_adds_up(placement):
    remote = judger(placement, 2)

    async def run():
        verdicts = [await remote.judge(answer("abc")) for _ in range(4)]
        assert len({verdict.parts["pid"] for verdict in verdicts}) == 2
        assert await remote.metrics() == {"calls": 4.0, "max_latency_s": 2.0}

    asyncio.run(run())


def test_a_judger_whose_actor_dies_is_asked_again_elsewhere(placement):
    remote = judger(placement, 2)

    async def run():
        dead = await remote.judge(answer("die"))
        assert isinstance(dead, Unjudged)  # it killed the second one too
        assert isinstance(await remote.judge(answer("abc")), Verdict)

    asyncio.run(run())
