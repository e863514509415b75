"""The program of a worker process: read a call, run a user's function, answer. Judgers, tools and environments use it.

Frames are a 4-byte length and msgpack, over one socket whose descriptor is the first argument; the second is the
parent's process id. What the function prints goes to stderr, so it cannot disturb the channel; that may be a file, and
is then bounded.

    parent -> worker   Setup once, then [call number, arguments] per call; arguments are a list, or a dict by name
    worker -> parent   {"ready": true} or {"failed": reason} once, then one reply per call:
                       {"score": x, "parts": {...}, "text": ...} or {"unjudged": reason, "way": ..., "detail": ...,
                       "plain_bug": ...}, with "call": its number. A function that judges groups is answered for with
                       {"verdicts": [...]} of those; where it is no judge, {"value": x} stands for a score.

Only the standard library and msgspec are imported here: a replacement must be ready in a moment.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import math
import numbers
import os
import select
import signal
import socket
import stat
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

MAX_RESULT = 1 << 20
"""Characters of text in one result; more is a judge gone wrong."""
MAX_PARTS = 100
"""Of a verdict; more is a judge that names its parts after the answer."""
MAX_REASON = 500
MAX_PRINTED = 64 << 20
"""Bytes in a file of what is printed; a function that prints on and on does not fill the disk."""
MAX_DETAIL = 4000
"""Characters of a traceback; the end of a longer one is kept, where the error is."""

PLAIN_BUGS = (TypeError, NameError, AttributeError, ImportError, KeyError, NotImplementedError, SyntaxError)
"""What a reward function raises because it is wrong, and not because of the answer it was given."""

_CALLERS = (__file__, str(Path(__file__).with_name("native.py")), importlib.__file__)

Kind = Literal["judge", "group", "merge", "value", "object"]
Reply = dict[str, Any]
Arguments = list[Any] | dict[str, Any]
"""In order, or by name."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Which function to run, and where to find it."""

    module: str = ""
    file: str = ""
    """Set instead of `module` for a function of a file that no import path leads to, such as a run's configuration."""
    name: str
    sys_path: tuple[str, ...] = ()
    kind: Kind = "judge"
    """What a call is answered with. `judge`: a verdict. `group`: a list of them. `merge`: a verdict, and the function's
    first argument is a mapping of verdicts. `value`: what the function returned. `object`: what a method of one of its
    objects returned; see `Objects`."""
    hooks: tuple[str, ...] = ()
    """Parameters that get a function which does nothing."""
    first: str = ""
    """`module:function`, called before the other one is loaded."""


