"""What is saved comes back bit for bit, and the newest are kept."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from penstock.errors import CheckpointError, StorageError
from penstock.trainer.checkpoints import config_hash

from .stores import Store, config_of, holds, names, save

# What is saved comes back.


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs" / "one" / "checkpoints")
    path = save(store, 10)
    assert path == tmp_path / "runs" / "one" / "checkpoints" / "step-000010"
    found = store.newest()
    assert holds(found, 10)
    assert (found.path, found.skipped, found.config_hash) == (path, [], config_hash(config_of(10)))
    assert holds(store.open(path), 10)
    assert (path.parent / "latest").read_text() == "step-000010\n"


def test_checkpoint_zero_holds_no_tensors_and_is_the_newest_of_a_run_that_has_no_other(store: Store) -> None:
    asyncio.run(store.save(0, tensors={}, state={"model": "m", "weights": {"model.safetensors": "ab"}}, config={}))
    found = store.newest()
    assert (found.step, found.tensor_names) == (0, ())
    assert found.state["weights"] == {"model.safetensors": "ab"}
    with pytest.raises(CheckpointError, match="has no 'model'"):
        found.tensors("model")


def test_numbers_that_json_libraries_lose_come_back_as_they_were(store: Store) -> None:
    state = {"large": 2**127 + 1, "nan": float("nan"), "inf": float("-inf"), "small": 5e-324, "third": 1 / 3}
    asyncio.run(store.save(1, tensors={}, state=state, config={}))
    assert repr(store.newest().state) == repr(state)


def test_a_state_that_is_not_plain_is_refused_before_anything_is_written(store: Store) -> None:
    with pytest.raises(TypeError):
        asyncio.run(store.save(1, tensors={}, state={"object": object()}, config={}))
    with pytest.raises(ValueError, match="plain names"):
        asyncio.run(store.save(1, tensors={"../model": {}}, state={}, config={}))
    assert not store.directory.exists()


def test_strided_tensors_are_saved_and_changing_loaded_ones_leaves_the_file_alone(store: Store) -> None:
    strided = torch.arange(12.0).reshape(3, 4).t()
    asyncio.run(store.save(1, tensors={"model": {"w": strided}}, state={}, config={}))
    loaded = store.newest().tensors("model")["w"]
    assert torch.equal(loaded, strided)
    loaded.zero_()
    assert torch.equal(store.newest().tensors("model")["w"], strided)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
def test_tensors_of_every_kind_come_back_nan_and_empty_ones_too(store: Store, dtype: torch.dtype) -> None:
    given = {"scalar": torch.tensor(1).to(dtype), "empty": torch.zeros(0, 4, dtype=dtype)}
    if dtype.is_floating_point:
        given["nan"] = torch.tensor([float("nan"), -0.0, float("inf")], dtype=dtype)
    asyncio.run(store.save(1, tensors={"t": given}, state={}, config={}))
    loaded = store.newest().tensors("t")
    assert {name: (t.dtype, t.shape, repr(t.tolist())) for name, t in loaded.items()} == {
        name: (t.dtype, t.shape, repr(t.tolist())) for name, t in given.items()
    }


def test_the_config_hash_ignores_the_order_of_keys_and_nothing_else() -> None:
    assert config_hash({"a": 1, "b": [1, 2]}) == config_hash({"b": [1, 2], "a": 1})
    assert config_hash({"a": 1, "b": [1, 2]}) != config_hash({"a": 1, "b": [2, 1]})


def test_checkpoints_may_be_read_as_any_other_file(store: Store) -> None:
    path = save(store, 5)
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1


# Which are kept.


def test_only_the_newest_are_kept_and_a_crash_leaves_nothing_behind_the_next_save(store: Store) -> None:
    for step in (0, 5, 10):
        save(store, step)
    (store.directory / ".unfinished-step-000012").mkdir()
    (store.directory / ".unfinished-step-000012" / "model.safetensors").write_bytes(b"half")
    (store.directory / ".removing-step-000000").mkdir()
    assert store.steps() == [5, 10]
    assert store.newest().step == 10
    save(store, 15)
    assert names(store.directory) == ["latest", "step-000010", "step-000015"]


def test_a_damaged_one_does_not_count_among_those_that_are_kept(store: Store) -> None:
    save(store, 5)
    damaged = save(store, 10)
    (damaged / "model.safetensors").write_bytes(b"")
    save(store, 15)
    assert store.steps() == [5, 10, 15]
    save(store, 20)
    assert store.steps() == [15, 20]


def test_fewer_than_two_are_never_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        Store(tmp_path, keep=1)


def test_a_run_that_goes_back_never_resumes_from_what_it_left_behind(store: Store) -> None:
    for step in (5, 10):
        save(store, step)
    moved = store.abandon_after(5)
    assert [path.name for path in moved] == [".abandoned-step-000010"]
    assert (store.newest().step, store.newest().skipped) == (5, [])
    assert holds(store.open(moved[0]), 10)
    save(store, 7)
    assert names(store.directory) == ["latest", "step-000005", "step-000007"]


def test_saving_an_earlier_step_abandons_the_later_ones(store: Store) -> None:
    for step in (5, 10):
        save(store, step)
    save(store, 7)
    assert (store.newest().step, store.steps()) == (7, [5, 7])


def test_a_step_can_be_saved_again(store: Store) -> None:
    save(store, 5)
    save(store, 5, version=1)
    assert holds(store.newest(), 5, version=1)
    assert names(store.directory) == ["latest", "step-000005"]


# Drafts that others write into.


def test_a_draft_that_could_not_be_filled_leaves_nothing(store: Store) -> None:
    save(store, 5)

    async def fail(draft: Path) -> None:
        (draft / "model.safetensors").write_bytes(b"half")
        raise KeyError("a rank is gone")

    async def full_disk(draft: Path) -> None:
        raise StorageError("model.safetensors could not be written: No space left on device")

    with pytest.raises(KeyError, match="a rank is gone"):
        asyncio.run(store.save(6, fill=fail, state={}, config={}))
    with pytest.raises(StorageError, match=r"step-000006 could not be written: .*No space left.*untouched"):
        asyncio.run(store.save(6, fill=full_disk, state={}, config={}))
    assert names(store.directory) == ["latest", "step-000005"]


def test_a_save_that_is_cancelled_while_it_is_filled_costs_no_checkpoint(store: Store) -> None:
    save(store, 5)

    async def cancel() -> None:
        filling = asyncio.Event()

        async def fill(draft: Path) -> None:
            (draft / "model.safetensors").write_bytes(b"half")
            filling.set()
            await asyncio.Event().wait()

        saving = asyncio.create_task(store.save(6, fill=fill, state={}, config={}))
        await filling.wait()
        saving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saving

    asyncio.run(cancel())
    assert holds(store.newest(), 5)
    save(store, 7)
    assert names(store.directory) == ["latest", "step-000005", "step-000007"]


def test_every_file_of_a_draft_is_in_the_manifest_and_directories_are_refused(store: Store) -> None:
    async def fill(draft: Path) -> None:
        (draft / "rank_0.safetensors").write_bytes(b"whatever")
        (draft / "notes.txt").write_bytes(b"also")

    path = asyncio.run(store.save(1, fill=fill, state={}, config={}))
    (path / "notes.txt").write_bytes(b"else")
    with pytest.raises(CheckpointError, match=r"notes\.txt is damaged"):
        store.open(path)

    async def nest(draft: Path) -> None:
        (draft / "shards").mkdir()

    with pytest.raises(ValueError, match="plain files in one directory"):
        asyncio.run(store.save(2, fill=nest, state={}, config={}))
    assert names(store.directory) == ["latest", "step-000001"]
