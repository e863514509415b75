"""How configurations behave: frozen, checked, never written by code.

A configuration is a Python file that composes `XxxConfig` objects. A wrong constructor call raises `ConfigError` with
every problem of that call and the line it stands on; `check` finds what is wrong between fields and between parts,
all at once, before anything is built. Every number is finite and has a largest value: its field's own, or `LARGEST`.
"""

from __future__ import annotations

import difflib
import enum
import functools
import importlib
import inspect
import math
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import pydantic
import pydantic_core

from penstock.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16"]
"""`auto`: what this machine computes the model's products fastest in, tried when a run begins, and float32 where
bfloat16 is not clearly faster, for models without fused passes on a CPU, and in a deterministic run. A run that is
resumed keeps what it began with, also on another machine."""
LARGEST = {
    "seed": 2**63 - 1,
    "*memory*": 10**15,
    "*_bytes": 10**15,
    "num_*": 10**4,
    "over_sample_threshold": 10**3,
    "*": 10**9,
}
"""How large a number may be whose field sets no bound of its own, by the field's name; the first that fits."""
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

    @pydantic.field_validator("*", mode="after")
    @classmethod
    def _numbers_have_an_end(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        name = str(info.field_name)
        field = cls.model_fields[name]
        for number in _numbers(value) if _holds_numbers(field.annotation) else ():
            if not math.isfinite(number):
                raise ValueError("it must be finite")
            if abs(number) > largest(name) and not _has_bound(field):
                raise ValueError(f"it must be at most {largest(name):,}")
        return value

    def problems(self) -> Iterator[str]:
        """What is wrong between the fields of this object. Overridden; nested configurations are asked by `check`."""
        yield from ()

    def check(self) -> None:
        """Raise ConfigError with every problem of this configuration and all it contains."""
        found = [
            f"{path}: {problem}" if path else problem for path, part in all_parts(self) for problem in part.problems()
        ]
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


def largest(field: str) -> int:
    """What a number may be at most in a field of this name that sets no bound of its own."""
    return next(bound for pattern, bound in LARGEST.items() if fnmatchcase(field, pattern))


def nearest(word: str, known: list[str]) -> str:
    """` Did you mean 'x'?`, or the known words when nothing is near; nothing when there is none."""
    if not known:
        return ""
    close = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(sorted(known))}."


def import_name(dotted: str) -> Any:
    """The object at `package.module.name` or `package.module:name`. Raises ConfigError when there is none."""
    module_name, _, name = dotted.replace(":", ".").rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{dotted!r} cannot be imported: {error}{_line_in_module(error)}") from error
    except (Exception, SystemExit) as error:  # whatever a module of the user's does while it is imported
        said = f"{type(error).__name__}: {error}{_line_in_module(error)}"
        raise ConfigError(f"{dotted!r} cannot be imported: {said}") from error


def dotted_name(function: Callable[..., Any]) -> str:
    """Of a function or a class where it is defined; of a partial its function's, of another object its class's.

    What the program itself defines has the name under which others import it: `python my_run.py` and `penstock train
    my_run.py` describe one run.
    """
    if isinstance(function, functools.partial):
        return f"partial({dotted_name(function.func)})"
    named = function if hasattr(function, "__qualname__") else type(function)
    module = named.__module__
    if module == "__main__":
        module = Path(getattr(sys.modules["__main__"], "__file__", None) or module).stem
    return f"{module}.{named.__qualname__}"


def defined_at(function: Callable[..., Any]) -> str:
    """file:line of a function; its name where there is no source."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else dotted_name(function)


def raised_at(error: BaseException, function: Callable[..., Any]) -> str:
    """file:line where a call of this function failed: in its own file, else where it is defined."""
    place = defined_at(function)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == place.rpartition(":")[0]]
    return f"{place.rpartition(':')[0]}:{lines[-1]}" if lines else place


def _line_in_module(error: BaseException) -> str:
    """` (file:line)` where an import failed inside a module; nothing when there is no such module or name."""
    ours = {__file__, importlib.__file__}
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in ours and not frame.filename.startswith("<frozen ")
    ]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def _caller() -> str:
    """file:line of the constructor call, or of the `replace` that makes it, outside this module and pydantic."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename == __file__
        or "pydantic" in frame.f_code.co_filename
        or frame.f_code.co_name in ("__init__", "replace")
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


