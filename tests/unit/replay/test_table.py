from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.errors import LedgerError
from penstock.replay.disk import Connection, SqliteDisk
from penstock.replay.table import Index, Row, Table, Update


class Boat(Row, frozen=True, gc=False):
    number: int
    name: str
    harbour: str | None
    cargo: bytes
    length: float
    crew: int | None


BOATS = Table("boats", Boat, key=["number"], unique=["name"], indexes={"at_sea": Index(("crew",), "harbour IS NULL")})
SAILS = Update(BOATS, "number", "harbour", ["harbour", "crew"])


@pytest.fixture
def connection(tmp_path: Path) -> Any:
    connection = SqliteDisk().connect(tmp_path / "boats.sqlite")
    BOATS.make(connection)
    yield connection
    connection.close()


boats = st.lists(
    st.builds(
        Boat,
        st.integers(-(2**63), 2**63 - 1),
        st.text(st.characters(codec="utf-8", exclude_characters="\0")),
        st.none() | st.sampled_from(["Kiel", ""]),
        st.binary(max_size=9000),
        st.floats(min_value=0),
        st.none() | st.integers(0, 9),
    ),
    unique_by=(lambda boat: boat.number, lambda boat: boat.name),
    max_size=4,
)


@settings(max_examples=50)
@given(rows=boats)
def test_rows_come_back_as_they_were_in_order_of_their_key(tmp_path_factory: Any, rows: list[Boat]) -> None:
    connection = SqliteDisk().connect(tmp_path_factory.mktemp("boats") / "boats.sqlite")
    BOATS.make(connection)
    connection.executemany(BOATS.insert, [BOATS.seal(row) for row in rows])
    assert list(BOATS.read(connection, Path("boats"))) == sorted(rows, key=lambda row: row.number)
    for row in rows:
        assert BOATS.find(connection, Path("boats"), name=row.name) == row
    assert BOATS.find(connection, Path("boats"), name="no such name") is None
    connection.close()


@pytest.mark.parametrize(
    "change",
    [
        "number = 7",
        "name = 'Alma'",
        "harbour = 'Kiel'",
        "cargo = CAST(x'01' || substr(cargo, 2) AS BLOB)",
        "cargo = CAST(substr(cargo, 1, 8999) || x'01' AS BLOB)",
        "length = length + 1",
        "crew = NULL",
        "crc = crc + 1",
    ],
)
def test_a_row_that_was_changed_beside_the_ledger_is_named(connection: Connection, change: str) -> None:
    row = Boat(1, "Anna", None, bytes(9000), 12.5, 3)
    connection.execute(BOATS.insert, BOATS.seal(row))
    connection.execute(f"UPDATE boats SET {change}")
    with pytest.raises(LedgerError, match=r"boats.sqlite is damaged: row [17] of table boats does not have"):
        list(BOATS.read(connection, Path("boats.sqlite")))


@given(st.binary(min_size=1, max_size=64), st.data())
def test_one_flipped_bit_changes_the_checksum(content: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    flipped = bytearray(content)
    flipped[bit // 8] ^= 1 << bit % 8
    row = Boat(1, "Anna", None, content, 12.5, 3)
    assert BOATS.seal(row)[-1] != BOATS.seal(replace(row, cargo=bytes(flipped)))[-1]


def test_an_update_changes_its_columns_only_where_the_row_is_as_expected(connection: Connection) -> None:
    home, away = Boat(1, "Anna", "Kiel", b"", 1.0, 0), Boat(2, "Berta", "Cuxhaven", b"", 1.0, 0)
    connection.executemany(BOATS.insert, [BOATS.seal(home), BOATS.seal(away)])
    sailing = [replace(boat, harbour="Sylt", crew=4) for boat in (home, away)]
    before = connection.total_changes
    connection.executemany(SAILS.sql, [SAILS.parameters(BOATS.seal(boat), "Kiel") for boat in sailing])
    assert connection.total_changes - before == 1
    assert list(BOATS.read(connection, Path("boats"))) == [sailing[0], away]


def test_rows_are_deleted_by_any_column(connection: Connection) -> None:
    rows = [Boat(number, str(number), "Kiel", b"", 1.0, number % 2) for number in range(4)]
    connection.executemany(BOATS.insert, [BOATS.seal(row) for row in rows])
    connection.executemany(BOATS.delete("crew"), [(1,)])
    assert [boat.number for boat in BOATS.read(connection, Path("boats"))] == [0, 2]


def test_an_index_is_used_by_those_who_repeat_its_words(connection: Connection) -> None:
    (plan,) = connection.execute(
        "EXPLAIN QUERY PLAN SELECT number FROM boats WHERE crew = 2 AND harbour IS NULL"
    ).fetchall()
    assert "USING INDEX at_sea" in plan[-1]
