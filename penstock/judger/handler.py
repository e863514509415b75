"""Where a reward function is found again: by module and name, or by file and name.

Worker processes import the function themselves; nothing is pickled. So it must be reachable by a name, which a lambda,
a closure and a bound method are not.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.config import dotted_name
from penstock.errors import ConfigError
from penstock.judger.worker import Setup, describe_error, load_function

Handler = Callable[..., Any] | str
"""A function, `package.module.name`, `package.module:name`, or `path/to/file.py:name`."""


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def resolve_handler(handler: Handler) -> Callable[..., Any]:
    """The function itself. Raises ConfigError when a name leads nowhere."""
    if not isinstance(handler, str):
        return handler
    try:
        return load_function(_named(handler))
    except Exception as error:
        raise ConfigError(f"{handler!r} cannot be loaded: {describe_error(error)}") from error


def locate_handler(handler: Handler, *, takes_verdicts: bool = False) -> Setup:
    """What a worker needs to load it. Raises ConfigError with the reason when no worker could."""
    if isinstance(handler, str):
        resolve_handler(handler)
        found = _named(handler)
    else:
        found = _source_of(handler)
    return Setup(
        module=found.module,
        file=found.file,
        name=found.name,
        takes_verdicts=takes_verdicts,
        sys_path=tuple(entry or str(Path.cwd()) for entry in sys.path)
        + ((str(Path(found.file).parent),) if found.file else ()),
    )


VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
"""The names by which verl gives a reward function what it may ask for."""

_FOREIGN = {
    "completions": "TRL's: it gets lists of a whole batch",
    "solution_strs": "that of verl's batch manager: it gets lists of a whole batch",
    "queries": "OpenRLHF's: it gets lists of a whole batch",
}
"""Parameters by which a reward function of another framework is known that cannot be called for one answer."""


def keyword_names(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """The names by which a reward function written for verl is called; None when it is called in order, as ours are.

    verl's order is not ours: its first parameter may be the data source, and its third a setting.
    """
    parameters = _parameters(function)
    if "solution_str" not in parameters:
        return None
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return VERL_NAMES
    return tuple(name for name in VERL_NAMES if name in parameters)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function without a readable signature
        return {}


def _call_problems(function: Callable[..., Any]) -> Iterator[str]:
    """Why it cannot be called with an answer, its label and the row's extra information."""
    names = keyword_names(function)
    called_as = "(response, label, extra_info)"
    parameters = _parameters(function)
    for name, whose in _FOREIGN.items():
        if name in parameters:
            yield (
                f"has the parameter {name!r}, so its signature is {whose}; it is called as {called_as}, once per "
                "answer: write a function of that form which calls it"
            )
            return
    if names is None and next(iter(parameters), None) == "data_source":
        yield (
            f"has the first parameter 'data_source', but it is called as {called_as}; name the parameters as verl does "
            f"({', '.join(VERL_NAMES)}), or write a function of that form which calls it"
        )
        return
    try:
        if names is None:
            inspect.signature(function).bind("response", "label", {})
        else:
            inspect.signature(function).bind(**dict.fromkeys(names))
    except TypeError as error:
        shown = called_as if names is None else f"({', '.join(f'{name}=...' for name in names)}), as verl does"
        yield f"is called as {shown}: {error}"
    except ValueError:
        pass  # a function without a readable signature


def handler_problems(handler: Handler, *, field: str, merges: bool = False) -> Iterator[str]:
    """Why this function cannot be used, for `Config.problems`."""
    try:
        function = resolve_handler(handler)
        if not is_async(function):
            locate_handler(handler)
    except ConfigError as error:
        yield from (f"{field}: {problem}" for problem in error.problems)
        return
    for problem in () if merges else _call_problems(function):
        yield f"{field}: {dotted_name(function)} {problem}"
    for module, extra in getattr(function, "penstock_needs", ()):
        if importlib.util.find_spec(module) is None:
            yield f"{field}: {dotted_name(function)} needs {module}; install it with: pip install 'penstock[{extra}]'"


def _foreign(parameters: list[str]) -> str:
    """What is wrong with a function written for another framework; its first arguments would be taken for ours."""
    called = "is called as (response, label, extra_info)"
    if {"solution_str", "data_source"} & set(parameters):
        return (
            f"is written for verl and {called}: give a function that passes them on, "
            "`def reward(response, label, extra_info): return compute_score(SOURCE, response, label, extra_info)`"
        )
    if "completions" in parameters:
        return (
            f"is written for TRL and {called}: give a function that passes them on, "
            "`def reward(response, label, extra_info): return f(prompts=[...], completions=[response], ...)[0]`"
        )
    return ""


def handler_name(handler: Handler) -> str:
    return handler if isinstance(handler, str) else dotted_name(handler)


def _named(handler: str) -> Setup:
    home, colon, name = handler.rpartition(":")
    if colon and home.endswith(".py"):
        return Setup(file=str(Path(home).resolve()), name=name)
    module, _, name = handler.replace(":", ".").rpartition(".")
    if not module:
        raise ConfigError(f"{handler!r} names no module; write 'package.module.name' or 'file.py:name'")
    return Setup(module=module, name=name)


def _source_of(function: Callable[..., Any]) -> Setup:
    name = getattr(function, "__qualname__", "")
    module_name = getattr(function, "__module__", None) or ""
    if not name or not module_name:
        raise _refusal(function, f"it is an object of class {type(function).__name__}")
    if "<lambda>" in name:
        raise _refusal(function, "it is a lambda")
    if "<locals>" in name:
        raise _refusal(function, "it is defined inside another function")
    if inspect.ismethod(function) and not inspect.isclass(function.__self__):
        raise _refusal(function, "it is a method of an object")
    module = sys.modules.get(module_name)
    if module is not None and _lookup(module, name) != function:
        raise _refusal(function, f"{module_name}.{name} is something else")
    file = getattr(module, "__file__", None) or _code_file(function)
    if module_name != "__main__" and _leads_to(module_name, file):
        return Setup(module=module_name, name=name)
    if file is not None and Path(file).is_file():
        return Setup(file=str(Path(file).resolve()), name=name)
    raise _refusal(function, f"its module {module_name!r} cannot be imported and it has no file")


def _refusal(function: Callable[..., Any], reason: str) -> ConfigError:
    return ConfigError(
        f"{dotted_name(function)} cannot run in a worker process: {reason}, so it cannot be imported there by name; "
        "define it at the top level of a module or of the configuration file"
    )


def _lookup(module: Any, name: str) -> Any:
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _code_file(function: Callable[..., Any]) -> str | None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else str(code.co_filename)


def _leads_to(module_name: str, file: str | None) -> bool:
    """Whether importing this name in a fresh process finds this file. `sys.modules` does not count: it is not fresh."""
    spec: importlib.machinery.ModuleSpec | None = None
    search: Any = None
    path = ""
    for part in module_name.split("."):
        path = f"{path}.{part}" if path else part
        spec = _find_spec(path, search)
        if spec is None:
            return False
        search = spec.submodule_search_locations
    if file is None:
        return True
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == Path(file).resolve()


def _find_spec(module_name: str, search: Any) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(module_name, search)
        except (ImportError, ValueError, AttributeError):
            continue
        if spec is not None:
            return spec
    return None
