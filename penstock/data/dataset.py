"""Prompts from files, every row checked before anything else of a run begins.

A dataset is a JSONL, Parquet or Arrow file, several of them, a directory of them, or a directory that Hugging Face's
`datasets` saved. What a row looks like is in `layout.py`; any other layout is named by column or converted.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pydantic

from penstock.config import import_name, nearest
from penstock.data.files import SUFFIXES, Row, files_of, read_rows
from penstock.data.layout import Layout, converted, standard
from penstock.data.prompts import Limits, OnProgress, Place, Problem, PromptScan, PromptSet, PromptSourceConfig
from penstock.errors import ConfigError, DatasetError
from penstock.ports import Tokenizer
from penstock.rollout import RolloutState

ROWS_LOOKED_AT = 20
"""So many first rows that all lack a column are a file of another layout, and not so many bad rows."""


class DatasetConfig(PromptSourceConfig):
    """Prompts from files of rows, JSONL, Parquet or a saved dataset; see `to_rollout` for rows of another layout."""

    path: Path | list[Path]
    """A file, a directory of files, or several of either, in this order."""
    prompt: str = pydantic.Field(default="prompt", min_length=1)
    """The column of the prompt: a text, or a list of messages."""
    label: str | None = pydantic.Field(default=None, min_length=1)
    """The column of the ground truth; None for `reward_model.ground_truth`."""
    data_source: str | None = pydantic.Field(default=None, min_length=1)
    """Of rows that name none."""
    to_rollout: Callable[[Any], RolloutState] | str | None = None
    """Turns a row of another layout into a rollout (`penstock.rollout.new_rollout`); a function or its dotted path."""
    max_prompt_tokens: int | None = pydantic.Field(default=None, ge=1)
    """A longer prompt is `over_long`. None: what leaves room for the answer in the model's context."""
    over_long: Literal["refuse", "drop"] = "refuse"
    """Whether a prompt over `max_prompt_tokens`, or too long for the model's context, is an error or left out."""
    quarantine: int = pydantic.Field(default=0, ge=0)
    """How many bad rows may be set aside; one more and the dataset is refused."""
    max_line_bytes: int = pydantic.Field(default=16 << 20, ge=1)
    """A longer line of a JSONL file is a problem, and is never held in memory."""

    @property
    def paths(self) -> list[Path]:
        return self.path if isinstance(self.path, list) else [self.path]

    def problems(self) -> Iterator[str]:
        if not self.paths:
            yield "path is an empty list; it must name at least 1 file."
        for path in self.paths:
            yield from _path_problems(path)
        named = [name for name in ("prompt", "label", "data_source") if name in self.model_fields_set]
        if self.to_rollout is not None and named:
            yield f"to_rollout is given and {' and '.join(named)} too; the function decides what a row's parts are."
        if isinstance(self.to_rollout, str):
            try:
                if not callable(import_name(self.to_rollout)):
                    yield f"to_rollout is {self.to_rollout!r}; it must name a function."
            except ConfigError as error:
                yield f"to_rollout: {error}"

    def load(
        self,
        tokenizer: Tokenizer,
        *,
        context: int | None,
        max_tokens: int,
        data_sources: frozenset[str] | None,
        on_progress: OnProgress | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> PromptSet:
        self.check()
        limits = Limits(
            max_tokens=max_tokens,
            context=context,
            data_sources=data_sources,
            max_prompt_tokens=self.max_prompt_tokens,
            drop_over_long=self.over_long == "drop",
            quarantine=self.quarantine,
            tools=tuple(dict(tool) for tool in tools),
        )
        scan = PromptScan(tokenizer, limits, source=", ".join(map(str, self.paths)), on_progress=on_progress)
        convert = import_name(self.to_rollout) if isinstance(self.to_rollout, str) else self.to_rollout
        layout = Layout(self.prompt, self.label, self.data_source)
        with _no_search_for_garbage():
            for file in itertools.chain.from_iterable(files_of(path) for path in self.paths):
                self._scan_file(file, scan, layout, convert)
            return scan.finish()

    def _scan_file(
        self, file: Path, scan: PromptScan, layout: Layout, convert: Callable[[Any], RolloutState] | None
    ) -> None:
        line, lines_of_ids = 0, dict[str, int]()
        try:
            rows = read_rows(file, self.max_line_bytes, {"tools", self.prompt})
            if convert is None:
                rows = _refuse_other_layout(rows, layout, file)
            for line, row, problems in rows:
                prompt, found = None, problems
                if row is not None or not problems:
                    prompt, more = (
                        standard(row, line, lines_of_ids, layout) if convert is None else converted(convert, row)
                    )
                    found = problems + more
                where = Place(str(file), line)
                if prompt is None:
                    scan.refuse(where, found)
                else:
                    scan.add(where, prompt, found)
        except OSError as error:
            scan.give_up(Place(str(file), line + 1), Problem("unreadable", f"cannot be read: {error}"))


@contextlib.contextmanager
def _no_search_for_garbage() -> Iterator[None]:
    """Rows make millions of objects that stay; to look through them again and again takes a third of a scan."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _path_problems(path: Path) -> Iterator[str]:
    try:
        path.resolve(strict=True)
    except FileNotFoundError:
        yield f"path is {str(path)!r}; there is no such file.{_near_file(path)}"
        return
    except (OSError, RuntimeError) as error:  # RuntimeError: a symlink that leads to itself, before Python 3.13
        yield f"path is {str(path)!r}; it cannot be used: {error}"
        return
    if path.is_dir():
        try:
            if not files_of(path):
                yield f"path is {str(path)!r}; the directory has no file that ends in {', '.join(SUFFIXES)}."
        except DatasetError as error:
            yield f"path is {str(path)!r}; {error}"
    elif path.suffix not in SUFFIXES:
        hint = nearest(path.suffix, list(SUFFIXES))
        yield f"path is {str(path)!r}; a dataset is JSONL, Parquet or Arrow.{hint}"
    elif not path.is_file():
        yield f"path is {str(path)!r}; it must be a file."


def _near_file(path: Path) -> str:
    siblings = [file.name for file in path.parent.glob("*") if file.suffix in SUFFIXES] if path.parent.is_dir() else []
    siblings = [name for name in siblings if name != path.name]
    return nearest(path.name, siblings[:20]) if siblings else ""


def _refuse_other_layout(rows: Iterator[Row], layout: Layout, file: Path) -> Iterator[Row]:
    """The same rows; raises DatasetError, once, for a file whose rows all lack what a prompt is made of."""
    first = list(itertools.islice(rows, ROWS_LOOKED_AT))
    readable = [row for _, row, _ in first if isinstance(row, dict)]
    missing = set.intersection(*(layout.missing(row) for row in readable)) if readable else set()
    if missing:
        columns = list(dict.fromkeys(name for row in readable for name in row if row[name] is not None))
        raise DatasetError(f"{file}: {layout.advice(missing, columns)}")
    return itertools.chain(first, rows)
