"""What is damaged is refused and named, and the one before is used."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import CheckpointError, StorageError
from penstock.trainer.files import Files
from penstock.unbuffered import FileSum

from .stores import Store, UnflushedFiles, config_of, holds, save, state_of, tensors_of


def test_without_a_checkpoint_nothing_is_resumed(store: Store) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        store.newest()
    store.directory.mkdir()
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        store.newest()


def test_a_damaged_newest_falls_back_to_the_one_before_and_says_so(store: Store) -> None:
    save(store, 5)
    path = save(store, 10)
    (path / "optimizer.safetensors").unlink()
    found = store.newest()
    assert holds(found, 5)
    assert len(found.skipped) == 1
    assert "step-000010: optimizer.safetensors cannot be read" in found.skipped[0]
    with pytest.raises(CheckpointError, match="optimizer"):
        store.open(path)


@pytest.mark.parametrize(
    ("then", "said"), [("changed", "read back differently"), ("gone", "model.safetensors of it was written and is not")]
)
def test_what_somebody_wrote_into_a_checkpoint_must_be_on_the_disk_as_it_was_given(
    store: Store, then: str, said: str
) -> None:
    """What is summed is what was in memory, not what the disk made of it."""
    save(store, 5)

    async def fill(draft: Path) -> dict[str, FileSum]:
        path = draft / "model.safetensors"
        written = store.files.write_tensors(path, tensors_of(10)["model"])
        if then == "gone":
            path.unlink()
        else:
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
        return {path.name: written}

    with pytest.raises(StorageError, match=said):
        asyncio.run(store.save(10, fill=fill, state=state_of(10), config=config_of(10)))
    assert holds(store.newest(), 5)


def test_when_all_are_damaged_each_is_named_and_none_is_used(store: Store) -> None:
    for step in (0, 5):
        (save(store, step) / "state.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="none is whole") as caught:
        store.newest()
    assert [problem.split(":")[0] for problem in caught.value.problems[1:]] == [
        str(store.directory / "step-000005"),
        str(store.directory / "step-000000"),
    ]


def test_a_checkpoint_that_disappeared_is_told_of(store: Store) -> None:
    save(store, 5)
    shutil.rmtree(save(store, 10))
    found = store.newest()
    assert holds(found, 5)
    assert "step-000010 is missing" in found.skipped[0]


def test_a_newer_format_is_refused_by_its_number(store: Store) -> None:
    path = save(store, 5)
    manifest = json.loads((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 2, "more": True}))
    with pytest.raises(CheckpointError, match="format 2 is of a newer Penstock"):
        store.open(path)


def test_a_copy_under_another_name_opens_but_not_under_the_name_of_another_step(store: Store) -> None:
    path = save(store, 5)
    shutil.copytree(path, store.directory / "best")
    assert holds(store.open(store.directory / "best"), 5)
    shutil.copytree(path, store.directory / "step-000009")
    with pytest.raises(CheckpointError, match="it holds step 5"):
        store.open(store.directory / "step-000009")
    with pytest.raises(CheckpointError, match="cannot be read"):
        store.open(store.directory / "nowhere")


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def flip_a_bit(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def append(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + bytes([rng.randrange(256)]))


def take_away(path: Path, rng: random.Random) -> None:
    path.unlink()


def zero_a_block(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content))
    content[start : start + 16] = bytes(len(content[start : start + 16]))
    path.write_bytes(content)


def swap_with_a_neighbour(path: Path, rng: random.Random) -> None:
    other = rng.choice([p for p in sorted(path.parent.iterdir()) if p != path])
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def take_from_the_other_checkpoint(path: Path, rng: random.Random) -> None:
    other = next(p for p in sorted(path.parents[1].glob("step-*")) if p != path.parent)
    path.write_bytes((other / path.name).read_bytes())


def take_all_from_the_other_checkpoint(path: Path, rng: random.Random) -> None:
    other = next(p for p in sorted(path.parents[1].glob("step-*")) if p != path.parent)
    shutil.copytree(other, path.parent, dirs_exist_ok=True)


def other_config(path: Path, rng: random.Random) -> None:
    (path.parent / "config.json").write_text(json.dumps(config_of(rng.randrange(100, 200))))


def spoil_latest(path: Path, rng: random.Random) -> None:
    flip_a_bit(path.parents[1] / "latest", rng)


MUTATIONS: list[Callable[[Path, random.Random], None]] = [
    flip_a_bit, truncate, append, take_away, zero_a_block, swap_with_a_neighbour, take_from_the_other_checkpoint,
    take_all_from_the_other_checkpoint, other_config, spoil_latest,
]  # fmt: skip


def test_no_damage_of_two_hundred_is_ever_returned_as_a_checkpoint(tmp_path: Path) -> None:
    pristine = Store(tmp_path / "pristine", files=UnflushedFiles())
    for step in (5, 10):
        save(pristine, step)
    before = contents(pristine.directory)
    outcomes = {"new": 0, "old": 0, "none": 0}
    for seed in range(200):
        rng = random.Random(seed)
        store = Store(tmp_path / f"{seed}")
        shutil.copytree(pristine.directory, store.directory)
        for _ in range(rng.choice((1, 1, 1, 3))):
            files = sorted(path for path in store.directory.rglob("step-*/*") if path.is_file())
            MUTATIONS[(seed + rng.randrange(2)) % len(MUTATIONS)](rng.choice(files), rng)
        after = contents(store.directory)
        intact = [
            step
            for step in (10, 5)
            if all(after.get(name) == content for name, content in before.items() if name.startswith(f"step-{step:06}"))
        ]
        if intact:
            found = store.newest()
            assert found.step == intact[0], seed
            assert holds(found, found.step), seed
            assert found.skipped or found.step == 10, seed
            outcomes["new" if found.step == 10 else "old"] += 1
        else:
            with pytest.raises(CheckpointError, match="none is whole"):
                store.newest()
            outcomes["none"] += 1
        shutil.rmtree(store.directory)
    assert min(outcomes.values()) >= 10, outcomes


class FlippedManifest(Files):
    def __init__(self, bit: int) -> None:
        self._bit = bit

    def read(self, path: Path) -> bytes:
        content = bytearray(super().read(path))
        if path.name == "manifest.json":
            content[self._bit // 8] ^= 1 << self._bit % 8
        return bytes(content)


def test_every_single_bit_of_a_manifest_matters(store: Store) -> None:
    path = asyncio.run(store.save(3, tensors={}, state={}, config={}))
    shutil.copytree(path, store.directory / "best")
    for bit in range(8 * (path / "manifest.json").stat().st_size):
        with pytest.raises(CheckpointError, match=r"manifest\.json is damaged|format"):
            Store(store.directory, files=FlippedManifest(bit)).open(store.directory / "best")
