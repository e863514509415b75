"""Prompts from a JSONL or Parquet file, every row checked before anything else of a run begins.

A row, in the layout that datasets of this field already have:

    {"prompt": "text" or [{"role": ..., "content": ...}, ...],
     "reward_model": {"ground_truth": ...},
     "data_source": "gsm8k",
     "extra_info": {...},          optional, handed to the judger
     "id": "gsm8k-17",             optional, unique in the file; found again in extra_info
     "tools": [{...}, ...]}        optional, JSON schemas for the chat template

Other keys are ignored. Any other layout is converted by `to_rollout`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic

from penstock.config import dotted_name, import_name, nearest
from penstock.data.files import SUFFIXES, read_rows
from penstock.data.prompts import Limits, Place, Problem, PromptScan, PromptSet, PromptSourceConfig
from penstock.errors import ConfigError
from penstock.ports import Tokenizer
from penstock.rollout import Prompt, RolloutState, new_rollout


class DatasetConfig(PromptSourceConfig):
    path: Path
    to_rollout: Callable[[Any], RolloutState] | str | None = None
    """Turns a row of another layout into a rollout (`penstock.rollout.new_rollout`); a function or its dotted path."""
    max_prompt_tokens: int | None = pydantic.Field(default=None, ge=1)
    over_long: Literal["refuse", "drop"] = "refuse"
    """Whether a prompt over `max_prompt_tokens`, or too long for the model's context, is an error or left out."""
    quarantine: int = pydantic.Field(default=0, ge=0)
    """How many bad rows may be set aside; one more and the dataset is refused."""
    max_line_bytes: int = pydantic.Field(default=16 << 20, ge=1)
    """A longer line of a JSONL file is a problem, and is never held in memory."""

    def problems(self) -> Iterator[str]:
        if self.path.suffix not in SUFFIXES:
            hint = nearest(self.path.suffix, list(SUFFIXES))
            yield f"path is {str(self.path)!r}; a dataset is JSONL or Parquet.{hint}"
        if not self.path.exists():
            yield f"path is {str(self.path)!r}; there is no such file.{_near_file(self.path)}"
        elif not self.path.is_file():
            yield f"path is {str(self.path)!r}; it must be a file."
        if isinstance(self.to_rollout, str):
            try:
                if not callable(import_name(self.to_rollout)):
                    yield f"to_rollout is {self.to_rollout!r}; it must name a function."
            except ConfigError as error:
                yield f"to_rollout: {error}"

    def load(
        self, tokenizer: Tokenizer, *, context: int | None, max_tokens: int, data_sources: frozenset[str] | None
    ) -> PromptSet:
        self.check()
        limits = Limits(
            max_tokens=max_tokens,
            context=context,
            data_sources=data_sources,
            max_prompt_tokens=self.max_prompt_tokens,
            drop_over_long=self.over_long == "drop",
            quarantine=self.quarantine,
        )
        scan = PromptScan(tokenizer, limits, source=str(self.path))
        convert = import_name(self.to_rollout) if isinstance(self.to_rollout, str) else self.to_rollout
        lines_of_ids: dict[str, int] = {}
        line = 0
        try:
            for line, row, problems in read_rows(self.path, self.max_line_bytes):
                prompt, found = None, problems
                if row is not None or not problems:
                    prompt, more = _standard(row, line, lines_of_ids) if convert is None else _converted(convert, row)
                    found = problems + more
                where = Place(str(self.path), line)
                if prompt is None:
                    scan.refuse(where, found)
                else:
                    scan.add(where, prompt, found)
        except OSError as error:
            scan.give_up(Place(str(self.path), line + 1), Problem("unreadable", f"cannot be read: {error}"))
        return scan.finish()


def _near_file(path: Path) -> str:
    siblings = [file.name for file in path.parent.glob("*") if file.suffix in SUFFIXES] if path.parent.is_dir() else []
    return nearest(path.name, siblings[:20]) if siblings else ""


