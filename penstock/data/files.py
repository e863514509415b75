"""Dataset files, read as a stream: JSONL line by line, Parquet and Arrow batch by batch.

Every reader yields `(line, row, problems)`; a row that cannot be read is None. What editors and other systems add to a
text file and nobody sees is no problem: a UTF-8 byte order mark, CRLF, blank lines at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from penstock.data.prompts import Problem
from penstock.errors import DatasetError

SUFFIXES = (".jsonl", ".parquet", ".arrow")

Row = tuple[int, Any, list[Problem]]

_SKIP_BYTES = 1 << 20
_ROWS_AT_ONCE = 1024
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class _SavedState(msgspec.Struct):
    """`state.json` of a directory that `datasets.Dataset.save_to_disk` wrote."""

    data_files: list[dict[str, Any]] = msgspec.field(name="_data_files", default=[])
    indices_files: list[dict[str, Any]] | None = msgspec.field(name="_indices_data_files", default=None)


def files_of(path: Path) -> list[Path]:
    """The files of a dataset: the file itself, those of a directory by name, or those a saved dataset names.

    Raises DatasetError for a directory that holds several datasets.
    """
    if not path.is_dir():
        return [path]
    if (path / "dataset_dict.json").is_file():
        splits = sorted(child.name for child in path.iterdir() if child.is_dir())
        if not splits:
            raise DatasetError("its dataset_dict.json is of several splits, but there is none; save it again")
        raise DatasetError(f"it holds the splits {', '.join(splits)}; name one, as in {str(path / splits[0])!r}")
    if (path / "state.json").is_file():
        return _saved_files(path)
    return sorted(child for child in path.iterdir() if child.suffix in SUFFIXES and child.name[0] not in "._")


def _saved_files(path: Path) -> list[Path]:
    try:
        state = msgspec.json.decode((path / "state.json").read_bytes(), type=_SavedState)
        files = [path / found["filename"] for found in state.data_files]
    except (OSError, msgspec.MsgspecError, KeyError) as error:
        raise DatasetError(f"its state.json cannot be read: {error}") from error
    if state.indices_files:
        raise DatasetError("it is a selection of another dataset's rows; save it again after flatten_indices()")
    return files


def read_rows(path: Path, max_line_bytes: int, without_nulls: Set[str]) -> Iterator[Row]:
    """The rows of a file with one of `SUFFIXES`. Raises OSError when it cannot be read, or not on from some row.

    `without_nulls` are columns of Parquet and Arrow that hold structs of rows that are not alike.
    """
    if path.stat().st_size == 0:
        yield 1, None, [Problem("empty file", "the file is empty")]
    elif path.suffix == ".jsonl":
        yield from read_jsonl(path, max_line_bytes)
    else:
        yield from read_table(path, without_nulls)


def read_jsonl(path: Path, max_line_bytes: int) -> Iterator[Row]:
    blank: list[int] = []
    with path.open("rb") as file:
        number = 0
        while line := file.readline(max_line_bytes + 1):
            number += 1
            if number == 1:
                line = line.removeprefix(_UTF8_MARK)
            if not line.strip() and not line.startswith(_UTF16_MARKS):
                blank.append(number)
                continue
            for skipped in blank:
                yield skipped, None, [Problem("blank line", "blank line; every line must hold one row")]
            blank.clear()
            if len(line) > max_line_bytes and not line.endswith(b"\n"):
                size = len(line) + _skip_line(file)
                text = f"the line has {size} bytes; max_line_bytes is {max_line_bytes}"
                yield number, None, [Problem("huge line", text)]
                continue
            row, problems = _parse_line(line)
            yield number, row, problems
            if number == 1 and line.startswith(_UTF16_MARKS):
                return
    if len(blank) == number:
        yield 1, None, [Problem("empty file", "the file has no rows")]


def _skip_line(file: BinaryIO) -> int:
    """Read on to the end of the line without holding it; its remaining bytes."""
    size = 0
    while piece := file.readline(_SKIP_BYTES):
        size += len(piece)
        if piece.endswith(b"\n"):
            return size - 1
    return size


def _parse_line(line: bytes) -> tuple[Any, list[Problem]]:
    line = line.removesuffix(b"\n").removesuffix(b"\r")
    unreadable = _byte_problems(line)
    if unreadable:
        return None, unreadable
    try:
        return msgspec.json.decode(line), []
    except (msgspec.DecodeError, RecursionError) as error:
        return None, [Problem("bad JSON", f"bad JSON: {error}")]


def _byte_problems(line: bytes) -> list[Problem]:
    if line.startswith(_UTF16_MARKS):
        return [Problem("UTF-16", "the file is UTF-16; save it as UTF-8")]
    problems = []
    if (nul := line.find(b"\0")) >= 0:
        problems.append(Problem("NUL", f"NUL byte at byte {nul}"))
    try:
        line.decode()
    except UnicodeDecodeError as error:
        problems.append(Problem("bad UTF-8", f"bad UTF-8 at byte {error.start}: {error.reason}"))
    return problems


def read_table(path: Path, without_nulls: Set[str]) -> Iterator[Row]:
    """Parquet and Arrow. Rows are numbered from 1, as lines are."""
    import pyarrow

    number = 0
    try:
        for batch in _parquet_batches(path) if path.suffix == ".parquet" else _arrow_batches(path):
            for row, problems in _batch_rows(batch):
                number += 1
                if row is not None:
                    # A struct has every key of every row; a chat template must not see those that a message never had.
                    for key in without_nulls & row.keys():
                        row[key] = _without_nulls(row[key])
                yield number, row, problems
    except pyarrow.ArrowException as error:
        raise OSError(f"not readable as {path.suffix[1:].capitalize()}: {error}") from error
    if number == 0:
        yield 1, None, [Problem("empty file", "the file has no rows")]


def _parquet_batches(path: Path) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=_ROWS_AT_ONCE)


def _arrow_batches(path: Path) -> Iterator[Any]:
    """Of a stream, which `datasets` writes, or of a file with a footer."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        batches: Iterable[Any]
        try:
            batches = pyarrow.ipc.open_stream(source)
        except pyarrow.ArrowInvalid:
            file = pyarrow.ipc.open_file(source)
            batches = (file.get_batch(index) for index in range(file.num_record_batches))
        for batch in batches:
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                yield batch.slice(start, _ROWS_AT_ONCE)


def _batch_rows(batch: Any) -> Iterator[tuple[dict[str, Any] | None, list[Problem]]]:
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:  # in one of them; which one is found below
        pass
    else:
        yield from ((row, []) for row in rows)
        return
    for index in range(batch.num_rows):
        try:
            row = {name: column[index].as_py() for name, column in zip(batch.schema.names, batch.columns, strict=True)}
            yield row, []
        except UnicodeDecodeError as error:
            yield None, [Problem("bad UTF-8", f"bad UTF-8 at byte {error.start} of a value: {error.reason}")]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
