"""Train ranks in actors of a three-node cluster, as one train worker: what ranks in processes do, to the bit."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from cluster.hosted import kill

from penstock.cluster.launcher import CPUActorLauncher
from penstock.cluster.ranks import ActorRank, ActorRanks
from penstock.cluster.session import connect
from penstock.errors import CheckpointError, ModelError, RankLost
from penstock.events import ActorLost, ActorRecovered, Event
from penstock.learn.batch import TrainBatch, prepare_batch
from penstock.learn.config import TrainWorkerConfig
from penstock.learn.losses import CustomLossConfig
from penstock.learn.rank_process import ProcessRanks
from penstock.learn.ranks import TrainRanks, build_ranks
from penstock.models import resolve_model
from penstock.resources import AcceleratorResourcesConfig
from penstock.rollout import FinishReason, Group, Prompt, RolloutState, Status, Tokens, Verdict, linear, pack_ids
from penstock.weights import WriterSettings

DEMAND = AcceleratorResourcesConfig(num_workers=2, num_cpus_per_worker=0.5).demand("train ranks")
VOCAB = 16


class Seen:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.recovered = threading.Event()

    def notice(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, ActorRecovered):
            self.recovered.set()

    def take(self) -> list[tuple[str, str]]:
        """What was told of ranks since the last time."""
        events, self.events = self.events, []
        return [
            (type(event).__name__, event.actor) for event in events if isinstance(event, ActorLost | ActorRecovered)
        ]


def _group(number: int, rng: np.random.Generator) -> Group:
    prompt = Prompt(ids=pack_ids(rng.integers(3, VOCAB, 5).tolist()))
    answers = [rng.integers(3, VOCAB, rng.integers(2, 9)).tolist() for _ in range(4)]
    return [
        RolloutState(
            prompt=prompt,
            group_id=f"g{number}",
            rollout_id=f"g{number}/{index}",
            segments=linear(Tokens().append(ids, [-2.0] * len(ids), model_step=0)),
            finish_reason=FinishReason.STOP,
            reward=Verdict(float(rng.normal())),
            status=Status.COMPLETED,
        )
        for index, ids in enumerate(answers)
    ]


@pytest.fixture(scope="module")
def batch() -> TrainBatch:
    rng = np.random.default_rng(7)
    return prepare_batch([_group(number, rng) for number in range(4)], train_step=1)


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that tells a rank to die in its next loss."""
    return tmp_path_factory.mktemp("order") / "rank"


@pytest.fixture(scope="module")
def config(order: Path) -> TrainWorkerConfig:
    loss = CustomLossConfig(function="rank_program.ppo_that_may_die", arguments={"order": str(order)})
    return TrainWorkerConfig(lr=1e-3, loss=loss)


@pytest.fixture(scope="module")
def launcher(cluster: Any) -> Iterator[CPUActorLauncher]:
    with connect(cluster.address, name="ranks") as session:
        yield CPUActorLauncher(session)


@pytest.fixture(scope="module")
def seen() -> Seen:
    return Seen()


@pytest.fixture(scope="module")
def ranks(launcher: CPUActorLauncher, config: TrainWorkerConfig, seen: Seen) -> Iterator[TrainRanks]:
    ranks = _built(config, ActorRanks(launcher, DEMAND), seen)
    yield ranks
    asyncio.run(ranks.close())


def _built(config: TrainWorkerConfig, launcher: Any, seen: Seen) -> TrainRanks:
    return build_ranks(config, resolve_model("tiny"), 2, launcher, seen, total_steps=10, deterministic=True, threads=1)


