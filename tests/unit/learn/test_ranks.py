"""Ranks in processes of their own, as one train worker: what one learns is learned by all, and what dies comes back.

Starting processes that import torch is most of the cost, so one set of ranks serves the tests that can share it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rank_program
import torch

from penstock.errors import CheckpointError, ModelError, RankLost, StateLost, WeightSyncError
from penstock.events import ActorLost, ActorRecovered, Event
from penstock.learn.batch import TrainBatch, prepare_batch
from penstock.learn.config import TrainWorkerConfig
from penstock.learn.rank_process import KeptMemory, ProcessRanks
from penstock.learn.ranks import TrainRanks, build_ranks
from penstock.learn.worker import TorchTrainWorker
from penstock.rollout import Group
from penstock.weights import WriterSettings

pytestmark = pytest.mark.long_tier

LR = 1e-3


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


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file that tells a rank to die in its next loss."""
    path = tmp_path_factory.mktemp("order") / "rank"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(rank_program.FATAL, str(path))
        yield path


@pytest.fixture(scope="module")
def seen() -> Seen:
    return Seen()


@pytest.fixture(scope="module")
def config() -> TrainWorkerConfig:
    return TrainWorkerConfig(lr=LR, loss="rank_program.ppo_that_may_die", fused=False)


@pytest.fixture(scope="module")
def ranks(order: Path, seen: Seen, config: TrainWorkerConfig, model_dir: Path) -> Iterator[TrainRanks]:
    """Two, each with all weights."""
    ranks = build_ranks(config, model_dir, 2, ProcessRanks(), seen, total_steps=10, deterministic=True, threads=1)
    yield ranks
    asyncio.run(ranks.close())


