"""Tasks of a verifiers v1 taskset, listed by the environment that has verifiers.

A row has what the task says first, and in `extra_info` the key by which the task is found when it is played. What
the task knows besides, such as its answer, stays with verifiers.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic

from penstock.child import child_command
from penstock.data import verifiers_program
from penstock.data.prompts import Limits, OnProgress, Place, PromptScan, PromptSet, PromptSourceConfig
from penstock.environment import PROJECT, child_environment, find_interpreter
from penstock.errors import DatasetError
from penstock.ports import Tokenizer
from penstock.rollout import Prompt

PROGRAM = str(Path(verifiers_program.__file__))
KEY = "verifiers_task"
"""Of `extra_info`: which task a row is."""


class VerifiersTasksetConfig(PromptSourceConfig):
    """A taskset of verifiers, and where verifiers is. Give the same one to `VerifiersAgentLoopConfig`."""

    taskset: str = pydantic.Field(min_length=1)
    """Its name, as in `vf-eval`: that of an installed package, or of a module in `directory`."""
    taskset_arguments: dict[str, Any] = {}
    """Its own settings, as it names them."""
    first: int = pydantic.Field(default=0, ge=0)
    """Tasks before this one are left out."""
    size: int | None = pydantic.Field(default=None, ge=1)
    """How many tasks are taken; None: all that are left."""
    data_source: str = ""
    """What its rows are called; the taskset's name when empty."""
    directory: str = "."
    """Where a taskset is found that is not installed."""
    python: str = ".venv-verifiers/bin/python"
    """The interpreter of the environment that has verifiers, from here or from the project's directory."""
    environment: list[str] = []
    """Variables that its process gets besides those that every program needs; see `penstock.environment`."""
    timeout_s: float = pydantic.Field(default=300.0, gt=0)
    """How long loading the tasks may take."""

    def problems(self) -> Iterator[str]:
        if find_interpreter(self.python) is None:
            yield f"verifiers is not installed: there is no {self.python}; {_how_to_install()}"
        if not Path(self.directory).is_dir():
            yield f"directory is {self.directory!r}; there is no such directory"
        if "id" in self.taskset_arguments:
            yield "taskset_arguments has id; set the field taskset instead"
        try:
            json.dumps(self.taskset_arguments)
        except (TypeError, ValueError) as error:
            yield f"taskset_arguments must be plain data: {error}"

    def settings(self) -> dict[str, Any]:
        """What the program is told of it."""
        return {
            "taskset": {"id": self.taskset, **self.taskset_arguments},
            "agent": {"runtime": {"type": "subprocess"}},
            "first": self.first,
            "size": self.size,
            "directory": str(Path(self.directory).absolute()),
        }

    @property
    def interpreter(self) -> str:
        """`problems` says where there is none."""
        return find_interpreter(self.python) or self.python

    def load(
        self,
        tokenizer: Tokenizer,
        *,
        context: int | None,
        max_tokens: int,
        data_sources: frozenset[str] | None,
        on_progress: OnProgress | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> PromptSet:
        self.check()
        limits = Limits(max_tokens, context, data_sources, tools=tuple(dict(tool) for tool in tools))
        scan = PromptScan(tokenizer, limits, source=f"taskset {self.taskset}", on_progress=on_progress)
        for number, task in enumerate(self._tasks(), start=1):
            scan.add(
                Place(self.taskset, number),
                Prompt(
                    messages=tuple(task["messages"]),
                    data_source=self.data_source or self.taskset,
                    extra_info={KEY: task["key"]},
                ),
            )
        return scan.finish()

    def _tasks(self) -> list[dict[str, Any]]:
        where = f"taskset {self.taskset!r} cannot be used"
        ours, theirs = socket.socketpair()
        with ours:
            process = subprocess.Popen(
                child_command(PROGRAM, self.interpreter, theirs),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=verifiers_environment(self.interpreter, self.environment),
                start_new_session=True,
            )
            theirs.close()
            try:
                heard = _ask(ours, json.dumps(self.settings()).encode() + b"\n", self.timeout_s)
                _, complaint = process.communicate(timeout=10)
            except (TimeoutError, subprocess.TimeoutExpired):
                raise DatasetError(f"{where}: its tasks were not loaded within timeout_s {self.timeout_s:g}") from None
            finally:
                process.kill()
                process.communicate()
        if not heard:
            last = complaint.decode(errors="replace")[-1000:]
            raise DatasetError(f"{where}: its process ended with code {process.returncode}: {last}")
        answer: dict[str, Any] = json.loads(heard)
        if "refused" in answer:
            raise DatasetError(f"{where}: {answer['refused']}")
        tasks: list[dict[str, Any]] = answer["tasks"]
        return tasks


def verifiers_environment(interpreter: str, extra: Sequence[str]) -> dict[str, str]:
    """Nothing of this run; the programs of its environment, `uv` for one, are found first."""
    own = {name: value for name, value in child_environment(extra).items() if not name.startswith("PENSTOCK_")}
    own.pop("PYTHONPATH", None)
    return own | {"PATH": os.pathsep.join([str(Path(interpreter).parent), own.get("PATH", os.defpath)])}


def _ask(channel: socket.socket, settings: bytes, timeout_s: float) -> bytes:
    """All that is said until the other side ends. Raises TimeoutError."""
    until = time.monotonic() + timeout_s
    channel.settimeout(timeout_s)
    chunks = []
    try:
        channel.sendall(settings)
        channel.shutdown(socket.SHUT_WR)
        while chunk := channel.recv(1 << 20):
            chunks.append(chunk)
            channel.settimeout(max(0.001, until - time.monotonic()))
    except ConnectionError:
        return b""
    return b"".join(chunks)


def _how_to_install() -> str:
    if (PROJECT / "Makefile").is_file():
        return "`make setup-verifiers` installs it in .venv-verifiers"
    return "install verifiers and uv in an environment of their own, and give its interpreter as `python`"
