"""Tensors to files; model directories that are whole or not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.errors import StorageError
from penstock.unbuffered import FileSum, write_unbuffered

if TYPE_CHECKING:
    from torch import Tensor

TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*", "*.model",
)  # fmt: skip


_DTYPES = {
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64",
}  # fmt: skip
"""What safetensors calls them."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileSum:
    """A safetensors file. It is not flushed; its sum is of what is in memory.

    Raises OSError when the disk fails, RuntimeError when two of the tensors begin at the same memory or one is of a
    kind that such a file cannot hold.
    """
    import torch

    flat = {name: tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for name, tensor in tensors.items()}
    places: dict[int, str] = {}
    for name, content in flat.items():
        if len(content) and (other := places.setdefault(content.data_ptr(), name)) != name:
            raise RuntimeError(f"{path.name}: {other} and {name} share memory; give one of them")
    # Wide numbers first, so that each lies where a processor wants it.
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    described: dict[str, Any] = {}
    end = 0
    for name in order:
        start, end = end, end + len(flat[name])
        dtype = str(tensors[name].dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise RuntimeError(f"{path.name}: {name} is {dtype}, which safetensors has no name for")
        described[name] = {"dtype": _DTYPES[dtype], "shape": list(tensors[name].shape), "data_offsets": [start, end]}
    header = msgspec.json.encode(described)
    header += b" " * (-len(header) % 8)
    begin = memoryview(len(header).to_bytes(8, "little") + header)
    return write_unbuffered(path, [begin, *(flat[name].numpy().data for name in order)])


def holds_tensors(path: Path, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the file holds these tensors, bit for bit."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    # As integers: NaN is equal to itself.
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    try:
        saved = load_file(path)
    except SafetensorError:
        return False
    return saved.keys() == tensors.keys() and all(
        saved[name].dtype == tensor.dtype
        and saved[name].shape == tensor.shape
        and torch.equal(
            saved[name].view(bits[tensor.itemsize]), tensor.detach().cpu().contiguous().view(bits[tensor.itemsize])
        )
        for name, tensor in tensors.items()
    )


def save_hf(
    model: Any,
    tokenizer_dir: Path,
    directory: Path,
    weights: Mapping[str, Tensor] | None = None,
    *,
    beside: Callable[[Path], None] | None = None,
) -> None:
    """The model's weights and configuration with the tokenizer of `tokenizer_dir`; replaces a directory of that name.

    `weights` stand in for the model's own where those are not all here. `beside` writes more into the directory.

    Everything is written and flushed under another name first. Raises StorageError, the old directory still there;
    a crash between the two renames leaves both complete under their hidden names, and the next call puts the old one
    back before it begins.
    """
    from safetensors import SafetensorError

    directory = directory.absolute()
    unfinished = directory.with_name(f".{directory.name}.unfinished")
    replaced = directory.with_name(f".{directory.name}.replaced")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        if replaced.exists() and not directory.exists():
            # A crash between the two renames: the old one is complete, and the only one until the new one is.
            replaced.rename(directory)
        for left_over in (unfinished, replaced):
            shutil.rmtree(left_over, ignore_errors=True)
        unfinished.mkdir()
        mode = _mode_of_new_files(unfinished)
        model.save_pretrained(unfinished, **({} if weights is None else {"state_dict": dict(weights)}))
        if beside is not None:
            beside(unfinished)
        for pattern in TOKENIZER_FILES:
            for file in sorted(tokenizer_dir.glob(pattern)):
                if file.is_file():
                    shutil.copyfile(file, unfinished / file.name)
        for path in unfinished.rglob("*"):
            if path.is_file():
                path.chmod(mode)
            _flush(path)
        _flush(unfinished)
        _swap(unfinished, directory, replaced)
        _flush(directory.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{directory} could not be written: {error}") from error


def _mode_of_new_files(directory: Path) -> int:
    """As the umask has it, which can only be read by setting it, for every thread at once."""
    probe = directory / "probe"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    return mode


def _swap(new: Path, name: Path, old: Path) -> None:
    if name.exists():
        name.rename(old)
    try:
        new.rename(name)
    except OSError:
        if old.exists():
            old.rename(name)
        raise


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