def _converted(convert: Callable[[Any], Any], row: Any) -> tuple[Prompt | None, list[Problem]]:
    name = dotted_name(convert)
    try:
        rollout = convert(row)
    except Exception as error:  # a user's function may raise anything; it belongs to the row
        return None, [Problem("to_rollout failed", f"{name} raised {type(error).__name__}: {error}")]
    if not isinstance(rollout, RolloutState):
        text = f"{name} returned {type(rollout).__name__}; it must return a RolloutState"
        return None, [Problem("to_rollout failed", text)]
    return rollout.prompt, []


def _standard(row: Any, line: int, lines_of_ids: dict[str, int]) -> tuple[Prompt | None, list[Problem]]:
    """The prompt of a row in the standard layout, or everything that is wrong with it."""
    if not isinstance(row, dict):
        return None, [_mistyped("the row", row, "an object")]
    problems = [
        *_prompt_problems(row),
        *_answer_problems(row),
        *_field_problems(row),
        *_id_problems(row.get("id"), line, lines_of_ids),
    ]
    if problems:
        return None, problems
    extra_info = row.get("extra_info") or {}
    if row.get("id") is not None:
        extra_info = {"id": row["id"]} | extra_info
    rollout = new_rollout(
        row["prompt"],
        ground_truth=row["reward_model"]["ground_truth"],
        data_source=row["data_source"],
        tools=row.get("tools") or (),
        extra_info=extra_info,
    )
    return rollout.prompt, []


def _prompt_problems(row: Mapping[str, Any]) -> Iterator[Problem]:
    prompt = row.get("prompt")
    if prompt is None:
        yield _missing("prompt", row)
    elif not isinstance(prompt, str | list):
        yield _mistyped("prompt", prompt, "a text or a list of messages")
    elif not prompt:
        yield Problem("empty prompt", "prompt is empty")
    elif isinstance(prompt, list):
        for index, message in enumerate(prompt):
            yield from _message_problems(f"prompt[{index}]", message)


def _message_problems(name: str, message: Any) -> Iterator[Problem]:
    if not isinstance(message, dict):
        yield _mistyped(name, message, "an object with role and content")
        return
    role, content = message.get("role"), message.get("content")
    if role is None:
        yield _missing(f"{name}.role", message)
    elif not isinstance(role, str):
        yield _mistyped(f"{name}.role", role, "a text")
    # An assistant's turn that only calls tools has no content.
    if content is None and not message.get("tool_calls"):
        yield _missing(f"{name}.content", message)
    elif content is not None and not isinstance(content, str):
        yield _mistyped(f"{name}.content", content, "a text")


def _answer_problems(row: Mapping[str, Any]) -> Iterator[Problem]:
    reward_model = row.get("reward_model")
    if reward_model is None:
        yield _missing("reward_model", row)
    elif not isinstance(reward_model, dict):
        yield _mistyped("reward_model", reward_model, "an object with ground_truth")
    elif reward_model.get("ground_truth") is None:
        yield _missing("reward_model.ground_truth", reward_model)


def _field_problems(row: Mapping[str, Any]) -> Iterator[Problem]:
    data_source, extra_info, tools = row.get("data_source"), row.get("extra_info"), row.get("tools")
    if data_source is None:
        yield _missing("data_source", row)
    elif not isinstance(data_source, str) or not data_source:
        yield _mistyped("data_source", data_source, "a text that is not empty")
    if extra_info is not None and not isinstance(extra_info, dict):
        yield _mistyped("extra_info", extra_info, "an object")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        yield _mistyped("tools", tools, "a list of objects")


def _id_problems(row_id: Any, line: int, lines_of_ids: dict[str, int]) -> Iterator[Problem]:
    if row_id is None:
        return
    if isinstance(row_id, bool) or not isinstance(row_id, str | int):
        yield _mistyped("id", row_id, "a text or a whole number")
        return
    first = lines_of_ids.setdefault(str(row_id), line)
    if first != line:
        yield Problem("duplicate id", f"id {row_id!r} is already used in line {first}")


def _missing(name: str, row: Mapping[str, Any]) -> Problem:
    present = ", ".join(sorted(key for key in row if row[key] is not None)[:10])
    return Problem("missing field", f"{name} is missing; there is {present or 'nothing'}")


def _mistyped(name: str, value: Any, rule: str) -> Problem:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return Problem("mistyped field", f"{name} is {shown}; it must be {rule}")