def load_function(setup: Setup) -> Callable[..., Any]:
    """The function named by `setup`. Raises what its import raises."""
    found: Any = load_file(setup.file) if setup.file else importlib.import_module(setup.module)
    for part in setup.name.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{setup.name} is {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def load_file(file: str) -> Any:
    """The module of a file, once per process. It is registered because dataclasses and pickles look it up by name."""
    name = "penstock_file_" + "".join(c if c.isalnum() else "_" for c in file)
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def as_reply(value: Any) -> Reply:
    """What a reward function returned, checked: a finite score with its parts, or the reason why it is none."""
    parts: dict[str, float] = {}
    text: str | None = None
    score = value
    if hasattr(value, "score") and hasattr(value, "parts"):  # a Verdict; its type is not imported here
        value = {**value.parts, "score": value.score, "text": value.text}
    if isinstance(value, dict):
        size = sum(len(item) for item in (*value.keys(), *value.values()) if isinstance(item, str | bytes))
        if size > MAX_RESULT:
            return {"unjudged": f"returned {size} characters; at most {MAX_RESULT} are taken"}
        if "score" not in value:
            return {"unjudged": f"returned a dict without 'score'; it has {_shorten(sorted(map(str, value)))}"}
        score = value["score"]
        text = value["text"] if isinstance(value.get("text"), str) else None
        for name, part in value.items():
            number = _as_number(part)
            if name == "score" or number is None:
                continue
            if not math.isfinite(number):
                return {"unjudged": f"returned {number} as part {_shorten(name)}; a part must be finite"}
            parts[str(name)] = number
        if len(parts) > MAX_PARTS:
            return {"unjudged": f"returned {len(parts)} parts; at most {MAX_PARTS} are taken, each is a metric"}
    number = _as_number(score)
    if number is None:
        return {"unjudged": f"returned {_shorten(score)} ({type(score).__name__}); a score must be a number"}
    if not math.isfinite(number):
        return {"unjudged": f"returned {number}; a score must be finite"}
    return {"score": number, "parts": parts, "text": text}


def _as_number(value: Any) -> float | None:
    """The value as a float, infinite when it is too large for one; None when it is no number. Text never counts."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a numpy or torch scalar
        value = value.item()
    if not isinstance(value, numbers.Number) or isinstance(value, complex):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None


def describe_error(error: BaseException) -> str:
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be shown)"
    # A lone surrogate cannot be sent or stored.
    return f"raised {type(error).__name__}: {message}"[:MAX_REASON].encode(errors="replace").decode()


def describe_failure(error: BaseException, function: Callable[..., Any] | None) -> Reply:
    """Why a call that raised gave no score, in which way (type and place, equal for equal bugs), and its traceback."""
    import traceback

    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_machinery(frame.filename)]
    inner: Any = function
    while hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
    code = getattr(inner, "__code__", None)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename] or frames
    if own:
        where = f"{own[-1].filename}:{own[-1].lineno}"
    else:  # it was not even entered
        where = "?" if code is None else f"{code.co_filename}:{code.co_firstlineno}"
    shown = [*traceback.format_list(frames[-20:]), *traceback.format_exception_only(error)]
    # A search that found nothing in this answer ends in such an error too.
    about_nothing = "'NoneType' object" in describe_error(error)
    return {
        "unjudged": describe_error(error),
        "way": f"{type(error).__name__} at {where}",
        "detail": "".join(shown)[-MAX_DETAIL:].encode(errors="replace").decode(),
        "plain_bug": isinstance(error, PLAIN_BUGS) and not about_nothing,
        "out_of_memory": isinstance(error, MemoryError),
    }


def _is_machinery(file: str) -> bool:
    """Whether a frame is of those who call the function or import it, which say nothing about it."""
    return file.startswith("<frozen importlib") or file in _CALLERS


def judge_value(value: Any, kind: Kind = "judge") -> Reply:
    """What a reward function returned as a reply, with the way in which it is no score."""
    if kind == "group":
        return judge_values(value)
    reply = as_reply(value)
    return reply | {"way": f"returned {type(value).__name__}"} if "unjudged" in reply else reply


def judge_values(values: Any) -> Reply:
    """What a function returned that judges a group: one score per answer, None where it has none to give."""
    if hasattr(values, "tolist"):  # a numpy array or a torch tensor
        values = values.tolist()
    if not isinstance(values, list | tuple):
        said = f"returned {_shorten(values)} ({type(values).__name__}); it must return one score per answer"
        return {"unjudged": said, "way": f"returned {type(values).__name__}"}
    return {"verdicts": [as_reply(value) if value is not None else {"unjudged": "returned None"} for value in values]}


def _shorten(value: Any) -> str:
    """A short repr. Long text is cut first: the repr of 10 MB takes as much again."""
    if isinstance(value, str | bytes):
        value = value[:80]
    try:
        return repr(value)[:80]
    except Exception:
        return "a value that cannot be shown"


def with_hooks(function: Callable[..., Any], hooks: tuple[str, ...]) -> Callable[..., Any]:
    """The function, given what it wants to log with."""
    return (
        functools.wraps(function)(functools.partial(function, **dict.fromkeys(hooks, _nothing))) if hooks else function
    )


def _nothing(*told: Any, **named: Any) -> None:
    pass


def call_function(function: Callable[..., Any], arguments: Arguments) -> Any:
    return function(**arguments) if isinstance(arguments, dict) else function(*arguments)


def run(function: Callable[..., Any], arguments: Arguments, kind: Kind = "judge") -> Reply:
    try:
        return judge_value(call_function(function, arguments), kind)
    except BaseException as error:  # SystemExit too: a reward function that exits gave no score
        return describe_failure(error, function)


def run_plainly(function: Callable[..., Any], arguments: Arguments) -> Reply:
    try:
        return {"value": call_function(function, arguments)}
    except BaseException as error:
        return describe_failure(error, function)


class Objects:
    """What a class made, each kept under its name. A call is (name, method, arguments).

    `make` makes it, `forget` closes it; a call of one that was never made here, or was lost with another process, is
    answered with {"lost": true}.
    """

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def run(self, make: Callable[..., Any], arguments: Arguments) -> Reply:
        values: Any
        name, method, values = arguments
        try:
            if method == "make":
                self._made[name] = make(**values)
                return {"value": None}
            if method == "forget":
                close = getattr(self._made.pop(name, None), "close", None)
                return {"value": close() if callable(close) else None}
            if name not in self._made:
                return {"lost": True}
            return {"value": getattr(self._made[name], method)(*values)}
        except BaseException as error:
            return describe_failure(error, getattr(make, method, None))


def frame(value: Any) -> bytes:
    body = msgspec.msgpack.encode(value)
    return struct.pack(">I", len(body)) + body


def _reply_frame(reply: Reply) -> bytes:
    try:
        return frame(reply)
    except (TypeError, ValueError, OverflowError) as error:  # text that is not Unicode
        return frame({"unjudged": f"returned what cannot be sent: {describe_error(error)}", "call": reply["call"]})


def _read_exactly(channel: socket.socket, size: int) -> bytes:
    body = bytearray()
    while len(body) < size:
        chunk = channel.recv(min(size - len(body), 1 << 20))
        if not chunk:
            os._exit(0)  # The parent is gone. Not sys.exit: a thread of the reward function could hold that up.
        body += chunk
    return bytes(body)


def _read_frame(channel: socket.socket) -> bytes:
    (size,) = struct.unpack(">I", _read_exactly(channel, 4))
    return _read_exactly(channel, size)


def _die_with_parent(parent: int) -> None:
    """A worker busy in a reward function does not see that the channel closed, so the kernel tells it."""
    if sys.platform == "linux":
        import ctypes

        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(0)


def _guard_group() -> None:
    """Leave a process behind that ends this one's group when it dies, however it dies.

    What the reward function started does not die with it, and the parent that would end the group may be gone too.
    The guard is nobody's child here: a reward function that waits for all its children does not wait for it.
    """
    if os.getpgrp() != os.getpid():  # the group is not this worker's own
        return
    try:
        this = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):  # not Linux, or an old one: the parent ends the group while it lives
        return
    middle = os.fork()
    if middle:
        os.close(this)
        os.waitpid(middle, 0)
        return
    if os.fork():
        os._exit(0)
    # No descriptor but the one it waits on: a pipe whose other end somebody reads must close with the worker.
    os.closerange(0, this)
    os.closerange(this + 1, min(os.sysconf("SC_OPEN_MAX"), 1 << 16))
    select.select([this], [], [])
    os.killpg(0, signal.SIGKILL)


def _show_printed() -> None:
    """What a call printed is in the file when it has ended; a function may have closed or replaced its streams."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        sys.stderr.flush()
        _bound_output()


def _bound_output() -> None:
    if stat.S_ISREG((printed := os.fstat(2)).st_mode) and printed.st_size > MAX_PRINTED:
        os.write(2, f"(more than {MAX_PRINTED >> 20} MiB; nothing more is kept)\n".encode())
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        os.close(nowhere)


def _as_verdicts(arguments: list[Any]) -> list[Any]:
    from penstock.rollout import Verdict

    return [{name: msgspec.convert(verdict, Verdict) for name, verdict in arguments[0].items()}, *arguments[1:]]


def _prepare(setup: Setup) -> Callable[..., Any]:
    sys.path[:] = setup.sys_path
    if setup.first:
        module, _, name = setup.first.partition(":")
        getattr(importlib.import_module(module), name)()
    function = load_function(setup)
    for module, _extra in getattr(function, "penstock_needs", ()):
        importlib.import_module(module)  # now, so that the first call's deadline does not pay for it
    return with_hooks(function, setup.hooks)


def _answering(kind: Kind) -> Callable[[Callable[..., Any], Arguments], Reply]:
    if kind == "value":
        return run_plainly
    return Objects().run if kind == "object" else functools.partial(run, kind=kind)


def main(descriptor: int, parent: int) -> None:
    _die_with_parent(parent)
    _guard_group()
    pid = os.getpid()
    os.set_inheritable(descriptor, False)
    os.dup2(2, 1)
    channel = socket.socket(fileno=descriptor)
    setup = msgspec.msgpack.decode(_read_frame(channel), type=Setup)
    try:
        function = _prepare(setup)
    except BaseException as error:
        failure = describe_failure(error, None)
        channel.sendall(frame({"failed": failure["unjudged"], "detail": failure["detail"]}))
        return
    channel.sendall(frame({"ready": True}))
    answer = _answering(setup.kind)
    while True:
        call, arguments = msgspec.msgpack.decode(_read_frame(channel))
        reply = answer(function, _as_verdicts(arguments) if setup.kind == "merge" else arguments)
        if os.getpid() != pid:
            os._exit(0)  # a child that the function forked and let return; the channel is not its own
        _show_printed()
        channel.sendall(_reply_frame({**reply, "call": call}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
