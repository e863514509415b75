from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import CheckpointError, StorageError
from penstock.events import Nobody
from penstock.learn.snapshot import copied
from penstock.trainer.checkpoints import Checkpoint, CheckpointStore, config_hash
from penstock.trainer.files import Files, FileSum
from penstock.trainer.writer import CheckpointWriter


def tensors_of(step: int, version: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1000 * step + version)
    weights = {"w": torch.randn(16, 3, generator=generator), "b": torch.randn(3, generator=generator).bfloat16()}
    moments = {"exp_avg.w": torch.randn(16, 3, generator=generator), "steps_done": torch.tensor(step)}
    return {"model": weights, "optimizer": moments, "rng": {"cpu": torch.arange(40, dtype=torch.uint8) + step}}


def state_of(step: int, version: int = 0) -> dict[str, Any]:
    return {"step": step, "version": version, "ledger": 2**70 + step, "summary": {"accuracy": 0.1 * step, "x": None}}


def config_of(step: int) -> dict[str, Any]:
    return {"class": "T", "seed": step, "train": {"lr": 1e-6}}


class Store(CheckpointStore):
    """Remembers its files, so that what is written into a draft goes the same way as the rest."""

    def __init__(self, directory: Path, *, keep: int = 2, files: Files | None = None) -> None:
        self.files = files or Files()
        super().__init__(directory, keep=keep, files=self.files)


def save(store: Store, step: int, version: int = 0) -> Path:
    return asyncio.run(saving(store, step, version, tensors_of(step, version)))


def saving(
    store: Store, step: int, version: int, given: dict[str, dict[str, torch.Tensor]]
) -> Coroutine[Any, Any, Path]:
    """Random numbers as the caller's own tensors, the others as files of somebody who fills the draft."""

    async def fill(draft: Path) -> None:
        for name in ("model", "optimizer"):
            store.files.write_tensors(draft / f"{name}.safetensors", given[name])

    rng = {"rng": given["rng"]}
    return store.save(step, fill=fill, tensors=rng, state=state_of(step, version), config=config_of(step))


def holds(checkpoint: Checkpoint, step: int, version: int = 0) -> bool:
    """Whether it is exactly what `save` was given, bit for bit."""
    given = tensors_of(step, version)
    loaded = {name: checkpoint.tensors(name) for name in checkpoint.tensor_names}
    return (
        (checkpoint.step, checkpoint.state, checkpoint.config) == (step, state_of(step, version), config_of(step))
        and loaded.keys() == given.keys()
        and all(loaded[name].keys() == given[name].keys() for name in given)
        and all(
            torch.equal(loaded[n][k], t) and loaded[n][k].dtype == t.dtype for n in given for k, t in given[n].items()
        )
    )


class UnflushedFiles(Files):
    """Without the waiting: these tests do not cut the power."""

    def flush(self, path: Path) -> None:
        assert path.exists()


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    # In memory where there is such a place: thousands of small files are rewritten here.
    memory = Path("/dev/shm")
    where = memory if os.access(memory, os.W_OK) else tmp_path_factory.mktemp("checkpoints")
    with tempfile.TemporaryDirectory(dir=where) as directory:
        yield Path(directory)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return Store(tmp_path / "checkpoints", files=UnflushedFiles())


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


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


# What is damaged is refused.


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


# Killed, or without power, between any two operations.


class Killed(BaseException):
    pass


