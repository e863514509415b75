"""Writes `docs/reference.md`, every field of every configuration and what a resume may change, and `docs/metrics.md`.

    make reference

All of it is read from the code: fields and their docstrings, `trainer/metric_names.py`, `trainer/config_changes.py`. A
test compares the pages with what this makes of the code as it is.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import itertools
import pkgutil
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

import penstock
from penstock.config import Config, dotted_name
from penstock.rollout import SampleParams
from penstock.trainer.config_changes import NEVER, harmless_fields
from penstock.trainer.metric_names import METRICS, unit

PAGE = Path(__file__).with_name("reference.md")
METRICS_PAGE = Path(__file__).with_name("metrics.md")
ROOMS = {
    "trainer": "The run",
    "engine": "Engines",
    "learn": "Learning",
    "produce": "Tasks and production",
    "agent_loop": "Agent loops",
    "judger": "Judges",
    "data": "Datasets",
    "replay": "The replay buffer",
}
"""In the order of the page; a room that is not here comes after them."""
HEAD = """\
# Reference

Made from the code by `make reference`; do not edit it. A field is set where its configuration is made, or with `--set`
by its path from the trainer on: `--set train.lr=2e-5`, `--set manager.tasks.0.weight=2`.
"""
METRICS_HEAD = """\
# Metrics

Made from the code by `make reference`; do not edit it. One line per step (`kind` is `train`) and per evaluation
(`eval`) in `metrics.jsonl`, and the same in every other [tracker](trackers.md). A name in angle brackets stands for
what differs: a task, a reason, a number. `eval/greedy_...` are those of the greedy answers. What is not here is yours:
of a loss function (`train/<name>`), of `compute_metric_func` (`eval/<name>`), or of a judger.

