"""A table of the ledger from the type of its rows.

The fields of a row's struct are the columns and their types the columns' types; making, writing, sealing and reading
follow from that, so nothing else knows where in a row a column stands. Every row ends in a CRC-32 of its columns,
because SQLite has no checksums of its own and a flipped bit in a number would be read as another number.
"""

from __future__ import annotations

import functools
import operator
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from penstock.errors import LedgerError
from penstock.replay.disk import Connection


class Row(msgspec.Struct, frozen=True, gc=False):
    """The columns of a table; at most one of them is bytes."""


RowT = TypeVar("RowT", bound=Row)

Sealed = tuple[Any, ...]
"""A row and its checksum, as it is written."""

CRC = "crc"

PIECE = 5120
"""Bytes that are summed at once: over more zlib lets other threads run, and to get its turn back costs more than the
sum."""

DAMAGE = (sqlite3.DatabaseError, ValueError, KeyError)
"""What reading a damaged file raises: SQLite's own words, or text and state names that are none any more."""

_TYPES = {
    int: "INTEGER NOT NULL",
    str: "TEXT NOT NULL",
    float: "REAL NOT NULL",
    bytes: "BLOB NOT NULL",
    int | None: "INTEGER",
    str | None: "TEXT",
}

_encode = msgspec.msgpack.Encoder().encode
_columns = msgspec.structs.astuple


class Index(NamedTuple):
    columns: tuple[str, ...]
    where: str = ""
    """Which rows are in it; a query that shall use it repeats these words."""


class Table(Generic[RowT]):
    """One table, whose rows are `RowT`."""

    def __init__(
        self,
        name: str,
        row: type[RowT],
        *,
        key: Sequence[str],
        unique: Sequence[str] = (),
        indexes: Mapping[str, Index] | None = None,
    ) -> None:
        types = {field.name: field.type for field in msgspec.structs.fields(row)}
        self.name = name
        self.columns = tuple(types)
        self._row = row
        self._key = tuple(key)
        self._types = [_TYPES[of] for of in types.values()]
        self._unique = frozenset(unique)
        self._indexes = dict(indexes or {})
        contents = [place for place, of in enumerate(types.values()) if of is bytes]
        self._checksum = _content_checksum(contents[0]) if contents else _checksum
        values = f"INTO {name} VALUES ({_marks(len(self.columns) + 1)})"
        self.insert = f"INSERT {values}"
        self.replace = f"INSERT OR REPLACE {values}"
        self._select = f"SELECT {', '.join(f'{name}.{column}' for column in (*self.columns, CRC))} FROM {name}"
        self._order = f"ORDER BY {', '.join(f'{name}.{column}' for column in self._key)}"

    def make(self, connection: Connection) -> None:
        """The empty table with its indexes."""
        by_rowid = len(self._key) == 1 and self._types[self.columns.index(self._key[0])].startswith("INTEGER")
        lines = [
            f"{column} {of}" + (" UNIQUE" if column in self._unique else "")
            for column, of in zip(self.columns, self._types, strict=True)
        ]
        lines += [f"{CRC} INTEGER NOT NULL", f"PRIMARY KEY ({', '.join(self._key)})"]
        options = "STRICT" if by_rowid else "STRICT, WITHOUT ROWID"
        connection.execute(f"CREATE TABLE {self.name} ({', '.join(lines)}) {options}")
        self.make_indexes(connection)

    def exists(self, connection: Connection) -> bool:
        found = connection.execute("SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = ?", (self.name,))
        return found.fetchone() is not None

    def make_indexes(self, connection: Connection) -> None:
        for name, index in self._indexes.items():
            where = f" WHERE {index.where}" if index.where else ""
            connection.execute(f"CREATE INDEX {name} ON {self.name} ({', '.join(index.columns)}){where}")

    def seal(self, row: RowT) -> Sealed:
        """The row with its checksum."""
        columns = _columns(row)
        return columns + (self._checksum(columns),)  # noqa: RUF005 - half the time of unpacking

    def read(
        self, connection: Connection, path: Path, where: str = "", parameters: Sequence[Any] = (), *, limit: int = -1
    ) -> Iterator[RowT]:
        """The rows in order of their key. `where` may begin with joins. Raises LedgerError at a wrong checksum."""
        order = self._order if limit < 0 else f"{self._order} LIMIT {limit}"
        row, checksum = self._row, self._checksum
        for found in connection.execute(f"{self._select} {where} {order}", parameters):
            columns = found[:-1]
            if checksum(columns) != found[-1]:
                raise damaged(path, f"row {columns[0]!r} of table {self.name} does not have its checksum")
            yield row(*columns)

    def find(self, connection: Connection, path: Path, **columns: Any) -> RowT | None:
        """The first row whose columns have these values."""
        where = " AND ".join(f"{self.name}.{column} = ?" for column in columns)
        return next(self.read(connection, path, f"WHERE {where}", tuple(columns.values()), limit=1), None)

    @functools.cache  # noqa: B019 - tables live as long as the process
    def delete(self, column: str) -> str:
        """Of all rows with one of the values given for this column."""
        return f"DELETE FROM {self.name} WHERE {column} IN (VALUES (?))"


class Update(Generic[RowT]):
    """Changes these columns of rows, each only while its `expecting` column has the value that is expected."""

    def __init__(self, table: Table[RowT], key: str, expecting: str, columns: Sequence[str]) -> None:
        taken = (key, *columns, CRC)
        assigned = ", ".join(f"{column} = column{number}" for number, column in enumerate(taken[1:], 2))
        self.sql = (
            f"UPDATE {table.name} SET {assigned} FROM (VALUES ({_marks(len(taken) + 1)})) "
            f"WHERE {key} = column1 AND {expecting} = column{len(taken) + 1}"
        )
        self._taken = operator.itemgetter(*map((*table.columns, CRC).index, taken))

    def parameters(self, sealed: Sealed, expected: Any) -> Sealed:
        taken: Sealed = self._taken(sealed)
        return taken + (expected,)  # noqa: RUF005 - half the time of unpacking


def _checksum(columns: Sealed) -> int:
    return zlib.crc32(_encode(columns))


def _content_checksum(place: int) -> Callable[[Sealed], int]:
    """With the bytes, which stand at this place, last."""

    def checksum(columns: Sealed) -> int:
        crc = zlib.crc32(_encode(columns[:place] + columns[place + 1 :]))
        content = columns[place]
        if len(content) <= PIECE:
            return zlib.crc32(content, crc)
        whole = memoryview(content)
        for start in range(0, len(whole), PIECE):
            crc = zlib.crc32(whole[start : start + PIECE], crc)
        return crc

    return checksum


def damaged(path: Path, what: str) -> LedgerError:
    return LedgerError(
        f"{path} is damaged: {what}. Nothing was changed; restore the file from a copy, or start a new run directory"
    )


def _marks(n: int) -> str:
    return ", ".join("?" * n)