class MortalFiles(Files):
    """The process dies before the operation `k`; from then on it does nothing any more.

    With `power_loss`, what was not flushed is lost: the second half of a file's content, and the names and renames in a
    directory. Files and directories are held open, so that they are found under whatever name they have by then.
    """

    def __init__(self, k: int, *, power_loss: bool) -> None:
        self.count = 0
        self._k = k
        self._power_loss = power_loss
        self._undo: list[tuple[int, Callable[[], None]]] = []
        self._descriptors: list[int] = []

    def _operation(self) -> None:
        if self.count == self._k:
            raise Killed
        self.count += 1

    def lose_power(self) -> None:
        for _, undo in reversed(self._undo if self._power_loss else []):
            undo()
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _open(self, path: Path) -> int:
        descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
        self._descriptors.append(descriptor)
        return descriptor

    def _when_lost(self, path: Path, undo: Callable[[], None]) -> None:
        self._undo.append((path.stat().st_ino, undo))

    def _created(self, path: Path) -> None:
        parent, name = self._open(path.parent), path.name
        remove = shutil.rmtree if path.is_dir() else os.unlink
        self._when_lost(path.parent, lambda: remove(name, dir_fd=parent))

    def _written(self, path: Path) -> None:
        self._created(path)
        descriptor, size = self._open(path), path.stat().st_size
        self._when_lost(path, lambda: os.truncate(descriptor, size // 2))

    def mkdir(self, path: Path) -> None:
        self._operation()
        super().mkdir(path)
        self._created(path)

    def write(self, path: Path, content: bytes) -> None:
        self._operation()
        super().write(path, content)
        self._written(path)

    def write_tensors(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        self._operation()
        super().write_tensors(path, tensors)
        self._written(path)

    def flush(self, path: Path) -> None:
        self._operation()
        flushed = path.stat().st_ino
        self._undo = [(inode, undo) for inode, undo in self._undo if inode != flushed]

    def rename(self, path: Path, name: Path) -> None:
        self._operation()
        replaced = name.read_bytes() if name.is_file() else None
        super().rename(path, name)

        def undo() -> None:
            name.rename(path)
            if replaced is not None:
                name.write_bytes(replaced)

        self._when_lost(path.parent, undo)

    def remove(self, path: Path) -> None:
        self._operation()
        super().remove(path)

    def rmdir(self, path: Path) -> None:
        self._operation()
        super().rmdir(path)


def first_save(store: Store) -> None:
    save(store, 15)


def beside_training(store: Store) -> None:
    """The weights go on changing while the snapshot of step 15 is written."""
    live = tensors_of(15)
    trained = [tensor for entry in live.values() for tensor in entry.values()]

    async def main() -> None:
        async with CheckpointWriter(Nobody()) as writer:
            taken = {name: copied(entry.items()) for name, entry in live.items()}

            async def write() -> None:
                await saving(store, 15, 0, taken)

            writer.begin("checkpoint 15", write)
            while writer.is_busy:
                for tensor in trained:
                    tensor += 1
                await asyncio.sleep(0)

    asyncio.run(main())


def same_step_again(store: Store) -> None:
    save(store, 10, version=1)


def back_to_an_earlier_step(store: Store) -> None:
    store.abandon_after(5)
    save(store, 7)


@pytest.mark.parametrize("power_loss", [False, True])
@pytest.mark.parametrize(
    ("do", "allowed"),
    [
        (first_save, {(10, 0), (15, 0)}),
        (beside_training, {(10, 0), (15, 0)}),
        pytest.param(same_step_again, {(10, 0), (10, 1)}, marks=pytest.mark.long_tier),
        pytest.param(back_to_an_earlier_step, {(10, 0), (5, 0), (7, 0)}, marks=pytest.mark.long_tier),
    ],
    ids=["a save", "a save beside training", "the same step again", "going back"],
)
def test_killed_before_any_operation_the_previous_or_the_new_one_is_whole(
    tmp_path: Path, do: Callable[[Store], None], allowed: set[tuple[int, int]], power_loss: bool
) -> None:
    before = tmp_path / "before"
    for step in (5, 10):
        save(Store(before, files=UnflushedFiles()), step)
    seen = set()
    k = -1
    finished = False
    while not finished:
        k += 1
        directory = tmp_path / f"{k}"
        shutil.copytree(before, directory)
        files = MortalFiles(k, power_loss=power_loss)
        try:
            do(Store(directory, files=files))
            finished = True
        except Killed:
            pass
        files.lose_power()
        store = Store(directory, files=UnflushedFiles())
        found = store.newest()
        version = found.state["version"]
        assert (found.step, version) in allowed, k
        assert holds(found, found.step, version), k
        seen.add((found.step, version))
        assert found.skipped == [], k
        for path in directory.glob("step-*"):
            store.open(path)
        # And the run goes on from there.
        save(store, 20)
        assert holds(store.newest(), 20), k
        assert len(store.steps()) == 2, k
        assert not [name for name in names(directory) if name.startswith(".")], k
        shutil.rmtree(directory)
    assert seen == allowed
    assert k >= 20, "as many operations were tried as there are"


def test_killed_before_any_operation_of_its_first_save_a_run_has_that_one_or_none(tmp_path: Path) -> None:
    outcomes = set()
    for k in range(60):
        files = MortalFiles(k, power_loss=True)
        directory = tmp_path / f"{k}" / "run" / "checkpoints"
        with contextlib.suppress(Killed):
            save(Store(directory, files=files), 0)
        files.lose_power()
        try:
            assert holds(Store(directory).newest(), 0), k
            outcomes.add("whole")
        except CheckpointError:
            outcomes.add("none")
    assert outcomes == {"whole", "none"}


# A disk that fails.


class FailingFiles(MortalFiles):
    """Operation `k` fails as a full disk does; with `for_good`, so do all after it."""

    def __init__(self, k: int, *, for_good: bool) -> None:
        super().__init__(k, power_loss=False)
        self._for_good = for_good

    def _operation(self) -> None:
        self.count += 1
        if self.count == self._k + 1 or (self._for_good and self.count > self._k):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("for_good", [False, True])
@pytest.mark.parametrize(("step", "version"), [(15, 0), pytest.param(10, 1, marks=pytest.mark.long_tier)])
def test_a_disk_that_fails_at_any_write_costs_no_checkpoint(
    tmp_path: Path, step: int, version: int, for_good: bool
) -> None:
    before = tmp_path / "before"
    for earlier in (5, 10):
        save(Store(before, files=UnflushedFiles()), earlier)
    failures = 0
    while True:
        directory = tmp_path / f"{failures}"
        shutil.copytree(before, directory)
        files = FailingFiles(failures, for_good=for_good)
        store = Store(directory, files=files)
        try:
            save(store, step, version)
            break
        except StorageError as error:
            assert f"step-{step:06}" in str(error)
            assert "No space left" in str(error)
        files.lose_power()
        found = Store(directory).newest()
        assert (found.step, found.state["version"]) in {(10, 0), (step, version)}
        assert holds(found, found.step, found.state["version"])
        if not for_good:
            assert not list(directory.glob(".unfinished-*"))
        save(Store(directory, files=UnflushedFiles()), step, version)
        assert holds(Store(directory).newest(), step, version)
        failures += 1
    assert failures >= 20


class RottingFiles(UnflushedFiles):
    """What the disk gives back is not what it was given."""

    def checksum(self, path: Path, *, from_disk: bool = False) -> FileSum:
        found = super().checksum(path)
        return FileSum(found.size, "0" * 64) if from_disk and path.name == "model.safetensors" else found


class UnreadableFiles(UnflushedFiles):
    def checksum(self, path: Path, *, from_disk: bool = False) -> FileSum:
        if from_disk:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().checksum(path)


@pytest.mark.parametrize("files", [RottingFiles(), UnreadableFiles()])
@pytest.mark.parametrize("step", [5, 10])
def test_what_is_read_back_differently_never_counts(store: Store, files: Files, step: int) -> None:
    save(store, 0)
    save(store, 5)
    with pytest.raises(StorageError, match="read back differently"):
        save(Store(store.directory, files=files), step, version=1)
    assert holds(store.newest(), 5)
    assert names(store.directory) == ["latest", "step-000000", "step-000005"]


def test_tensors_that_change_while_they_are_written_are_not_a_checkpoint(store: Store) -> None:
    save(store, 5)
    weights = torch.zeros(8)

    class TrainsMeanwhile(UnflushedFiles):
        def write_tensors(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
            super().write_tensors(path, tensors)
            weights.add_(1)

    with pytest.raises(StorageError, match="something changed it while it was written"):
        asyncio.run(
            Store(store.directory, files=TrainsMeanwhile()).save(
                6, tensors={"model": {"w": weights}}, state={}, config={}
            )
        )
    assert names(store.directory) == ["latest", "step-000005"]


def test_tensors_that_share_memory_are_refused_and_leave_nothing(store: Store) -> None:
    shared = torch.zeros(8)
    with pytest.raises(RuntimeError, match="share memory"):
        asyncio.run(store.save(6, tensors={"model": {"a": shared, "b": shared}}, state={}, config={}))
    assert names(store.directory) == []


def test_a_directory_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(StorageError, match="step-000001 could not be written"):
        save(Store(tmp_path / "file" / "checkpoints"), 1)


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


def test_checkpoints_may_be_read_as_any_other_file(store: Store) -> None:
    path = save(store, 5)
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1
