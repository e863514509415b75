"""What the code under test is made to do: run as a program, answer a call, or serve its functions to tests elsewhere.

Everything here runs beside code that may do anything to it, so nothing here is believed: a program's output, a call's
value and a served answer are claims, and are compared with the right ones where the code cannot reach.
"""

from __future__ import annotations

import operator
import os
import struct
import sys
from collections.abc import Callable
from typing import Any

from . import wire

PEER = 61
"""The descriptor of the socket to the sandbox with the tests."""
MAX_MESSAGE = 8 << 20


def act(job: dict[str, Any], given: Any, result: int) -> None:
    """In the child that runs the code."""
    code = compile(job["code"], "<answer>", "exec")
    if job["role"] == "program":
        os.close(result)
        exec(code, _module("__main__"))
    elif job["role"] == "call":
        names = _module("answer")
        exec(code, names)
        value = _function(names, job["function"])(*wire.unpack(given))
        with os.fdopen(result, "wb") as file:
            file.write(wire.dumps(wire.pack(value)))
    else:
        os.close(result)
        serve(code)


def _module(name: str) -> dict[str, Any]:
    """Names for the code, as a module that it and `pickle` can find by its name."""
    module = type(sys)(name)
    sys.modules[name] = module
    return module.__dict__


def _function(names: dict[str, Any], name: str) -> Any:
    """Of the module, or a method of `Solution`, as some problems want it."""
    if name not in names and "Solution" in names:
        return getattr(names["Solution"](), name)
    if name not in names:
        raise NameError(f"there is no {name}")
    return names[name]


def read_message(descriptor: int) -> Any:
    """Raises EOFError when the other side is gone, ValueError for nonsense."""
    (size,) = struct.unpack(">I", _read(descriptor, 4))
    if size > MAX_MESSAGE:
        raise ValueError(f"a message of {size} bytes")
    return wire.loads(_read(descriptor, size))


def _read(descriptor: int, size: int) -> bytes:
    body = b""
    while len(body) < size:
        chunk = os.read(descriptor, min(size - len(body), 1 << 16))
        if not chunk:
            raise EOFError
        body += chunk
    return body


def write_message(descriptor: int, message: Any) -> None:
    body = wire.dumps(message)
    view = memoryview(struct.pack(">I", len(body)) + body)
    while view:
        view = view[os.write(descriptor, view) :]


class Served:
    """The objects that the tests hold handles of."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._objects: list[Any] = []

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        try:
            arguments = [wire.unpack(said, self._find) for said in asked["arguments"]]
            keywords = {name: wire.unpack(said, self._find) for name, said in asked["keywords"].items()}
            value = self._do(asked["do"], arguments, keywords)
            changed = {
                place: wire.pack(argument, self._refer)
                for place, argument in enumerate(arguments)
                if isinstance(argument, list | dict | set)
            }
            return {"value": wire.pack(value, self._refer), "changed": changed}
        except Exception as error:
            kind = next((c.__name__ for c in type(error).__mro__ if c.__module__ == "builtins"), "Exception")
            return {"raised": kind, "said": str(error)[:500]}

    def _do(self, what: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if what == "global":
            (name,) = arguments
            return self._names[name]
        if what == "call":
            function, *rest = arguments
            return function(*rest, **keywords)
        actions: dict[str, Callable[..., Any]] = {
            "getattr": getattr,
            "setattr": setattr,
            "isinstance": isinstance,
            "len": len,
            "iter": iter,
            "next": next,
            "bool": bool,
            "str": str,
            "repr": repr,
        }
        return (actions.get(what) or getattr(operator, what))(*arguments)

    def _refer(self, value: Any) -> int:
        self._objects.append(value)
        return len(self._objects) - 1

    def _find(self, handle: Any) -> Any:
        if not isinstance(handle, int) or not 0 <= handle < len(self._objects):
            raise ValueError("an unknown handle")
        return self._objects[handle]


def serve(code: Any) -> None:
    """Until the tests are over."""
    names = _module("answer")
    exec(code, names)
    served = Served(names)
    write_message(PEER, {"ready": True})
    while True:
        try:
            asked = read_message(PEER)
        except EOFError:
            return
        write_message(PEER, served.answer(asked))
