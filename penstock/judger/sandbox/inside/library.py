"""The standard library for code that may open no file: its modules in one archive, read before the code is run.

Extension modules cannot come from there; they are loaded before, all that are of use.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import io
import marshal
import os
import struct
import sys
import zipfile
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "ensurepip", "tkinter", "turtledemo", "site-packages"}
_LEFT_OUT |= {"dist-packages", "__pycache__", "lib-dynload"}
_NOT_LOADED = ("_test", "xx", "_xx", "_tkinter", "_curses", "readline", "_dbm", "_gdbm", "nis", "ossaudiodev", "_crypt")


def pack(archive: str, *directories: str) -> None:
    """The compiled modules of the standard library, and of these directories, as an archive."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed:
        held: set[str] = set()
        for directory in (os.path.dirname(os.__file__), *directories):
            for name, path in _sources(directory):
                if name in held:
                    continue
                with contextlib.suppress(OSError, SyntaxError, ValueError):
                    packed.writestr(name, _compiled(path))
                    held.add(name)


def _compiled(path: str) -> bytes:
    """As Python keeps it beside the module, if that is of this state of it."""
    with contextlib.suppress(OSError), open(importlib.util.cache_from_source(path), "rb") as file:
        flags, seconds, size = struct.unpack("=4xIII", file.read(16))
        found = os.stat(path)
        if flags == 0 and (seconds, size) == (int(found.st_mtime) & 0xFFFFFFFF, found.st_size & 0xFFFFFFFF):
            return file.read()
    with open(path, "rb") as source:
        return marshal.dumps(compile(source.read(), path, "exec", dont_inherit=True))


def _sources(directory: str) -> Iterator[tuple[str, str]]:
    """(name in the archive, path), as in `json/__init__`."""
    for parent, directories, files in os.walk(directory):
        directories[:] = [name for name in directories if name not in _LEFT_OUT]
        for name in files:
            if name.endswith(".py"):
                path = os.path.join(parent, name)
                yield os.path.relpath(path, directory)[: -len(".py")], path


class Library:
    """Finds and loads what `pack` wrote."""

    def __init__(self, archive: str) -> None:
        with open(archive, "rb") as file:
            # In memory: processes that share an open file share their place in it.
            self._archive = zipfile.ZipFile(io.BytesIO(file.read()))
        self._names = set(self._archive.namelist())

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        place = name.replace(".", "/")
        for entry, is_package in ((f"{place}/__init__", True), (place, False)):
            if entry in self._names:
                return importlib.util.spec_from_loader(name, self, origin=entry, is_package=is_package)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None and module.__spec__.origin is not None
        exec(marshal.loads(self._archive.read(module.__spec__.origin)), module.__dict__)


def use(archive: str) -> None:
    """From now on modules come from the archive, and from no directory."""
    library = Library(archive)
    for directory in [path for path in sys.path if os.path.basename(path) == "lib-dynload"]:
        for name in sorted({file.partition(".")[0] for file in os.listdir(directory)}):
            if not name.startswith(_NOT_LOADED):
                with contextlib.suppress(Exception):  # one that does not load here is one that code does not have
                    __import__(name)
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not importlib.machinery.PathFinder]
    sys.meta_path.append(library)
