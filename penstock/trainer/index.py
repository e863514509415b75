"""RolloutIndex: which saved rollouts there are, by step, task, reward and words, without reading their files.

    index = RolloutIndex(run_dir)
    index.add(run_dir / "trajectories" / "step-3.jsonl")       after it was written; again when it was written again
    page = index.find(text="prime number", task="math", min_reward=1.0)
    index.read(page.rollouts[0])                                the whole line

A side file, `index.sqlite`, for people who look. No run needs it: what cannot be written is told once and ends
nothing, and `RolloutIndex.rebuild` makes it again from the trajectories. The text itself stays in their files.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.errors import RefusedError, StorageError
from penstock.events import Nobody, Observer, Warned

INDEX_FILE = "index.sqlite"
FORMAT = 1

Kind = Literal["train", "eval"]
KINDS: dict[str, Kind] = {"step": "train", "eval": "eval"}
"""By how the name of a file of trajectories begins."""

TABLES = (
    "CREATE TABLE files (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE) STRICT",
    # Ids are never used again: the words of a file that was written again stay behind, and lead to nothing.
    """CREATE TABLE rollouts (
        id INTEGER PRIMARY KEY AUTOINCREMENT, file INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL,
        kind TEXT NOT NULL, step INTEGER NOT NULL, task TEXT NOT NULL, group_id TEXT NOT NULL, rollout_id TEXT NOT NULL,
        status TEXT, reward REAL, num_tokens INTEGER, data_source TEXT, oldest INTEGER, newest INTEGER) STRICT""",
    "CREATE VIRTUAL TABLE texts USING fts5(prompt, answer, content='')",
    "CREATE INDEX rollouts_file ON rollouts (file)",
    *(
        f"CREATE INDEX rollouts_{columns.replace(', ', '_')} ON rollouts ({columns})"
        for columns in (
            *("kind", "step", "task", "task, step", "task, status", "status", "data_source", "group_id", "rollout_id"),
            *("reward", "task, reward"),
        )
    ),
)


class FoundRollout(msgspec.Struct, frozen=True, kw_only=True):
    """What the index knows of a saved rollout; None is what its line did not say."""

    id: int
    kind: Kind
    step: int
    """The train step it was trained in; of an evaluation, the model step that answered."""
    task: str
    group_id: str
    rollout_id: str
    status: str | None
    reward: float | None
    num_tokens: int | None
    data_source: str | None
    oldest: int | None
    newest: int | None
    """The oldest and the newest model step of its tokens."""
    file: str
    """Its name under `trajectories`."""
    offset: int
    length: int
    """Where its line is."""


class Page(msgspec.Struct, frozen=True):
    rollouts: list[FoundRollout]
    next: str | None = None
    """What to give as `after` for the next page; None when this is the last."""


class _Line(msgspec.Struct):
    """What is read of a line; whatever a line does not have is None."""

    rollout_id: str
    group_id: str = ""
    task: str = ""
    data_source: str | None = None
    status: str | None = None
    prompt: Any = None
    answer: str | None = None
    reward: Any = None
    num_tokens: int | None = None
    tokens: Any = None
    model_steps: Any = None


_decode_line = msgspec.json.Decoder(_Line).decode


class RolloutIndex:
    def __init__(self, run_dir: Path, *, observer: Observer | None = None) -> None:
        self.path = run_dir / INDEX_FILE
        self._directory = run_dir / "trajectories"
        self._command = f"penstock ledger {shlex.quote(str(run_dir))} --reindex"
        self._observer = observer or Nobody()
        self._told = False

    def add(self, file: Path) -> None:
        """Take the rollouts of a file of trajectories, in the place of what it held before. Never raises.

        Reads and writes files: call it in a thread.
        """
        try:
            self._add(file)
        except (sqlite3.Error, OSError, StorageError) as error:
            if not self._told:
                self._told = True
                text = f"{self.path} cannot be written: {error}; the run goes on; {self._command} makes it later"
                self._observer.notice(Warned(text=text, source="rollout index"))

    @classmethod
    def rebuild(cls, run_dir: Path) -> RolloutIndex:
        """The index of a run directory, made anew from its trajectories. Raises StorageError when that fails."""
        index = cls(run_dir)
        try:
            index._remove()
            for file in sorted(index._directory.glob("*.jsonl"), key=lambda file: _kind_and_step(file) or ("", 0)):
                index._add(file)
        except (sqlite3.Error, OSError) as error:
            raise StorageError(f"{index.path} cannot be made: {error}") from error
        return index

    def find(
        self,
        *,
        text: str = "",
        kind: Kind | None = None,
        step: int | None = None,
        task: str | None = None,
        status: str | None = None,
        data_source: str | None = None,
        group_id: str | None = None,
        rollout_id: str | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
        limit: int = 50,
        after: str | None = None,
    ) -> Page:
        """The rollouts of which all that is asked is true; `text` is words that prompt or answer must have.

        The last saved come first; where rewards are asked for and no words, the best ones. Raises RefusedError when
        there is no index.
        """
        wanted = {
            "kind": kind,
            "step": step,
            "task": task,
            "status": status,
            "data_source": data_source,
            "group_id": group_id,
            "rollout_id": rollout_id,
        }
        bounds = {">=": min_reward, "<=": max_reward}
        sql, values, by_reward = _question(_match(text), wanted, bounds, after)
        with self._reading() as connection:
            rows = connection.execute(f"{sql} LIMIT ?", (*values, limit + 1)).fetchall()
        found = [msgspec.convert(dict(row), FoundRollout) for row in rows[:limit]]
        more = len(rows) > limit and bool(found)
        last = found[-1] if more else None
        return Page(found, None if last is None else f"{last.reward!r}/{last.id}" if by_reward else str(last.id))

    def read(self, found: FoundRollout) -> dict[str, Any]:
        """The whole line of a rollout. Raises StorageError when its file is not as it was when it was indexed."""
        path = self._directory / found.file
        try:
            with path.open("rb") as file:
                file.seek(found.offset)
                line = msgspec.json.decode(file.read(found.length))
        except (OSError, msgspec.DecodeError) as error:
            raise StorageError(
                f"{path} was changed since it was indexed: {error}; {self._command} makes the index anew"
            ) from error
        if not isinstance(line, dict) or line.get("rollout_id") != found.rollout_id:
            raise StorageError(f"{path} was changed since it was indexed; {self._command} makes the index anew")
        return line

    # Inside.

    def _add(self, file: Path) -> None:
        named = _kind_and_step(file)
        if named is None:
            return
        kind, step = named
        with self._writing() as connection:
            connection.execute("INSERT OR IGNORE INTO files (name) VALUES (?)", (file.name,))
            (number,) = connection.execute("SELECT id FROM files WHERE name = ?", (file.name,)).fetchone()
            connection.execute("DELETE FROM rollouts WHERE file = ?", (number,))
            for offset, length, line in _lines(file):
                steps = _made_by(line.model_steps)
                cursor = connection.execute(
                    """INSERT INTO rollouts (file, offset, length, kind, step, task, group_id, rollout_id, status,
                           reward, num_tokens, data_source, oldest, newest)
                       VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)""",
                    (
                        *(number, offset, length, kind, step, line.task, line.group_id, line.rollout_id, line.status),
                        *(_score(line.reward), _num_tokens(line), line.data_source),
                        *(min(steps, default=None), max(steps, default=None)),
                    ),
                )
                connection.execute(
                    "INSERT INTO texts (rowid, prompt, answer) VALUES (?, ?, ?)",
                    (cursor.lastrowid, "\n".join(_said(line.prompt)), line.answer or ""),
                )

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction. A file that is no index of this format is made anew."""
        with contextlib.closing(self._open()) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")

    def _open(self) -> sqlite3.Connection:
        for attempt in ("as it is", "anew"):
            if attempt == "anew":
                self._remove()
            connection = sqlite3.connect(self.path, isolation_level=None)
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = NORMAL")
                (found,) = connection.execute("PRAGMA user_version").fetchone()
                (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
                if not tables:
                    connection.execute("BEGIN IMMEDIATE")
                    for sql in TABLES:
                        connection.execute(sql)
                    connection.execute(f"PRAGMA user_version = {FORMAT}")
                    connection.execute("COMMIT")
                elif found != FORMAT:
                    raise sqlite3.DatabaseError(f"it has format {found}, not {FORMAT}")
                return connection
            except sqlite3.OperationalError:
                connection.close()
                raise
            except sqlite3.DatabaseError:
                connection.close()
                if attempt == "anew":
                    raise
        raise AssertionError("unreachable")

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        if not self.path.is_file():
            raise RefusedError(f"{self.path} does not exist; {self._command} makes it")
        try:
            uri = f"{self.path.resolve().as_uri()}?mode=ro"
            with contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as connection:
                connection.row_factory = sqlite3.Row
                yield connection
        except sqlite3.Error as error:
            raise RefusedError(f"{self.path} cannot be read: {error}; {self._command} makes it anew") from error

    def _remove(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)


SELECT = """SELECT rollouts.id, kind, step, task, group_id, rollout_id, status, reward, num_tokens, data_source, oldest,
    newest, files.name AS file, offset, length"""


def _question(
    match: str, wanted: dict[str, Any], bounds: dict[str, float | None], after: str | None
) -> tuple[str, list[Any], bool]:
    """The query without its limit, its values, and whether its order is that of the rewards."""
    by_reward = not match and any(bound is not None for bound in bounds.values())
    asked = [(f"{column} = ?", value) for column, value in wanted.items() if value is not None]
    asked += [(f"reward {sign} ?", bound) for sign, bound in bounds.items() if bound is not None]
    # The words come first, and their order is that of the ids; otherwise they would be looked up row by row.
    tables = "texts CROSS JOIN rollouts ON rollouts.id = texts.rowid" if match else "rollouts"
    number = "texts.rowid" if match else "rollouts.id"
    if match:
        asked.append(("texts MATCH ?", match))
    values = [value for _, value in asked]
    terms = [term for term, _ in asked]
    if after is not None:
        reward, _, last = after.rpartition("/")
        if by_reward:
            terms.append(f"(reward, {number}) < (?, ?)")
            values.append(float(reward))
        else:
            terms.append(f"{number} < ?")
        values.append(int(last))
    where = f" WHERE {' AND '.join(terms)}" if terms else ""
    order = f"reward DESC, {number} DESC" if by_reward else f"{number} DESC"
    sql = f"{SELECT} FROM {tables} CROSS JOIN files ON files.id = rollouts.file{where} ORDER BY {order}"
    return sql, values, by_reward


def _match(text: str) -> str:
    """Words as FTS5 wants them, each quoted, so that none is an operator; without those that have nothing to index."""
    return " ".join(f'"{word}"' for word in text.replace('"', " ").split() if re.search(r"\w", word))


def _kind_and_step(file: Path) -> tuple[Kind, int] | None:
    """By its name, as in `step-3.jsonl`; None when it is no file of rollouts."""
    named = re.fullmatch(r"(step|eval)-(\d+)", file.stem)
    return (KINDS[named[1]], int(named[2])) if named else None


def _lines(file: Path) -> Iterator[tuple[int, int, _Line]]:
    """Where each line begins, how long it is, and what it says; what was left half written is passed by."""
    offset = 0
    with file.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError):
                yield offset, len(line), _decode_line(line)
            offset += len(line)


def _score(reward: Any) -> float | None:
    score = reward.get("score") if isinstance(reward, dict) else reward
    return float(score) if isinstance(score, int | float) else None


def _num_tokens(line: _Line) -> int | None:
    if line.num_tokens is not None:
        return line.num_tokens
    return line.tokens if isinstance(line.tokens, int) else None


def _made_by(model_steps: Any) -> list[int]:
    """The model steps of runs `[model step, number of tokens]`."""
    return [run[0] for run in model_steps] if isinstance(model_steps, list) else []


def _said(prompt: Any) -> Iterator[str]:
    """The texts of chat messages, however they are nested."""
    if isinstance(prompt, str):
        yield prompt
    elif isinstance(prompt, list):
        for part in prompt:
            yield from _said(part)
    elif isinstance(prompt, dict):
        yield from _said(prompt.get("content", prompt.get("text")))
