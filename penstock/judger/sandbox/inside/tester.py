"""Tests that are Python code, run where the code under test cannot reach them.

The functions under test live in another sandbox. Here a name of theirs is a `Remote`: calling it sends the arguments
over and brings a value back, as plain data. So the right answers, which stand in the tests, never go where the code
is; and what the code sends back is compared here, by `==` of plain data that no code of its own can bend.

    remote == plain data      never: an object that claims to equal everything equals nothing
    remote - plain data       is an object again, or nobody believes it: in `abs(f(x) - 5) < 1e-6` it would say 0
    x in remote               its elements come here one by one, and are compared here
    builtins, modules, names that the tests define or import     are never remote
"""

from __future__ import annotations

import ast
import builtins
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from . import wire
from .guest import read_message, write_message


class CodeEnded(BaseException):
    """The other sandbox is gone, or sends nonsense: whatever is being tested has failed."""


class CannotTest(BaseException):
    """The tests themselves cannot be run; the code is not the cause."""


class Peer:
    """The sandbox with the code."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def start(self) -> None:
        """Wait until the code is loaded. Raises CodeEnded when it does not load."""
        self._receive()

    def do(self, what: str, *arguments: Any, **keywords: Any) -> Any:
        """One action over there. Raises what the code raised, as the nearest builtin exception."""
        try:
            message = {
                "do": what,
                "arguments": [wire.pack(argument, _handle_of) for argument in arguments],
                "keywords": {name: wire.pack(value, _handle_of) for name, value in keywords.items()},
            }
        except wire.Unsendable as error:
            raise CannotTest(f"an argument cannot be sent to the code: {error}") from None
        try:
            write_message(self._descriptor, message)
        except OSError:
            raise CodeEnded("it ended before its tests did") from None
        answer = self._receive()
        if "raised" in answer:
            raise _exception(str(answer["raised"]), str(answer.get("said", "")))
        try:
            _take_over(arguments, answer["changed"], self._remote)
            return wire.unpack(answer["value"], self._remote)
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise CodeEnded(f"it answered nonsense: {error}") from None

    def _receive(self) -> dict[str, Any]:
        try:
            answer = read_message(self._descriptor)
        except (EOFError, OSError):
            raise CodeEnded("it ended before its tests did") from None
        except ValueError as error:
            raise CodeEnded(f"it answered nonsense: {error}") from None
        if not isinstance(answer, dict):
            raise CodeEnded("it answered nonsense")
        return answer

    def _remote(self, handle: Any) -> Remote:
        if not isinstance(handle, int):
            raise ValueError("a handle that is no number")
        return Remote(self, handle)


def _handle_of(value: Any) -> int:
    if isinstance(value, Remote):
        handle: int = object.__getattribute__(value, "_handle")
        return handle
    raise wire.Unsendable(f"a {type(value).__name__}")


def _exception(name: str, said: str) -> Exception:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(said)
        except TypeError:  # some need more than a message
            pass
    return RuntimeError(f"{name}: {said}")


def _take_over(arguments: tuple[Any, ...], changed: dict[str, Any], find: Callable[[Any], Any]) -> None:
    """What the code did to lists, dicts and sets that it was given, done to those here."""
    for place, said in changed.items():
        mine, theirs = arguments[int(place)], wire.unpack(said, find)
        if type(mine) is not type(theirs) or mine == theirs:
            continue
        if isinstance(mine, list):
            mine[:] = theirs
        elif isinstance(mine, dict | set):
            mine.clear()
            mine.update(theirs)


class Remote:
    """An object of the code under test. What is done to it happens there; what comes of it is compared here."""

    def __init__(self, peer: Peer, handle: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_handle", handle)
        object.__setattr__(self, "_was_told", False)
        """Whether it was reckoned from plain data of the tests, which may be the right answer."""

    def __getattr__(self, name: str) -> Any:
        return _do("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _do("setattr", self, name, value)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return _do("call", self, *arguments, **keywords)

    def __iter__(self) -> Iterator[Any]:
        iterator = _do("iter", self)
        if not isinstance(iterator, Remote):
            return iter(iterator)
        return _elements(iterator)

    def __next__(self) -> Any:
        return _do("next", self)

    def __contains__(self, item: Any) -> bool:
        return any(element is item or element == item for element in self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and bool(_do("eq", self, other))

    def __hash__(self) -> int:
        return hash(_handle_of(self))

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Remote) and bool(_do("isinstance", instance, self))

    def __len__(self) -> int:
        return int(_do("len", self))

    def __bool__(self) -> bool:
        if _was_told(self):
            raise Disbelieved("whether it is true")
        return bool(_do("bool", self))

    def __str__(self) -> str:
        return str(_do("str", self))

    def __repr__(self) -> str:
        return str(_do("repr", self))


def _elements(iterator: Remote) -> Iterator[Any]:
    while True:
        try:
            yield _do("next", iterator)
        except StopIteration:
            return


def _do(what: str, *arguments: Any, **keywords: Any) -> Any:
    remote = next(argument for argument in arguments if isinstance(argument, Remote))
    return object.__getattribute__(remote, "_peer").do(what, *arguments, **keywords)


def _was_told(value: Any) -> bool:
    return isinstance(value, Remote) and bool(object.__getattribute__(value, "_was_told"))


class Disbelieved(TypeError):
    """Plain data that the code made of plain data of the tests."""

    def __init__(self, what: str) -> None:
        super().__init__(f"an object of the code says {what}, after it was told what the tests compare it with")


def _delegated(what: str) -> Callable[..., Any]:
    def method(self: Remote, *rest: Any) -> Any:
        return _do(what, self, *rest)

    return method


def _reckoned(what: str, reverse: bool = False) -> Callable[..., Any]:
    def method(self: Remote, *rest: Any) -> Any:
        value = _do(what, *((*rest, self) if reverse else (self, *rest)))
        if _was_told(self) or any(_was_told(one) or not isinstance(one, Remote) for one in rest):
            if not isinstance(value, Remote):
                raise Disbelieved(f"what {what} comes to")
            object.__setattr__(value, "_was_told", True)
        return value

    return method


def _ordered(what: str) -> Callable[..., Any]:
    """Among objects of the code; what it says of plain data is nobody's business."""

    def method(self: Remote, other: Any) -> Any:
        return _do(what, self, other) if isinstance(other, Remote) else NotImplemented

    return method


