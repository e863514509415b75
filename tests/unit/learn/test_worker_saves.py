"""What a worker saves, loads and exports, also while its thread is in the middle of a step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.errors import CheckpointError, StorageError
from penstock.learn.batch import TrainBatch
from penstock.learn.losses import CustomLossConfig, LossTerms, LossTokens
from penstock.learn.save import save_hf
from penstock.learn.worker import TorchTrainWorker
from penstock.trainer.checkpoints import CheckpointStore

from .worker_parts import are_same, go_on, new_worker, state_of, train, weights_of

# Saved and loaded.


def test_a_run_continued_from_what_was_saved_gives_the_same_bits(model_dir: Path, batch: TrainBatch) -> None:
    whole, resumed = new_worker(model_dir, warmup_steps=3), new_worker(model_dir, warmup_steps=3)
    train(whole, batch)
    go_on(whole, resumed)
    rates = [train(worker, batch)["lr"] for worker in (whole, resumed)]
    assert rates == [2e-3 / 3] * 2
    assert are_same(weights_of(resumed), weights_of(whole))
    assert are_same(state_of(resumed), state_of(whole))


def test_a_worker_that_fills_a_checkpoint_goes_on_from_it_to_the_bit(
    model_dir: Path, batch: TrainBatch, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    worker, resumed = new_worker(model_dir), new_worker(model_dir)
    train(worker, batch)

    async def save_and_load() -> None:
        await store.save(1, fill=worker.save, state={}, config={})
        await resumed.load(store.newest().path)

    asyncio.run(save_and_load())
    train(worker, batch)
    train(resumed, batch)
    assert are_same(weights_of(resumed), weights_of(worker))
    assert are_same(state_of(resumed), state_of(worker))


def _spoilt(directory: Path, name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors = load_file(directory / name)
    change(tensors)
    save_file(tensors, directory / name)
    return directory


def _forget(state: dict[str, torch.Tensor], parameter: str) -> None:
    for key in [key for key in state if key.endswith(f".{parameter}")]:
        del state[key]


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("optimizer", lambda t: t.update({"exp_avg.nowhere": torch.zeros(1)}), r"unknown \['nowhere'\]"),
        ("optimizer", lambda t: t.pop("steps_done"), "no steps_done"),
        ("optimizer", lambda t: _forget(t, "model.norm.weight"), r"missing \['model.norm.weight'\]"),
        ("optimizer", lambda t: t.update({"exp_avg.model.norm.weight": torch.zeros(3)}), "of another shape"),
        ("model", lambda t: t.pop("model.norm.weight"), r"\['model.norm.weight'\] are missing or differ"),
        ("model", lambda t: t.update({"model.norm.weight": torch.zeros(3)}), "are missing or differ"),
    ],
)
def test_a_state_of_another_model_is_refused_and_changes_nothing(
    model_dir: Path,
    batch: TrainBatch,
    tmp_path: Path,
    name: str,
    change: Callable[[dict[str, torch.Tensor]], None],
    problem: str,
) -> None:
    worker = new_worker(model_dir)
    asyncio.run(worker.save(tmp_path))
    train(worker, batch)
    other = tmp_path / "other"
    other.mkdir()
    asyncio.run(worker.save(other))
    weights, state = weights_of(worker), state_of(worker)
    with pytest.raises(CheckpointError, match=problem):
        asyncio.run(worker.load(_spoilt(other, f"{name}.safetensors", change)))
    assert are_same(weights_of(worker), weights)
    assert are_same(state_of(worker), state)


def test_files_that_are_missing_or_damaged_are_refused_by_name(model_dir: Path, tmp_path: Path) -> None:
    worker = new_worker(model_dir)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be loaded"):
        asyncio.run(worker.load(tmp_path))
    asyncio.run(worker.save(tmp_path))
    (tmp_path / "optimizer.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors cannot be loaded"):
        asyncio.run(worker.load(tmp_path))
    with pytest.raises(StorageError, match=r"model\.safetensors could not be written"):
        asyncio.run(worker.save(tmp_path / "nowhere"))


def test_saved_files_may_be_read_as_any_other_file(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "any").touch()
    worker = new_worker(model_dir)
    asyncio.run(worker.save(tmp_path))
    asyncio.run(worker.save_hf(tmp_path / "hf"))
    modes = {path.name: path.stat().st_mode for path in tmp_path.rglob("*") if path.is_file()}
    assert len(modes) >= 5
    assert set(modes.values()) == {modes["any"]}


# Exported.


def test_the_tensors_have_the_names_of_the_saved_model(model_dir: Path) -> None:
    worker = new_worker(model_dir)
    saved = load_file(model_dir / "model.safetensors")
    assert are_same(weights_of(worker), saved)
    assert "lm_head.weight" not in saved


def test_a_saved_model_appears_whole_replaces_the_old_and_keeps_the_tokenizer(
    model_dir: Path, batch: TrainBatch, tmp_path: Path
) -> None:
    worker = new_worker(model_dir)
    target = tmp_path / "hf" / "step-1"
    asyncio.run(worker.save_hf(target))
    train(worker, batch)
    asyncio.run(worker.save_hf(target))
    assert are_same(load_file(target / "model.safetensors"), weights_of(worker))
    assert (target / "tokenizer_config.json").read_text() == "{}"
    assert [path.name for path in target.parent.iterdir()] == ["step-1"]


class Killed(BaseException):
    pass


class KilledWhileSaving:
    """A model whose process is killed when half of it is written."""

    def save_pretrained(self, directory: Path) -> None:
        (directory / "config.json").touch()
        raise Killed


def test_killed_between_the_renames_and_killed_again_the_old_export_is_whole(model_dir: Path, tmp_path: Path) -> None:
    target, hidden = tmp_path / "final", [tmp_path / ".final.replaced", tmp_path / ".final.unfinished"]
    asyncio.run(new_worker(model_dir).save_hf(target))
    kept = (target / "model.safetensors").read_bytes()
    target.rename(hidden[0])
    hidden[1].mkdir()
    with pytest.raises(Killed):
        save_hf(KilledWhileSaving(), model_dir, target)
    assert (target / "model.safetensors").read_bytes() == kept


def test_a_place_that_cannot_be_written_is_a_storage_error(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="could not be written"):
        asyncio.run(new_worker(model_dir).save_hf(tmp_path / "file" / "model"))


# In a thread of its own.


_ENTERED, _MAY_GO_ON = threading.Event(), threading.Event()


def that_waits(tokens: LossTokens, config: CustomLossConfig) -> LossTerms:
    _ENTERED.set()
    assert _MAY_GO_ON.wait(60)
    return LossTerms(-tokens.advantages * tokens.logprobs)


@pytest.fixture
def waiting_worker(model_dir: Path) -> Iterator[TorchTrainWorker]:
    """Its first micro-batch of several waits until it may go on."""
    _ENTERED.clear()
    _MAY_GO_ON.clear()
    loss = CustomLossConfig(function=f"{__name__}.that_waits")
    yield new_worker(model_dir, loss=loss, max_tokens_per_micro_batch=16)
    _MAY_GO_ON.set()


def test_a_step_that_is_cancelled_has_ended_and_changed_nothing_when_it_returns(
    waiting_worker: TorchTrainWorker, batch: TrainBatch
) -> None:
    before, state = weights_of(waiting_worker), state_of(waiting_worker)

    async def cancel() -> None:
        training = asyncio.create_task(waiting_worker.train(batch))
        await asyncio.to_thread(_ENTERED.wait, 60)
        training.cancel()
        done, _ = await asyncio.wait([training], timeout=0.05)
        assert not done, "it waits for its thread"
        training.cancel()
        _MAY_GO_ON.set()
        with pytest.raises(asyncio.CancelledError):
            await training

    asyncio.run(cancel())
    assert are_same(weights_of(waiting_worker), before)
    assert are_same(state_of(waiting_worker), state)
    assert train(waiting_worker, batch)["micro_batches"] > 1


def test_what_is_saved_during_a_step_is_what_the_step_came_to(
    waiting_worker: TorchTrainWorker, batch: TrainBatch, tmp_path: Path
) -> None:
    async def save_meanwhile() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(waiting_worker.train(batch))
            await asyncio.to_thread(_ENTERED.wait, 60)
            tasks.create_task(waiting_worker.save(tmp_path))
            await asyncio.sleep(0)
            _MAY_GO_ON.set()

    asyncio.run(save_meanwhile())
    assert are_same(load_file(tmp_path / "model.safetensors"), weights_of(waiting_worker))
    assert int(load_file(tmp_path / "optimizer.safetensors")["steps_done"]) == 1


def test_a_snapshot_is_written_as_the_worker_was_whatever_it_trains_meanwhile(
    model_dir: Path, batch: TrainBatch, tmp_path: Path
) -> None:
    worker = new_worker(model_dir)
    for name in ("then", "later"):
        (tmp_path / name).mkdir()

    async def train_on() -> None:
        await worker.train(batch)
        await worker.save(tmp_path / "then")
        await worker.save_hf(tmp_path / "hf-then")
        snapshot = await worker.snapshot(optimizer=True, export=True)
        await worker.train(batch)
        await snapshot.save(tmp_path / "later")
        await snapshot.save_hf(tmp_path / "hf-later")

    asyncio.run(train_on())
    for then in sorted([*(tmp_path / "then").iterdir(), *(tmp_path / "hf-then").iterdir()]):
        later = tmp_path / then.parent.name.replace("then", "later") / then.name
        assert later.read_bytes() == then.read_bytes(), then
    assert not are_same(load_file(tmp_path / "later" / "model.safetensors"), weights_of(worker))


def test_a_snapshot_for_an_export_alone_has_no_optimiser(model_dir: Path, batch: TrainBatch, tmp_path: Path) -> None:
    worker = new_worker(model_dir)
    train(worker, batch)
    snapshot = asyncio.run(worker.snapshot(optimizer=False, export=True))
    asyncio.run(snapshot.save(tmp_path))
    assert load_file(tmp_path / "optimizer.safetensors") == {}


def test_a_closed_worker_takes_no_more_work(model_dir: Path, batch: TrainBatch) -> None:
    worker = new_worker(model_dir)
    asyncio.run(worker.close())
    with pytest.raises(RuntimeError, match="shutdown"):
        asyncio.run(worker.train(batch))
