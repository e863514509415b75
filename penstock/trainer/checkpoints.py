"""Checkpoints: what a killed run continues from. Each is there completely, or not at all.

    <directory>/latest                        the name of the newest, for people and scripts
    <directory>/step-000010/manifest.json     every other file with its size and checksum
                            state.json        train step, ledger position, random numbers, summary, the model's files
                            config.json       the configuration that made it
                            model.safetensors, optimizer.safetensors, ...

A checkpoint is a draft first, a directory under a hidden name into which those who hold the state write their files. It
is flushed, renamed, read back from the disk and compared; only then is `latest` moved and are older ones removed.
Stopped between any two operations, the previous or the new one is whole.

    .unfinished-step-N   being written                       .removing-step-N   being removed
    .replaced-step-N     an earlier one of the same step     .abandoned-step-N  newer than the one a run went back to

What is hidden goes with the next save. Not for two saves or two processes at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.errors import CheckpointError, StorageError
from penstock.learn.save import holds_tensors
from penstock.learn.thread import OwnThread
from penstock.trainer.files import Files
from penstock.trainer.manifest import MANIFEST, Manifest, damage, looks_whole, read_manifest
from penstock.unbuffered import FileSum

if TYPE_CHECKING:
    from torch import Tensor

STATE, CONFIG, LATEST = "state.json", "config.json", "latest"
SAFETENSORS = ".safetensors"
UNFINISHED, REMOVING, REPLACED, ABANDONED = ".unfinished-", ".removing-", ".replaced-", ".abandoned-"

_STEP = re.compile(r"step-(\d{6,})")
_PLAIN = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")

Fill = Callable[[Path], Awaitable[Mapping[str, FileSum] | None]]
"""Writes files into a draft, and may tell the sums of what it meant to write: what it does not tell is read."""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint whose every byte was verified when it was opened."""

    path: Path
    step: int
    state: dict[str, Any]
    config: dict[str, Any]
    config_hash: str
    tensor_names: tuple[str, ...]
    skipped: list[str] = []
    """What is wrong with the newer ones that were passed over. Show it."""

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Load one entry. The tensors are private copies of the file's pages: changing them leaves the file alone."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        if name not in self.tensor_names:
            raise CheckpointError(f"{self.path} has no {name!r}; it has {list(self.tensor_names)}")
        path = self.path / f"{name}{SAFETENSORS}"
        try:
            loaded: dict[str, Tensor] = load_file(path)
            return loaded
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be loaded: {error}") from error