def _numbers(value: Any) -> Iterator[float]:
    """Those that stand in a field: itself, or in a list, a tuple or a mapping of numbers."""
    if isinstance(value, dict):
        value = list(value.values())
    for item in value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, int | float) and not isinstance(item, bool | enum.Enum):
            yield item


def _holds_numbers(kind: Any) -> bool:
    """Whether numbers are what a field of this type is for; one that takes anything is its owner's business."""
    return kind in (int, float) or any(_holds_numbers(part) for part in typing.get_args(kind))


def _has_bound(field: pydantic.fields.FieldInfo) -> bool:
    return any(
        getattr(rule, "le", None) is not None or getattr(rule, "lt", None) is not None for rule in field.metadata
    )


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Config):
        yield from ((name, getattr(value, name)) for name in type(value).model_fields)
    elif isinstance(value, msgspec.Struct):
        yield from ((name, getattr(value, name)) for name in value.__struct_fields__)
    elif isinstance(value, dict):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(index), item) for index, item in enumerate(value))


def all_parts(value: Any, path: str = "") -> Iterator[tuple[str, Config]]:
    """A configuration and all it contains, each with its path."""
    if isinstance(value, Config):
        yield path, value
    for name, child in _children(value):
        yield from all_parts(child, f"{path}.{name}" if path else name)


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
        raise ConfigError(f"--set {whole}: {where} has no {head!r}.{nearest(head, list(known))}")
    changed = _replace(known[head], rest, new, whole)
    if isinstance(value, Config):
        fields = {name: getattr(value, name) for name in value.model_fields_set} | {head: changed}
        return type(value)(**fields)
    if isinstance(value, msgspec.Struct):
        return _replace_in_record(value, head, changed)
    if isinstance(value, dict):
        return value | {head: changed}
    return type(value)(changed if str(index) == head else item for index, item in enumerate(value))


def _replace_in_record(value: msgspec.Struct, name: str, new: Any) -> Any:
    """As its constructor takes it, which may take more than its fields hold: a text for a list of one."""
    kind, plain = type(value), msgspec.to_builtins(value)
    try:
        return msgspec.convert(plain | {name: new}, kind)
    except msgspec.ValidationError as refused:
        try:
            built = kind(**{**msgspec.structs.asdict(value), name: new})
            return msgspec.convert(msgspec.to_builtins(built), kind)
        except (TypeError, ValueError):
            raise refused from None


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
    if isinstance(value, pydantic.SecretStr | pydantic.SecretBytes):
        return "(secret)"
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Path):
        return str(value)
    return _describe_object(value)


CLASS = "$class"


def to_plain(value: Any) -> Any:
    """Plain data from which `from_plain` makes the same configuration again, in another process.

    Raises ConfigError for what has no place in plain data.
    """
    if isinstance(value, Config):
        fields = {name: to_plain(getattr(value, name)) for name in type(value).model_fields}
        return {CLASS: f"{type(value).__module__}:{type(value).__qualname__}", **fields}
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise ConfigError(f"{value!r} cannot be given to another process; give what it is by name")


def from_plain(value: Any) -> Any:
    """Raises ConfigError when a class is not to be found here, or does not take its fields."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    fields = {key: from_plain(item) for key, item in value.items() if key != CLASS}
    if CLASS not in value:
        return fields
    kind = import_name(value[CLASS])
    if not (isinstance(kind, type) and issubclass(kind, Config)):
        raise ConfigError(f"{value[CLASS]} is no configuration")
    return kind(**fields)


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
