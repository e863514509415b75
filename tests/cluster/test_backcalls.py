"""What lives in the driver is reached from actors, and nothing hangs when somebody is gone."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest
from cluster import hosted

from penstock.agent_loop.config import AgentLoopConfig
from penstock.cluster.backcalls import Outbox
from penstock.cluster.host import Host, pack_luggage
from penstock.cluster.launcher import CPUActorLauncher
from penstock.cluster.peer import Answer, Ask, decode_messages, encode_messages
from penstock.cluster.placement import RayPlacement
from penstock.cluster.wire import PackedGroup, answer_with, pack
from penstock.errors import InfrastructureFailure, StorageError
from penstock.events import ActorLost, ActorRecovered, Warned
from penstock.ports import Description, GenerateRequest
from penstock.rollout import Prompt, RolloutState, SampleParams, Status, Verdict, pack_ids
from penstock.testing import CharTokenizer

SMALL = 200 << 20


class Noted:
    """An observer that keeps what it is told."""

    def __init__(self):
        self.events = []
        self.any = asyncio.Event()

    def notice(self, event):
        self.events.append(event)
        self.any.set()


class Log:
    def __init__(self):
        self.turns = []

    async def append(self, turn, *, durable=False):
        if turn.rollout_id == "full":
            raise StorageError("the disk is full")
        self.turns.append((turn, durable))


@pytest.fixture
def noted():
    return Noted()


@pytest.fixture
def placement(session, noted):
    return RayPlacement(CPUActorLauncher(session, observer=noted))


def group(*names: str) -> list[RolloutState]:
    prompt = Prompt(ids=pack_ids([1, 2, 3]), ground_truth=("a", 1), extra_info={"set": {1, 2}})
    return [RolloutState(prompt=prompt, task_name="t", group_id="g", rollout_id=name) for name in names]


def talkative(placement, *, engine=None, judger=None, log=None, n=1):
    config = AgentLoopConfig(
        loop=hosted.Talkative,
        sample_params=SampleParams(max_tokens=3),
        num_ray_actors=n,
        num_cpus_per_actor=0.5,
        cpu_memory_per_actor=SMALL,
    )
    return config.build(
        engine=engine or hosted.Echo(), tokenizer=CharTokenizer(), judger=judger, placement=placement, turn_log=log
    )


def test_a_loop_in_an_actor_uses_engine_judger_and_turn_log_of_the_driver(placement):
    log, asked = Log(), group("a", "b")
    loop = talkative(placement, judger=hosted.Length(), log=log)
    played = asyncio.run(loop.generate_group(asked, enable_partial_rollout=True))
    assert [rollout.rollout_id for rollout in played] == ["a", "b"]
    assert all(rollout.status is Status.COMPLETED and rollout.num_tokens == 9 for rollout in played)
    assert all(isinstance(rollout.reward, Verdict) for rollout in played)
    # One prompt in memory, the one that was sent; what was asked is not changed until its answer is there.
    assert all(rollout.prompt is asked[0].prompt for rollout in played)
    assert sorted(turn.rollout_id for turn, _ in log.turns) == ["a", "a", "b", "b"]


def test_what_the_driver_raises_reaches_the_loop_as_itself(placement):
    loop = talkative(placement, log=Log())
    with pytest.raises(StorageError, match="the disk is full"):
        asyncio.run(loop.generate_group(group("full"), enable_partial_rollout=True))


def test_a_stream_comes_piece_by_piece_in_both_directions(placement):
    there = placement.place(
        Description(name="echo", port="engine", build=hosted.Echo, num_actors=1, num_cpus=0.5, memory=SMALL), {}
    )
    back = placement.place(
        Description(
            name="relay",
            port="engine",
            build=hosted.Relay,
            ports=("engine",),
            num_actors=1,
            num_cpus=0.5,
            memory=SMALL,
        ),
        {"engine": hosted.Echo()},
    )
    request = GenerateRequest(request_id="r", prompt_ids=pack_ids([5, 6, 7]), params=SampleParams(), seed=0)

    async def run(engine):
        pieces = [piece async for piece in engine.stream(request)]
        assert [len(piece.ids) // 4 for piece in pieces] == [1, 1, 1, 0]
        async for _ in engine.stream(request):
            break  # and the rest is dropped
        assert (await engine.generate(request)).ids == request.prompt_ids
        assert await engine.score(request.prompt_ids) == bytes(8)
        assert await engine.model_step() == 7

    asyncio.run(run(there))
    asyncio.run(run(back))


def test_a_loop_asks_a_judger_in_another_actor_without_the_driver(placement):
    judger = placement.place(
        Description(name="length", port="judger", build=hosted.Length, num_actors=2, num_cpus=0.5, memory=SMALL), {}
    )
    loop = talkative(placement, judger=judger, n=2)

    async def run():
        played = await asyncio.gather(
            *(loop.generate_group(group(f"{i}"), enable_partial_rollout=True) for i in range(8))
        )
        assert len({rollout.reward.parts["pid"] for (rollout,) in played}) == 2
        # Counted where they live: the loops' own routers asked both.
        assert (await judger.metrics())["calls"] == 8.0

    asyncio.run(run())


def test_a_killed_actor_is_told_and_told_to_be_back_and_its_work_is_done(placement, noted):
    """Nobody notices but the observer: the one actor is waited for, and its group played again."""

    class Slow(hosted.Echo):
        async def generate(self, request):
            asked.set()
            await go_on.wait()
            return await super().generate(request)

    asked, go_on = asyncio.Event(), asyncio.Event()
    loop = talkative(placement, engine=Slow(), judger=hosted.Length())

    async def run():
        playing = asyncio.create_task(loop.generate_group(group("a"), enable_partial_rollout=True))
        await asked.wait()
        member = loop._caller._router.members[0]
        before = await member.identify()
        hosted.kill(before.pid)
        asked.clear()
        await asked.wait()
        go_on.set()
        (rollout,) = await playing
        assert rollout.status is Status.COMPLETED
        assert (await member.identify()).incarnation != before.incarnation

    asyncio.run(run())
    told = [type(event) for event in noted.events]
    assert told == [ActorLost, ActorRecovered]
    assert noted.events[0].actor == noted.events[1].actor == "agent loop Talkative-0"


def test_what_an_actor_logs_is_told_here(placement, noted):
    remote = placement.place(
        Description(name="warn", port="judger", build=hosted.Odd, num_actors=1, num_cpus=0.5, memory=SMALL), {}
    )

    async def warn():
        await remote.judge(group("a")[0])
        async with asyncio.timeout(20):
            await noted.any.wait()

    asyncio.run(warn())
    assert noted.events == [Warned(text="warn-0: this is odd", source="penstock.odd")]


def test_a_driver_that_does_not_ask_is_not_waited_for_for_ever():
    outbox = Outbox(silent_s=0.05)

    async def run():
        with pytest.raises(InfrastructureFailure, match="the driver has not asked"):
            await outbox.call("log", "append", ())

    asyncio.run(run())


def test_what_the_driver_was_asked_before_it_lost_its_line_fails_at_once_and_the_rest_goes_over_the_new_one():
    outbox = Outbox()

    async def run():
        outbox.attended("first", lambda: None)
        lost = asyncio.create_task(outbox.call("home", "restart", ()))
        await asyncio.sleep(0)
        assert len(outbox.attended("first", lambda: None)) == 1
        later = asyncio.create_task(outbox.call("home", "start", ()))
        await asyncio.sleep(0)
        (given,) = outbox.attended("second", lambda: None)
        # Whoever waited on the old line until now, for nobody, takes nothing with it.
        asked = asyncio.create_task(outbox.call("home", "end", ()))
        await asyncio.sleep(0)
        assert outbox.more("first", lambda: None) == []
        (other,) = outbox.more("second", lambda: None)
        outbox.take(Answer(other.number, answer_with(8)))
        assert await asked == 8
        with pytest.raises(InfrastructureFailure, match="lost its connection"):
            await lost
        outbox.take(Answer(given.number, answer_with(7)))
        assert await later == 7

    asyncio.run(run())


@pytest.fixture
def host():
    """The actor's program, without an actor."""
    yield Host("judger")
    gc.unfreeze()
    logging.getLogger("penstock").removeHandler(logging.getLogger("penstock").handlers[-1])


LENGTH = Description(name="j", port="judger", build=hosted.Length)


def test_the_garbage_collector_of_an_actor_passes_by_what_was_built_in_it(host):
    asyncio.run(host.install("part", pack_luggage(LENGTH, {})))
    assert gc.get_freeze_count() > 0


def test_what_runs_for_a_process_that_collects_no_more_is_ended(host):
    """A dead loop's calls do not run in a judger for ever."""

    async def run():
        await host.install("part", pack_luggage(LENGTH, {}))
        wait = PackedGroup(group("a"))
        wait.group[0].response_text = "wait"
        ask = Ask(1, "part", "judge", pack((wait,)), "answer")
        incarnation = (await host.incarnation()).decode()
        await host.post("dead", incarnation, encode_messages([ask]))
        (dead,) = host._connections.values()
        (running,) = dead.answering._running.values()
        dead.collected_at -= 10**6
        assert decode_messages(await host.collect("living", incarnation, 0.01, False)) == []
        await asyncio.wait([running], timeout=5)
        assert running.cancelled() and list(host._connections) == ["living"]
        assert await host.post("living", "of another actor", encode_messages([ask])) == b""

    asyncio.run(run())
