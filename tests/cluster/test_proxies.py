"""What lives in an actor looks like what lives here."""

from __future__ import annotations

import asyncio
import inspect

import pytest
from cluster import hosted

from penstock import errors
from penstock.cluster.host import pack_luggage
from penstock.cluster.launcher import CPUActorLauncher
from penstock.cluster.member import ActorGone, Member, Part
from penstock.cluster.placement import RayPlacement
from penstock.cluster.wire import PackedGroup
from penstock.ports import Description
from penstock.resources import CPUResourcesConfig
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


def test_who_is_asked_again_after_a_while_may_be_another_actor(session, monkeypatch):
    """An engine that died while the trainer worked, and was recovered meanwhile, is not taken for a dead one."""
    monkeypatch.setattr("penstock.cluster.line.COLLECT_S", 0.2)
    resources = CPUResourcesConfig(num_workers=1, num_cpus_per_worker=0.5, cpu_memory_per_worker=SMALL)
    (member,) = CPUActorLauncher(session).launch("length", resources)
    part = Part("length", pack_luggage(Description(name="length", port="judger", build=hosted.Length), {}))

    async def another(member: Member, than: str) -> None:
        while True:
            try:
                if (await member.identify()).incarnation != than:
                    return
            except ActorGone:
                pass
            await asyncio.sleep(0.05)

    async def run():
        await member.call(part, "judge", PackedGroup([answer("abc")]))
        before = await member.identify()
        await asyncio.sleep(1.0)  # nothing is asked for longer than the line looks for answers
        hosted.kill(before.pid)
        async with asyncio.timeout(60):
            await another(member, than=before.incarnation)
        await member.call(part, "judge", PackedGroup([answer("abc")]))

    asyncio.run(run())
