"""`manifest.json`: what a checkpoint consists of, so that damage is found before anything is used.

It names every other file with its size and checksum, and ends with a checksum of itself.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from penstock.errors import CheckpointError
from penstock.trainer.files import Files
from penstock.unbuffered import FileSum

FORMAT = 1
MANIFEST = "manifest.json"

HASH_THREADS = 4


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int = FORMAT
    step: int
    config_hash: str
    files: dict[str, FileSum]
    checksum: str = ""
    """Of this manifest, written with an empty one."""

    def encode(self) -> bytes:
        digest = hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(self, checksum=""))).hexdigest()
        sealed = msgspec.json.encode(msgspec.structs.replace(self, checksum=digest))
        return msgspec.json.format(sealed, indent=2) + b"\n"


def read_manifest(path: Path, files: Files) -> Manifest:
    """Of the checkpoint in directory `path`. Raises CheckpointError when it is missing or not as it was written."""
    try:
        content = files.read(path / MANIFEST)
    except OSError as error:
        raise CheckpointError(f"{path}: {MANIFEST} cannot be read, so it is not complete: {error}") from error
    try:
        # The format first: a newer one may have other fields.
        version = msgspec.json.decode(content, type=_Format).format
        if version > FORMAT:
            raise CheckpointError(f"{path}: format {version} is of a newer Penstock; this one reads {FORMAT}")
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: {MANIFEST} is damaged: {error}") from error
    if manifest.encode() != content:
        raise CheckpointError(f"{path}: {MANIFEST} is damaged: it does not match its own checksum")
    return manifest


def damage(path: Path, manifest: Manifest, files: Files, *, from_disk: bool = False) -> list[str]:
    """What is wrong with the files of the checkpoint in `path`; every byte is read, `from_disk` as in `checksum`."""

    def look(name: str) -> str | None:
        expected = manifest.files[name]
        try:
            actual = files.checksum(path / name, from_disk=from_disk)
        except OSError as error:
            return f"{path}: {name} cannot be read: {error}"
        if actual.size != expected.size:
            return f"{path}: {name} has {actual.size} bytes, {expected.size} were written"
        return None if actual == expected else f"{path}: {name} is damaged: it does not match its checksum"

    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return [problem for problem in pool.map(look, manifest.files) if problem is not None]


def looks_whole(path: Path, files: Files) -> bool:
    """Whether all files are there with their sizes; their content is not read."""
    try:
        manifest = read_manifest(path, files)
        return all((path / name).stat().st_size == expected.size for name, expected in manifest.files.items())
    except (CheckpointError, OSError):
        return False


class _Format(msgspec.Struct):
    format: int