@pytest.fixture(scope="module")
def fresh(ranks: TrainRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ranks as they began."""
    directory = tmp_path_factory.mktemp("fresh")
    asyncio.run(ranks.save(directory))
    return directory


@pytest.fixture(scope="module")
def undisturbed(config: TrainWorkerConfig, batch: TrainBatch) -> dict[str, torch.Tensor]:
    """What two ranks in processes of this machine have after three steps."""

    async def run() -> dict[str, torch.Tensor]:
        for _ in range(3):
            await ranks.train(batch)
        weights = await _weights(ranks)
        await ranks.close()
        return weights

    ranks = _built(config, ProcessRanks(), Seen())
    return asyncio.run(run())


async def _weights(ranks: TrainRanks) -> dict[str, torch.Tensor]:
    store = ranks.weights.store(WriterSettings(kind="broadcast"))
    stored = await store.write(1)
    with stored.receive() as received:
        found = {name: tensor.clone() for name, tensor in received.tensors()}
    await store.confirm()
    return found


def _hosts(ranks: TrainRanks) -> list[ActorRank]:
    assert ranks._group is not None
    return [host for host in ranks._group.hosts if isinstance(host, ActorRank)]


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_ranks_in_actors_learn_what_ranks_in_processes_learn_to_the_bit(
    ranks: TrainRanks, fresh: Path, batch: TrainBatch, seen: Seen, undisturbed: dict[str, torch.Tensor]
) -> None:
    async def run() -> None:
        await ranks.load(fresh)
        for _ in range(3):
            await ranks.train(batch)
        assert _same(await _weights(ranks), undisturbed)
        assert seen.take() == []

    asyncio.run(run())


def test_each_rank_holds_what_it_asked_for(ranks: TrainRanks) -> None:
    (place,) = [kind for kind in ray.cluster_resources() if re.fullmatch("CPU_group_[0-9a-f]+", kind)]
    assert ray.cluster_resources()[place] == 2 * 0.5
    # Nothing is left beside them: a new rank could not start while the old one lives.
    assert ray.available_resources().get(place, 0.0) == 0.0
    assert sorted(_alive()) == ["rank-0", "rank-1"]


def test_a_rank_that_dies_idle_or_in_a_step_comes_back_on_its_node_and_the_weights_are_the_same(
    ranks: TrainRanks,
    fresh: Path,
    batch: TrainBatch,
    seen: Seen,
    order: Path,
    undisturbed: dict[str, torch.Tensor],
) -> None:
    async def run() -> None:
        await ranks.load(fresh)
        await ranks.train(batch)
        before = _hosts(ranks)
        seen.recovered.clear()
        kill(before[0].pid)
        # Nothing is asked of them meanwhile.
        assert await asyncio.to_thread(seen.recovered.wait, 120.0)
        assert seen.take() == [("ActorLost", "rank-0"), ("ActorRecovered", "rank-0")]
        after = _hosts(ranks)
        assert [host.where.node for host in after] == [host.where.node for host in before]
        assert {host.pid for host in after}.isdisjoint(host.pid for host in before), "also the other is a new one"
        await ranks.train(batch)
        order.write_text("1")  # noqa: ASYNC240 - nothing else runs
        with pytest.raises(RankLost, match="rank 1: its actor is gone"):
            await ranks.train(batch)
        assert seen.take() == [("ActorLost", "rank-1"), ("ActorRecovered", "rank-1")]
        await ranks.train(batch)
        assert _same(await _weights(ranks), undisturbed)

    asyncio.run(run())


def test_what_a_rank_refuses_arrives_as_itself_and_the_ranks_stay(
    ranks: TrainRanks, batch: TrainBatch, tmp_path: Path, seen: Seen
) -> None:
    async def run() -> None:
        before = [host.pid for host in _hosts(ranks)]
        with pytest.raises(CheckpointError, match="cannot be loaded"):
            await ranks.load(tmp_path)
        await ranks.train(batch)
        assert [host.pid for host in _hosts(ranks)] == before
        assert seen.take() == []

    asyncio.run(run())


def test_a_model_that_cannot_be_trained_is_refused_and_no_actor_is_left(
    launcher: CPUActorLauncher, ranks: TrainRanks, tmp_path: Path
) -> None:
    asyncio.run(ranks.close())
    with pytest.raises(ModelError, match=r"no config\.json"):
        build_ranks(TrainWorkerConfig(), tmp_path, 2, ActorRanks(launcher, DEMAND), Seen(), total_steps=1)
    assert _alive() == []


def _alive() -> list[str]:
    return [actor["Name"] for actor in ray._private.state.actors().values() if actor["State"] != "DEAD"]


@pytest.mark.soak_tier
def test_sharded_ranks_come_back_with_their_rows(launcher: CPUActorLauncher, batch: TrainBatch) -> None:
    """Each keeps its own rows: the one that was lost finds them where it kept them."""
    seen, config = Seen(), TrainWorkerConfig(lr=1e-3, sharding="fsdp2")

    async def run() -> None:
        await ranks.train(batch)
        before = await _weights(ranks)
        kill(_hosts(ranks)[1].pid)
        assert _same(await _weights(ranks), before)
        assert seen.take() == [("ActorLost", "rank-1"), ("ActorRecovered", "rank-1")]
        await ranks.close()

    ranks = _built(config, ActorRanks(launcher, DEMAND), seen)
    asyncio.run(run())
    assert _alive() == []
