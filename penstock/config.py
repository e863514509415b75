"""How configurations behave: frozen, checked, never written by code.

A configuration is a Python file that composes `XxxConfig` objects. A wrong constructor call raises `ConfigError` with
every problem of that call and the line it stands on; `check` finds what is wrong between fields and between parts,
all at once, before anything is built.
"""

from __future__ import annotations

import difflib
import enum
import functools
import importlib
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import pydantic
import pydantic_core

from penstock.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16"]
"""`auto`: bfloat16 where this machine computes it several times as fast, else float32; decided at every start, so a run
that is resumed on another machine may go on in the other one."""
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")


class Config(pydantic.BaseModel):
    """Base of every configuration. Unknown keys are refused with the nearest match."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except pydantic.ValidationError as error:
            raise ConfigError(_explain(type(self), error, _caller())) from None

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _numbers_are_no_truth_values(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """pydantic would take True as 1."""
        if isinstance(value, bool) and info.field_name is not None:
            kind = cls.model_fields[info.field_name].annotation
            kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
            if (int in kinds or float in kinds) and bool not in kinds:
                raise ValueError("it must be a number")
        return value

    def problems(self) -> Iterator[str]:
        """What is wrong between the fields of this object. Overridden; nested configurations are asked by `check`."""
        yield from ()

    def check(self) -> None:
        """Raise ConfigError with every problem of this configuration and all it contains."""
        found = [f"{path}: {problem}" if path else problem for path, problem in _all_problems(self, "")]
        if found:
            raise ConfigError(found)

    def replace(self, path: str, value: Any) -> Self:
        """A copy with the field at a dotted path (`train.lr`, `manager.tasks.0.weight`) set. For `--set`."""
        replaced: Self = _replace(self, path.split("."), value, path)
        return replaced

    def describe(self) -> dict[str, Any]:
        """Plain data for `config.json`: each object's fields and its class; functions by their dotted name.

        The same in every process, so that a run can be compared with the one it resumes.
        """
        described: dict[str, Any] = describe(self)
        return described


def nearest(word: str, known: list[str]) -> str:
    """` Did you mean 'x'?`, or the known words when nothing is near."""
    close = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(sorted(known))}."


def import_name(dotted: str) -> Any:
    """The object at `package.module.name` or `package.module:name`. Raises ConfigError when there is none."""
    module_name, _, name = dotted.replace(":", ".").rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{dotted!r} cannot be imported: {error}") from error


def dotted_name(function: Callable[..., Any]) -> str:
    """Of a function or a class where it is defined; of a partial its function's, of another object its class's."""
    if isinstance(function, functools.partial):
        return f"partial({dotted_name(function.func)})"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _caller() -> str:
    """file:line of the constructor call, outside this module and pydantic."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename == __file__
        or "pydantic" in frame.f_code.co_filename
        or frame.f_code.co_name == "__init__"
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _explain(cls: type[Config], error: pydantic.ValidationError, where: str) -> list[str]:
    return [f"{_explain_one(cls, detail)} {where}" for detail in error.errors(include_url=False)]


def _explain_one(cls: type[Config], detail: pydantic_core.ErrorDetails) -> str:
    path = ".".join(str(part) for part in detail["loc"])
    key = f"{cls.__name__}.{path}" if path else cls.__name__
    if detail["type"] == "extra_forbidden":
        return f"{key} is not a field.{nearest(str(detail['loc'][-1]), list(cls.model_fields))}"
    if detail["type"] == "missing":
        return f"{key} is required and was not given."
    rule = detail["msg"].removeprefix("Value error, ")
    return f"{key} is {detail['input']!r}; {rule[0].lower()}{rule[1:]}."


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Config):
        yield from ((name, getattr(value, name)) for name in type(value).model_fields)
    elif isinstance(value, msgspec.Struct):
        yield from ((name, getattr(value, name)) for name in value.__struct_fields__)
    elif isinstance(value, dict):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(index), item) for index, item in enumerate(value))


def _all_problems(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Config):
        yield from ((path, problem) for problem in value.problems())
    for name, child in _children(value):
        yield from _all_problems(child, f"{path}.{name}" if path else name)


def _replace(value: Any, path: list[str], new: Any, whole: str) -> Any:
    if not path:
        return new
    head, *rest = path
    known = dict(_children(value))
    if head == "0" and isinstance(value, Config):
        # One part where a list of them may stand.
        return _replace(value, rest, new, whole)
    if head not in known:
        where = type(value).__name__
        raise ConfigError(f"--set {whole}: {where} has no {head!r}.{nearest(head, list(known)) if known else ''}")
    changed = _replace(known[head], rest, new, whole)
    if isinstance(value, Config):
        fields = {name: getattr(value, name) for name in value.model_fields_set} | {head: changed}
        return type(value)(**fields)
    if isinstance(value, msgspec.Struct):
        return msgspec.convert(msgspec.to_builtins(value) | {head: changed}, type(value))
    if isinstance(value, dict):
        return value | {head: changed}
    return type(value)(changed if str(index) == head else item for index, item in enumerate(value))


def describe(value: Any) -> Any:
    """Plain data of anything that stands in a configuration."""
    if isinstance(value, Config):
        fields = {name: describe(getattr(value, name)) for name in type(value).model_fields}
        return {"class": type(value).__name__, **fields}
    if isinstance(value, dict):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((describe(item) for item in value), key=repr)
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value, order="deterministic", enc_hook=describe)
    if isinstance(value, enum.Enum):
        return describe(value.value)
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Path):
        return str(value)
    return _describe_object(value)


def _describe_object(value: Any) -> Any:
    """The same in every process: no memory address, no order of hashes."""
    if isinstance(value, functools.partial):
        return {"class": dotted_name(value), "args": describe(value.args), "keywords": describe(value.keywords)}
    if hasattr(value, "__qualname__"):
        return dotted_name(value)
    held = getattr(value, "__dict__", None) or {
        name: getattr(value, name) for name in getattr(value, "__slots__", ()) if hasattr(value, name)
    }
    if not held:
        text = repr(value)
        return dotted_name(value) if _ADDRESS.search(text) else text
    # What else it holds may be as large as a model, or refer back.
    return {"class": dotted_name(value), **{name: describe(item) for name, item in held.items() if _is_plain(item)}}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str | int | float | Path | enum.Enum | Config)