for _name in ["getitem", "setitem", "delitem"]:
    setattr(Remote, f"__{_name}__", _delegated(_name))
for _name in ["neg", "pos", "abs", "invert"]:
    setattr(Remote, f"__{_name}__", _reckoned(_name))
for _name in ["lt", "le", "gt", "ge"]:
    setattr(Remote, f"__{_name}__", _ordered(_name))
for _name in [
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
]:
    # The functions of `operator` for the last ones have an underscore: `and_`.
    _there = f"{_name}_" if _name in ("and", "or") else _name
    setattr(Remote, f"__{_name}__", _reckoned(_there))
    setattr(Remote, f"__r{_name}__", _reckoned(_there, reverse=True))


class _Answer(type(sys)):  # type: ignore[misc]
    """What tests find when they import the code under test as a module."""

    def __init__(self, name: str, peer: Peer) -> None:
        super().__init__(name)
        self.__dict__["_peer"] = peer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self.__dict__["_peer"].do("global", name)
        except KeyError:
            raise AttributeError(f"the code defines no {name}") from None


def needed_names(source: str) -> tuple[set[str], set[str]]:
    """The names that tests use and neither define nor import, and those of them that are used as `name.attribute`.

    Raises SyntaxError.
    """
    used: set[str] = set()
    dotted: set[str] = set()
    bound: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            dotted.add(node.value.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    needed = used - bound - set(dir(builtins))
    return needed, dotted & needed


def test(job: dict[str, Any], result: int, descriptor: int) -> None:
    """Run the tests and write how each went: [passed, what was wrong], or what makes them no tests."""
    outcome: dict[str, Any]
    try:
        outcome = {"tests": _test(job, Peer(descriptor))}
    except CannotTest as error:
        outcome = {"cannot": str(error)[:500]}
    except CodeEnded as error:
        outcome = {"ended": str(error)[:500]}
    sys.stdout.flush()
    with os.fdopen(result, "wb") as file:
        file.write(wire.dumps(outcome))


def _test(job: dict[str, Any], peer: Peer) -> list[list[Any]]:
    tests: list[str] = job["tests"]
    sources = [job["setup"], *tests]
    names: dict[str, Any] = {"__name__": "tests"}
    try:
        needed, dotted = needed_names("\n".join(sources))
        compiled = [compile(source, f"<test {number}>", "exec") for number, source in enumerate(sources)]
    except (SyntaxError, ValueError) as error:
        raise CannotTest(f"the tests are no Python: {error}") from None
    for name in sorted(dotted & sys.stdlib_module_names):
        # Their own, and not what the code under test has under that name.
        names[name] = __import__(name)
    peer.start()
    answer = _Answer("solution", peer)
    sys.modules.update({"solution": answer, "answer": answer})
    for name in sorted(needed - set(names)):
        if job["subjects"] and name not in job["subjects"]:
            continue
        try:
            names[name] = peer.do("global", name)
        except KeyError:
            continue  # a NameError where it is used
    _run(compiled[0], names, cannot=True)
    outcomes: list[list[Any]] = []
    for code in compiled[1:]:
        before = set(names)
        outcomes.append(_outcome(lambda code=code: _run(code, names, cannot=False)))  # type: ignore[misc]
        found = [name for name in names if name not in before and name.startswith("test") and callable(names[name])]
        if found and outcomes[-1][0]:
            outcomes.pop()
            outcomes += [_outcome(names[name]) for name in found]
    return outcomes


def _run(code: Any, names: dict[str, Any], *, cannot: bool) -> None:
    try:
        exec(code, names)
    except ImportError as error:
        raise CannotTest(f"the tests import what is not there: {error}") from None
    except Exception as error:
        if cannot:
            raise CannotTest(f"what comes before the tests raised {type(error).__name__}: {error}") from None
        raise


def _outcome(run: Callable[[], Any]) -> list[Any]:
    try:
        run()
    except (CodeEnded, CannotTest):
        raise
    except BaseException as error:
        return [False, f"{type(error).__name__}: {error}"[:300]]
    return [True, ""]