class CheckpointStore:
    def __init__(self, directory: Path, *, keep: int = 2, files: Files | None = None) -> None:
        if keep < 2:
            raise ValueError(f"keep is {keep}; at least 2 must stay, so that one may be damaged")
        self.directory = directory
        self._keep = keep
        self._files = files or Files()
        self._thread = OwnThread("penstock-checkpoint", beside=True)

    # Reading.

    def newest(self) -> Checkpoint:
        """The newest that is whole; `skipped` tells of newer ones that are not. Raises CheckpointError when none is."""
        candidates = self._candidates()
        skipped = self._missing_latest(candidates)
        for path in candidates:
            try:
                checkpoint = self.open(path)
            except CheckpointError as error:
                skipped.extend(error.problems)
            else:
                return msgspec.structs.replace(checkpoint, skipped=skipped)
        verdict = "none is whole" if candidates else "there is no checkpoint"
        raise CheckpointError([f"{self.directory}: {verdict}; there is nothing to resume from", *skipped])

    def open(self, path: Path) -> Checkpoint:
        """The checkpoint in this directory, every byte verified. Raises CheckpointError with all that is wrong."""
        manifest = read_manifest(path, self._files)
        named = _STEP.search(path.name)
        if named and int(named[1]) != manifest.step:
            raise CheckpointError(f"{path}: it holds step {manifest.step}, not the step of its name")
        problems = damage(path, manifest, self._files)
        if problems:
            raise CheckpointError(problems)
        try:
            state, config = (json.loads(self._files.read(path / name)) for name in (STATE, CONFIG))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        return Checkpoint(
            path=path,
            step=manifest.step,
            state=state,
            config=config,
            config_hash=manifest.config_hash,
            tensor_names=tuple(n.removesuffix(SAFETENSORS) for n in manifest.files if n.endswith(SAFETENSORS)),
        )

    def steps(self) -> list[int]:
        """Of the retained ones, in order. Their content is not read."""
        return sorted({_step_of(path) for path in self._candidates()})

    def retained(self) -> list[Path]:
        """Those that can be named, newest first. Their content is not read."""
        return [path for path in self._candidates() if not path.name.startswith(".")]

    # Writing.

    async def save(
        self,
        step: int,
        *,
        fill: Fill | None = None,
        tensors: Mapping[str, Mapping[str, Tensor]] | None = None,
        state: Mapping[str, Any],
        config: Mapping[str, Any],
    ) -> Path:
        """Write a checkpoint; it is on the disk, read back and compared, when this returns.

        `fill` writes what others hold (a train worker's `save`) as plain files into the draft it is given; `tensors`
        are what the caller holds itself, and must not change meanwhile: that is noticed and refused. `state` must be
        what JSON can hold, with strings as keys. Checkpoints of later steps are abandoned, see `abandon_after`.

        Raises StorageError when the disk fails, and what `fill` raises; the checkpoints that were there are untouched.
        Cancelled, it ends after the operation that runs; the next save removes the draft.
        """
        entries = {f"{name}{SAFETENSORS}": dict(entry) for name, entry in (tensors or {}).items()}
        if step < 0 or any(not _PLAIN.fullmatch(name) for name in entries):
            raise ValueError(f"step {step}, tensors {list(entries)}: a step from 0, and plain names")
        texts = {STATE: _json(state), CONFIG: _json(config, default=repr, indent=2)}
        final = self.directory / _name(step)
        draft = self.directory / f"{UNFINISHED}{final.name}"
        with self._storage_errors(f"checkpoint {final} could not be written", undo=lambda: self._undo(final)):
            await self._thread.run(lambda: self._begin(draft, step))
            known = (await fill(draft) or {}) if fill is not None else {}
            await self._thread.run(lambda: self._seal(draft, step, entries, texts, known, config_hash(config)))
            await self._thread.run(lambda: self._install(draft, final))
        return final

    def abandon_after(self, step: int) -> list[Path]:
        """Set aside the checkpoints after `step`, when a run goes back to it; the next save removes them.

        Otherwise a run that is killed before its next checkpoint would resume from weights it has left behind. To be
        done before the ledger is taken back: killed on the way, a later one may still be the newest.
        Returns where they are now. Raises StorageError.
        """
        with self._storage_errors(f"checkpoints after step {step} in {self.directory} could not be set aside"):
            return self._abandon_after(step)

    # The parts of a save, in order.

    def _begin(self, draft: Path, step: int) -> None:
        self._make_directory()
        self._tidy()
        self._abandon_after(step)
        self._files.mkdir(draft)

    def _make_directory(self) -> None:
        missing = [p for p in (self.directory, *self.directory.parents) if not p.exists()]
        for path in reversed(missing):
            self._files.mkdir(path)
            self._files.flush(path.parent)

    def _tidy(self) -> None:
        """Remove what a crash left, except what may be the only whole one."""
        for path in self._hidden(UNFINISHED, REMOVING):
            self._remove(path)
        for path in self._hidden(REPLACED):
            final = self.directory / path.name.removeprefix(REPLACED)
            if not final.exists():
                self._files.rename(path, final)
                self._files.flush(self.directory)

    def _abandon_after(self, step: int) -> list[Path]:
        later = [path for path in self._candidates() if _step_of(path) > step]
        if not later:
            return []
        # The pointer first: it never names what is not there.
        rest = [path for path in self.retained() if path not in later]
        if rest:
            self._point_to(rest[0])
        else:
            self._remove_file(self.directory / LATEST)
        # From the newest down: killed on the way, what is left is a past without gaps.
        abandoned = []
        for path in later:
            aside = self.directory / f"{ABANDONED}{_name(_step_of(path))}"
            if aside.exists():
                self._remove(aside)
            self._files.rename(path, aside)
            abandoned.append(aside)
        self._files.flush(self.directory)
        return list(dict.fromkeys(abandoned))

    def _seal(
        self,
        draft: Path,
        step: int,
        tensors: dict[str, dict[str, Tensor]],
        texts: dict[str, bytes],
        known: Mapping[str, FileSum],
        config_hash: str,
    ) -> None:
        """Add what is given to the files that are there, flush all of them, and name them in the manifest."""
        sums = dict(known)
        for name, entry in tensors.items():
            sums[name] = self._files.write_tensors(draft / name, entry)
        for name, content in texts.items():
            self._files.write(draft / name, content)
        paths = sorted(draft.iterdir())
        wrong = [path.name for path in paths if not path.is_file() or not _PLAIN.fullmatch(path.name)]
        if wrong:
            raise ValueError(f"{draft.name} holds {wrong}; a checkpoint is plain files in one directory")
        if gone := sorted(sums.keys() - {path.name for path in paths}):
            raise OSError(f"{', '.join(gone)} of it was written and is not there")
        for path in paths:
            self._files.flush(path)
        for name, entry in tensors.items():
            if not holds_tensors(draft / name, entry):
                raise OSError(f"{name} is not what was given; something changed it while it was written")
        by_name = {path.name: sums.get(path.name) or self._files.checksum(path) for path in paths}
        self._files.write(draft / MANIFEST, Manifest(step=step, config_hash=config_hash, files=by_name).encode())
        self._files.flush(draft / MANIFEST)
        self._files.flush(draft)

    def _install(self, draft: Path, final: Path) -> None:
        self._put_in_place(draft, final)
        self._read_back(final)
        self._point_to(final)
        self._prune()

    def _put_in_place(self, draft: Path, final: Path) -> None:
        if final.exists():
            replaced = self.directory / f"{REPLACED}{final.name}"
            if replaced.exists():
                self._remove(replaced)
            self._files.rename(final, replaced)
        self._files.rename(draft, final)
        self._files.flush(self.directory)

    def _read_back(self, final: Path) -> None:
        try:
            problems = damage(final, read_manifest(final, self._files), self._files, from_disk=True)
        except CheckpointError as error:
            problems = error.problems
        if problems:
            self._files.rename(final, self.directory / f"{REMOVING}{final.name}")
            raise OSError("it was read back differently: " + "; ".join(problems))

    def _point_to(self, final: Path) -> None:
        unfinished = self.directory / f"{UNFINISHED}{LATEST}"
        self._files.write(unfinished, final.name.encode() + b"\n")
        self._files.flush(unfinished)
        self._files.rename(unfinished, self.directory / LATEST)
        self._files.flush(self.directory)

    def _prune(self) -> None:
        """Keep the newest `keep` that look whole; what is older than those goes, and what is hidden."""
        retained = self.retained()
        whole = [path for path in retained if looks_whole(path, self._files)][: self._keep]
        for path in retained:
            if len(whole) == self._keep and _step_of(path) < _step_of(whole[-1]):
                # Under a hidden name first: one that is half removed must not look like a damaged one.
                removing = self.directory / f"{REMOVING}{path.name}"
                self._files.rename(path, removing)
                self._files.flush(self.directory)
                self._remove(removing)
        for path in self._hidden(REPLACED, ABANDONED):
            self._remove(path)

    # What these use.

    @contextlib.contextmanager
    def _storage_errors(self, what: str, undo: Callable[[], None] = lambda: None) -> Iterator[None]:
        try:
            yield
        except (OSError, CheckpointError, StorageError) as error:
            with contextlib.suppress(OSError):
                undo()
            raise StorageError(
                f"{what}: {error}. Earlier checkpoints are untouched: resume when it is mended"
            ) from error
        except Exception:
            with contextlib.suppress(OSError):
                undo()
            raise

    def _undo(self, final: Path) -> None:
        if final.exists():
            # It is in place and whole; what failed came after.
            for path in self._hidden(UNFINISHED):
                self._remove(path)
            return
        self._tidy()

    def _remove(self, path: Path) -> None:
        if not path.is_dir():
            self._remove_file(path)
            return
        for child in sorted(path.iterdir()):
            self._remove(child)
        self._files.rmdir(path)

    def _remove_file(self, path: Path) -> None:
        if path.exists():
            self._files.remove(path)

    def _candidates(self) -> list[Path]:
        """Newest first. One that is being replaced counts after the one that replaces it."""
        try:
            found = [
                p for p in self.directory.iterdir() if _STEP.fullmatch(p.name.removeprefix(REPLACED)) and p.is_dir()
            ]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{self.directory} cannot be read: {error}") from error
        return sorted(found, key=lambda path: (_step_of(path), not path.name.startswith(".")), reverse=True)

    def _hidden(self, *prefixes: str) -> list[Path]:
        return sorted(path for path in self.directory.iterdir() if path.name.startswith(prefixes))

    def _missing_latest(self, candidates: list[Path]) -> list[str]:
        try:
            name = self._files.read(self.directory / LATEST).decode(errors="replace").strip()
        except OSError:
            # A run stopped before its first save returned has none.
            return []
        if not _STEP.fullmatch(name):
            return [f"{self.directory / LATEST} is damaged: it says {name[:40]!r}"]
        there = any(name == path.name.removeprefix(REPLACED) for path in candidates)
        return [] if there else [f"{self.directory / name} is missing; {LATEST} names it"]


def config_hash(config: Mapping[str, Any]) -> str:
    """Equal for equal configurations, whatever the order of their keys."""
    return hashlib.sha256(_json(config, default=repr, sort_keys=True)).hexdigest()


def _json(value: Mapping[str, Any], **options: Any) -> bytes:
    # Not msgspec: whole numbers beyond 64 bits and NaN must come back as they were.
    return json.dumps(value, **{"default": msgspec.to_builtins, **options}).encode() + b"\n"


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _step_of(path: Path) -> int:
    found = _STEP.search(path.name)
    assert found is not None, path
    return int(found[1])
