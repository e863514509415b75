"""A kill, a power cut or a failing disk at any operation of a save costs no checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock.errors import CheckpointError, StorageError
from penstock.events import Nobody
from penstock.learn.snapshot import copied
from penstock.trainer.files import Files, FileSum
from penstock.trainer.writer import CheckpointWriter

from .stores import Store, UnflushedFiles, holds, names, save, saving, tensors_of

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
