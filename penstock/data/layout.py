"""What a row of a dataset says: its prompt, or everything that is wrong with it.

A row, in the layout that datasets of this field already have:

    {"prompt": "text" or [{"role": ..., "content": ...}, ...],
     "reward_model": {"ground_truth": ...},
     "data_source": "gsm8k",
     "extra_info": {...},          optional, handed to the judger
     "id": "gsm8k-17",             optional, unique in the file; found again in extra_info
     "tools": [{...}, ...]}        optional, JSON schemas for the chat template

Other keys are ignored. A `Layout` may give the prompt and the label other columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.config import dotted_name
from penstock.data.prompts import Problem
from penstock.rollout import Prompt, RolloutState

ROLES = ("system", "developer", "user", "assistant", "tool")

_PROMPT_COLUMNS = ("prompt", "question", "problem", "query", "instruction", "messages", "input", "text")
_LABEL_COLUMNS = ("answer", "solution", "label", "ground_truth", "target", "final_answer", "output", "completion")


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a prompt stand in a row."""

    prompt: str = "prompt"
    label: str | None = None
    """A column; None: `reward_model.ground_truth`."""
    data_source: str | None = None
    """Of rows that name none."""

    def missing(self, row: Any) -> set[str]:
        """The columns without which a row is no prompt."""
        if not isinstance(row, dict):
            return set()
        needed = {self.prompt, self.label or "reward_model"} | ({"data_source"} if self.data_source is None else set())
        return {name for name in needed if row.get(name) is None}

    def advice(self, missing: set[str], columns: Sequence[str]) -> str:
        """What to do about a file whose rows all lack these columns."""
        prompt = self.prompt if self.prompt not in missing else _first_of(_PROMPT_COLUMNS, columns)
        label = self.label if self.label not in (None, *missing) else None
        if label is None and (self.label or "reward_model") in missing:
            label = _first_of(_LABEL_COLUMNS, columns)
        fields = {"prompt": prompt if prompt != "prompt" else None, "label": label}
        if "data_source" in missing:
            fields["data_source"] = "..."
        call = ", ".join(f"{name}={value!r}" for name, value in fields.items() if value is not None)
        return (
            f"the rows have no {' and no '.join(sorted(missing))}; their columns are {', '.join(columns) or 'none'}. "
            f"Name the columns, as in DatasetConfig({call}), or give to_rollout, a function that turns a row into a "
            "rollout"
        )


def _first_of(known: Sequence[str], columns: Sequence[str]) -> str:
    return next((name for name in known if name in columns), "...")


def standard(row: Any, line: int, lines_of_ids: dict[str, int], layout: Layout) -> tuple[Prompt | None, list[Problem]]:
    """The prompt of a row in the standard layout, or everything that is wrong with it."""
    if not isinstance(row, dict):
        return None, [_mistyped("the row", row, "an object")]
    problems = [
        *_prompt_problems(row, layout.prompt),
        *_answer_problems(row, layout.label),
        *_field_problems(row, layout.data_source),
        *_id_problems(row.get("id"), line, lines_of_ids),
    ]
    if problems:
        return None, problems
    extra_info = row.get("extra_info") or {}
    if row.get("id") is not None:
        extra_info = {"id": row["id"]} | extra_info
    prompt = row[layout.prompt]
    return Prompt(
        messages=({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt),
        ground_truth=row[layout.label] if layout.label is not None else row["reward_model"]["ground_truth"],
        data_source=row.get("data_source") or layout.data_source or "",
        tools=tuple(row.get("tools") or ()),
        extra_info=extra_info,
    ), []


def converted(convert: Callable[[Any], Any], row: Any) -> tuple[Prompt | None, list[Problem]]:
    """The prompt that a user's function makes of a row."""
    name = dotted_name(convert)
    try:
        rollout = convert(row)
    except Exception as error:  # a user's function may raise anything; it belongs to the row
        return None, [Problem("to_rollout failed", f"{name} raised {type(error).__name__}: {error}")]
    if not isinstance(rollout, RolloutState):
        text = f"{name} returned {type(rollout).__name__}; it must return a RolloutState"
        return None, [Problem("to_rollout failed", text)]
    return rollout.prompt, []


def _prompt_problems(row: Mapping[str, Any], column: str) -> Iterator[Problem]:
    prompt = row.get(column)
    if prompt is None:
        yield _missing(column, row)
    elif not isinstance(prompt, str | list):
        yield _mistyped(column, prompt, "a text or a list of messages")
    elif not prompt:
        yield Problem("empty prompt", f"{column} is empty")
    elif isinstance(prompt, list):
        for index, message in enumerate(prompt):
            yield from _message_problems(f"{column}[{index}]", message)
        if isinstance(prompt[-1], dict) and prompt[-1].get("role") == "assistant":
            text = f"the last message of {column} is the assistant's; an answer comes after a user's or a tool's"
            yield Problem("assistant's message last", text)


def _message_problems(name: str, message: Any) -> Iterator[Problem]:
    if not isinstance(message, dict):
        yield _mistyped(name, message, "an object with role and content")
        return
    role, content = message.get("role"), message.get("content")
    if role is None:
        yield _missing(f"{name}.role", message)
    elif not isinstance(role, str) or role not in ROLES:
        yield _mistyped(f"{name}.role", role, f"one of {', '.join(ROLES)}")
    # An assistant's turn that only calls tools has no content.
    if content is None and not message.get("tool_calls"):
        yield _missing(f"{name}.content", message)
    elif content is not None and not isinstance(content, str):
        yield _mistyped(f"{name}.content", content, "a text")


def _answer_problems(row: Mapping[str, Any], column: str | None) -> Iterator[Problem]:
    if column is not None:
        if row.get(column) is None:
            yield _missing(column, row)
        return
    reward_model = row.get("reward_model")
    if reward_model is None:
        yield _missing("reward_model", row)
    elif not isinstance(reward_model, dict):
        yield _mistyped("reward_model", reward_model, "an object with ground_truth")
    elif reward_model.get("ground_truth") is None:
        yield _missing("reward_model.ground_truth", reward_model)


def _field_problems(row: Mapping[str, Any], default_source: str | None) -> Iterator[Problem]:
    data_source, extra_info, tools = row.get("data_source"), row.get("extra_info"), row.get("tools")
    if data_source is None:
        if default_source is None:
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