A share is of 1. Nats are of the natural logarithm. "Since the last batch" is since the batch before was taken.
"""


def page() -> str:
    sections = [HEAD]
    by_room: dict[str, list[type[Config]]] = {room: [] for room in ROOMS}
    for found in configurations():
        by_room.setdefault(found.__module__.split(".")[1], []).append(found)
    for room, classes in by_room.items():
        sections.append(f"## {ROOMS.get(room, room.replace('_', ' ').capitalize())}\n")
        sections += [section(found) for found in classes]
    sections.append(sampling())
    sections.append(changes())
    return "\n".join(sections)


def configurations() -> list[type[Config]]:
    """Every configuration of the package, in the order of its files."""
    for module in pkgutil.walk_packages(penstock.__path__, "penstock."):
        parts = module.name.split(".")
        # Recipes and commands define none; what begins a process when it is imported is no library.
        if parts[1] not in ("recipes", "cli", "testing") and parts[-1] != "__main__" and "torch_engine" not in parts:
            source = importlib.util.find_spec(module.name)
            origin = Path(source.origin) if source is not None and source.origin is not None else None
            if origin is not None and origin.suffix == ".py" and "Config)" in origin.read_text():
                importlib.import_module(module.name)
    # Recipes may have been imported by whoever asks; what they define is theirs.
    packages = {cls: cls.__module__.split(".")[:2] for cls in _subclasses(Config)}
    found = {cls for cls, package in packages.items() if package[0] == "penstock" and package[1:] != ["recipes"]}
    return sorted(found, key=lambda cls: (cls.__module__, inspect.getsourcelines(cls)[1]))


def section(cls: type[Config]) -> str:
    own = [name for name in inspect.get_annotations(cls) if name in cls.model_fields]
    bases = [base.__name__ for base in cls.__mro__[1:] if issubclass(base, Config) and base is not Config]
    lines = [f"### {cls.__name__}\n"]
    if cls.__doc__ and cls.__doc__ != getattr(cls.__base__, "__doc__", None):
        lines.append(f"{inspect.cleandoc(cls.__doc__)}\n")
    if bases:
        lines.append(f"With the fields of {' and '.join(f'`{base}`' for base in bases)}.\n")
    if own:
        lines += ["| field | type | default | |", "|---|---|---|---|"]
        lines += [_row(name, *_field(cls, name), doc_of(cls, name)) for name in own]
        lines.append("")
    return "\n".join(lines)


def sampling() -> str:
    lines = ["## Sampling\n", "### SampleParams\n", f"{inspect.cleandoc(SampleParams.__doc__ or '')}\n"]
    lines += ["| field | type | default | |", "|---|---|---|---|"]
    for found in msgspec.structs.fields(SampleParams):
        lines.append(_row(found.name, type_name(found.type), repr(found.default), doc_of(SampleParams, found.name)))
    return "\n".join([*lines, ""])


def metrics_page() -> str:
    lines = [METRICS_HEAD, "| metric | unit | |", "|---|---|---|"]
    lines += [f"| `{name}` | {unit(name)} | {_cell(text)} |" for name, text in METRICS.items()]
    return "\n".join([*lines, ""])


def changes() -> str:
    lines = [
        "## What a resume may change\n",
        "Every other change is refused, unless `--allow-change FIELD` is given.\n",
    ]
    lines += ["| field | why |", "|---|---|"]
    for reason, fields in harmless_fields().items():
        lines.append(f"| {', '.join(f'`{field}`' for field in fields)} | {reason} |")
    lines += [f"\n`{field}` cannot be allowed: {reason}." for field, reason in NEVER.items()]
    return "\n".join([*lines, ""])


def doc_of(cls: type, name: str) -> str:
    """The docstring of a field, of the class that says the most special thing about it."""
    for base in cls.__mro__:
        if base.__module__.startswith("penstock") and (found := _attribute_docs(base).get(name)):
            return found
    return ""


def type_name(kind: Any) -> str:
    """As one would say it."""
    if kind is None or kind is type(None):
        return "None"
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_name(part) for part in parts))
    if origin is typing.Literal:
        return ", ".join(f"`{part!r}`" for part in parts)
    if origin is typing.Annotated:
        return type_name(parts[0])
    if origin is Callable or kind is Callable:
        return "function"
    if origin is type:
        return f"subclass of {type_name(parts[0])}"
    if origin is not None:
        inner = " to ".join(type_name(part) for part in parts if part is not ...)
        return f"{origin.__name__.lower()} of {inner}"
    return str(getattr(kind, "__name__", kind))


def _field(cls: type[Config], name: str) -> tuple[str, str]:
    field = cls.model_fields[name]
    bounds = [
        f"{sign} {limit:,}" if isinstance(limit, int) else f"{sign} {limit:g}"
        for rule in field.metadata
        for key, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        if (limit := getattr(rule, key, None)) is not None
    ]
    kind = f"{type_name(field.annotation)}{', ' if bounds else ''}{', '.join(bounds)}"
    if field.is_required():
        return kind, "required"
    return kind, _shown(field.get_default(call_default_factory=True, validated_data={}))


def _shown(value: Any) -> str:
    if isinstance(value, Config):
        kind = type(value)
        given = {name: getattr(value, name) for name in kind.model_fields if name in value.model_fields_set}
        return f"`{kind.__name__}({', '.join(f'{name}={_plain(item)}' for name, item in given.items())})`"
    if isinstance(value, list):
        return f"[{', '.join(_shown(item) for item in value)}]"
    if callable(value) and not isinstance(value, type):
        return f"`{dotted_name(value)}`"
    return f"`{value!r}`"


def _plain(value: Any) -> str:
    return _shown(value).strip("`")


def _row(name: str, kind: str, default: str, doc: str) -> str:
    return f"| `{name}` | {_cell(kind)} | {_cell(default)} | {_cell(doc)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


@functools.cache
def _attribute_docs(cls: type) -> dict[str, str]:
    """The strings that stand below the fields of a class."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    assert isinstance(tree.body[0], ast.ClassDef)
    found = {}
    for field, text in itertools.pairwise(tree.body[0].body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(said))):
                found[name] = said
    return found


def _subclasses(cls: type[Config]) -> Iterator[type[Config]]:
    for found in cls.__subclasses__():
        yield found
        yield from _subclasses(found)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    METRICS_PAGE.write_text(metrics_page(), encoding="utf-8")
    print(f"{PAGE} and {METRICS_PAGE.name} are written")