@pytest.fixture(scope="module")
def fresh(ranks: TrainRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ranks as they began."""
    directory = tmp_path_factory.mktemp("fresh")
    asyncio.run(ranks.save(directory))
    return directory


@pytest.fixture(scope="module")
def batch(random_groups: Callable[..., list[Group]]) -> TrainBatch:
    return prepare_batch(random_groups(7, num_groups=4), train_step=1)


async def _weights(ranks: TrainRanks) -> dict[str, torch.Tensor]:
    store = ranks.weights.store(WriterSettings(kind="shared_memory"))
    stored = await store.write(1)
    with stored.receive() as received:
        found = {name: tensor.clone() for name, tensor in received.tensors()}
    await store.confirm()
    return found


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _pid(ranks: TrainRanks, rank: int) -> int:
    assert ranks._group is not None
    host: Any = ranks._group.hosts[rank]
    return int(host.pid)


async def _three_steps(ranks: TrainRanks, fresh: Path, batch: TrainBatch) -> dict[str, torch.Tensor]:
    """The same three from the same beginning."""
    await ranks.load(fresh)
    for _ in range(3):
        await ranks.train(batch)
    return await _weights(ranks)


def test_ranks_learn_what_one_process_learns(
    ranks: TrainRanks, fresh: Path, model_dir: Path, batch: TrainBatch, tmp_path: Path
) -> None:
    worker = TrainWorkerConfig(lr=LR, fused=False).build(model_dir, total_steps=10, threads=1)

    async def run() -> None:
        await ranks.load(fresh)
        assert isinstance(worker, TorchTrainWorker)
        for _ in range(2):
            ours, theirs = await ranks.train(batch), await worker.train(batch)
            for key in ("loss", "grad_norm", "tokens", "lr", "entropy"):
                assert ours.metrics[key] == pytest.approx(theirs.metrics[key], rel=1e-3), key
            assert ours.logprobs.keys() == theirs.logprobs.keys()
        # Each reads what the other wrote.
        (tmp_path / "ranks").mkdir()
        (tmp_path / "worker").mkdir()
        await ranks.save(tmp_path / "ranks")
        await worker.save(tmp_path / "worker")
        mine = await _weights(ranks)
        await worker.load(tmp_path / "ranks")
        assert _same({name: tensor.clone() for name, tensor in worker.weights.tensors()}, mine)
        await ranks.load(tmp_path / "worker")
        scores, expected = await ranks.score(batch), await worker.score(batch)
        assert scores.keys() == expected.keys()
        await ranks.save_hf(tmp_path / "hf")
        assert (tmp_path / "hf" / "model.safetensors").is_file()
        await worker.close()

    asyncio.run(run())


def test_a_rank_that_dies_idle_comes_back_by_itself_and_the_weights_are_the_same(
    ranks: TrainRanks, fresh: Path, batch: TrainBatch, seen: Seen
) -> None:
    async def run() -> None:
        undisturbed = await _three_steps(ranks, fresh, batch)
        assert seen.take() == []
        await ranks.load(fresh)
        await ranks.train(batch)
        published = await _weights(ranks)
        here = await ranks.write_again(1)
        assert await ranks.write_again(1) == here
        seen.recovered.clear()
        os.kill(_pid(ranks, 1), signal.SIGKILL)
        # Nothing is asked of them meanwhile.
        assert await asyncio.to_thread(seen.recovered.wait, 120.0)
        # What was published lay in the memory of ranks that are gone.
        again = await ranks.write_again(1)
        assert again != here
        with again.receive() as received:
            assert _same(dict(received.tensors()), published)
        for _ in range(2):
            await ranks.train(batch)
        with pytest.raises(WeightSyncError, match="weights 1 are lost with the rank that had them"):
            await ranks.write_again(1)
        assert seen.take() == [("ActorLost", "rank-1"), ("ActorRecovered", "rank-1")]
        assert _same(await _weights(ranks), undisturbed)

    asyncio.run(run())


def test_a_rank_that_dies_in_a_step_costs_that_step_and_nothing_else(
    ranks: TrainRanks, fresh: Path, batch: TrainBatch, seen: Seen, order: Path
) -> None:
    async def run() -> None:
        undisturbed = await _three_steps(ranks, fresh, batch)
        await ranks.load(fresh)
        await ranks.train(batch)
        order.write_text("0")  # noqa: ASYNC240 - nothing else runs
        before = await _weights(ranks)
        with pytest.raises(RankLost, match="rank 0: its process was killed by SIGKILL"):
            await ranks.train(batch)
        assert seen.take() == [("ActorLost", "rank-0"), ("ActorRecovered", "rank-0")]
        assert _same(await _weights(ranks), before)
        for _ in range(2):
            await ranks.train(batch)
        assert _same(await _weights(ranks), undisturbed)

    asyncio.run(run())


def test_a_step_that_is_cancelled_changes_nothing_and_the_ranks_go_on(
    ranks: TrainRanks, fresh: Path, batch: TrainBatch, seen: Seen
) -> None:
    async def run() -> None:
        await ranks.load(fresh)
        before = await _weights(ranks)
        training = asyncio.create_task(ranks.train(batch))
        await asyncio.sleep(0)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
        after = await _weights(ranks)
        # Before its first micro-batch or after its last: there is nothing between.
        undisturbed = after if not _same(before, after) else before
        assert _same(after, undisturbed)
        await ranks.train(batch)
        assert seen.take() == []

    asyncio.run(run())


def test_a_checkpoint_that_does_not_fit_is_refused_and_the_ranks_stay(
    ranks: TrainRanks, fresh: Path, batch: TrainBatch, tmp_path: Path, seen: Seen
) -> None:
    async def run() -> None:
        with pytest.raises(CheckpointError, match="cannot be loaded"):
            await ranks.load(tmp_path)
        await ranks.load(fresh)
        await ranks.train(batch)
        assert seen.take() == []

    asyncio.run(run())


def test_ranks_whose_kept_state_is_gone_train_nothing_any_more(
    ranks: TrainRanks, fresh: Path, batch: TrainBatch
) -> None:
    """They would begin anew with the weights of the model's directory."""

    async def run() -> None:
        await ranks.load(fresh)
        await ranks.train(batch)
        with Path("/dev/null").open() as nothing:  # noqa: ASYNC230 - nothing else runs
            for kept in ranks._kept.values():
                assert isinstance(kept, KeptMemory)
                os.dup2(nothing.fileno(), int(Path(kept.stored.path).name))
        os.kill(_pid(ranks, 0), signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(StateLost, match="what was kept of their weights with them"):
                await ranks.train(batch)
        assert ranks._group is None

    asyncio.run(run())


def test_a_model_that_cannot_be_trained_is_refused_when_the_ranks_are_built(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        build_ranks(TrainWorkerConfig(), tmp_path, 1, ProcessRanks(), Seen(), total_steps=1)
