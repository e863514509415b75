"""Dataset files, read as a stream: JSONL line by line, Parquet batch by batch.

Both readers yield `(line, row, problems)`. A row that cannot be read is None; a row can be read and still have
problems (a byte order mark, CRLF), so that its other problems are found in the same scan.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from penstock.data.prompts import Problem

SUFFIXES = (".jsonl", ".parquet")

Row = tuple[int, Any, list[Problem]]

_SKIP_BYTES = 1 << 20
_BOMS = ((b"\xef\xbb\xbf", "UTF-8"), (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"))


def read_rows(path: Path, max_line_bytes: int) -> Iterator[Row]:
    """The rows of a file with one of `SUFFIXES`. Raises OSError when it cannot be read, or not on from some row."""
    if path.stat().st_size == 0:
        yield 1, None, [Problem("empty file", "the file is empty")]
    elif path.suffix == ".parquet":
        yield from read_parquet(path)
    else:
        yield from read_jsonl(path, max_line_bytes)


def read_jsonl(path: Path, max_line_bytes: int) -> Iterator[Row]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(max_line_bytes + 1):
            number += 1
            if len(line) > max_line_bytes and not line.endswith(b"\n"):
                size = len(line) + _skip_line(file)
                text = f"the line has {size} bytes; max_line_bytes is {max_line_bytes}"
                yield number, None, [Problem("huge line", text)]
                continue
            row, problems = _parse_line(line, first=number == 1)
            yield number, row, problems


def _skip_line(file: BinaryIO) -> int:
    """Read on to the end of the line without holding it; its remaining bytes."""
    size = 0
    while piece := file.readline(_SKIP_BYTES):
        size += len(piece)
        if piece.endswith(b"\n"):
            return size - 1
    return size


def _parse_line(line: bytes, *, first: bool) -> tuple[Any, list[Problem]]:
    problems: list[Problem] = []
    for mark, name in _BOMS if first else ():
        if line.startswith(mark):
            problems.append(
                Problem("byte order mark", f"the file begins with a {name} byte order mark; save it without")
            )
            line = line[len(mark) :]
            break
    line = line.removesuffix(b"\n")
    if line.endswith(b"\r"):
        problems.append(Problem("CRLF", "the line ends with CRLF; line ends must be LF"))
        line = line.removesuffix(b"\r")
    unreadable = list(_byte_problems(line))
    if unreadable:
        return None, problems + unreadable
    try:
        return msgspec.json.decode(line), problems
    except (msgspec.DecodeError, RecursionError) as error:
        return None, [*problems, Problem("bad JSON", f"bad JSON: {error}")]


def _byte_problems(line: bytes) -> Iterator[Problem]:
    if (nul := line.find(b"\0")) >= 0:
        yield Problem("NUL", f"NUL byte at byte {nul}")
    try:
        line.decode()
    except UnicodeDecodeError as error:
        yield Problem("bad UTF-8", f"bad UTF-8 at byte {error.start}: {error.reason}")
    if not line.strip():
        yield Problem("blank line", "blank line; every line must hold one row")


def read_parquet(path: Path) -> Iterator[Row]:
    """Rows are numbered from 1, as lines are."""
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for index in range(batch.num_rows):
                    number += 1
                    yield _parquet_row(batch, index, number)
    except pyarrow.ArrowException as error:
        raise OSError(f"not readable as Parquet: {error}") from error
    if number == 0:
        yield 1, None, [Problem("empty file", "the file has no rows")]


def _parquet_row(batch: Any, index: int, number: int) -> Row:
    try:
        row = {name: column[index].as_py() for name, column in zip(batch.schema.names, batch.columns, strict=True)}
    except UnicodeDecodeError as error:
        return number, None, [Problem("bad UTF-8", f"bad UTF-8 at byte {error.start} of a value: {error.reason}")]
    # A Parquet struct holds every key of every row; a chat template must not see those that a message never had.
    return number, row | {key: _without_nulls(row[key]) for key in ("prompt", "tools") if row.get(key) is not None}, []


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
