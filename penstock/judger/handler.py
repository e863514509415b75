"""Where a reward function is found again: by module and name, or by file and name.

Worker processes import the function themselves; nothing is pickled. So it must be reachable by a name, which a lambda,
a closure and a bound method are not.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from penstock.config import dotted_name
from penstock.errors import ConfigError
from penstock.judger import rewards
from penstock.judger.calling import Calling, Merging
from penstock.judger.worker import Kind, Setup, describe_error, load_function

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
    except (Exception, SystemExit) as error:  # a script that ends when it is imported must not end this process
        raise ConfigError(f"{handler!r} cannot be loaded: {describe_error(error)}") from error


def locate_handler(handler: Handler, *, kind: Kind = "judge", hooks: tuple[str, ...] = ()) -> Setup:
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
        kind=kind,
        hooks=hooks,
        sys_path=tuple(entry or str(Path.cwd()) for entry in sys.path)
        + ((str(Path(found.file).parent),) if found.file else ()),
    )


def handler_problems(handler: Handler, *, field: str, calling: Callable[[Any], Calling | Merging]) -> Iterator[str]:
    """Why this function cannot be used, for `Config.problems`. `calling` says how it is called."""
    try:
        function = resolve_handler(handler)
        if not is_async(function):
            locate_handler(handler)
    except ConfigError as error:
        yield from (f"{field}: {problem}" for problem in error.problems)
        return
    if inspect.isclass(function):
        yield (
            f"{field}: {dotted_name(function)} is a class, and calling it makes an object and no score; give a "
            "function, such as a static method of it"
        )
        return
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        yield f"{field}: {dotted_name(function)} is a generator; it must return what it has to say, and not yield it"
    for problem in calling(function).problems(function):
        yield f"{field}: {dotted_name(function)} {problem}"
    for module, extra in getattr(function, "penstock_needs", ()):
        if importlib.util.find_spec(module) is None:
            yield f"{field}: {dotted_name(function)} needs {module}; install it with: pip install 'penstock[{extra}]'"


def handler_name(handler: Handler) -> str:
    return handler if isinstance(handler, str) else dotted_name(handler)


def _named(handler: str) -> Setup:
    home, colon, name = handler.rpartition(":")
    if colon and home.endswith(".py"):
        return Setup(file=str(Path(home).resolve()), name=name)
    module, _, name = handler.replace(":", ".").rpartition(".")
    if not module:
        known = f" Penstock's own is '{rewards.__name__}.{name}'." if hasattr(rewards, name) else ""
        raise ConfigError(f"{handler!r} names no module; write 'package.module.name' or 'file.py:name'.{known}")
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
