"""Others to compare with, each in an environment of its own with exact versions, and how a benchmark talks to them.

A contestant, Penstock too, is a child process: it gets its job once, then one request at a time, so that contestants
can take turns while all of them are warm. They have the same number of threads and never work at the same time. One
that cannot be installed, dies, or does not answer is an error: a comparison without its peer is not a figure.

    python -m peers        (in benchmarks/) makes every environment
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
TORCH = "torch==2.13.0"
"""Installed first and exact: this pin has a wheel for CPUs alone."""
_INSTALL_S = 1800
_BF16 = "import torch; x = torch.ones(256, 256, dtype=torch.bfloat16); (x @ x).sum().item()"


class PeerError(Exception):
    """A peer that could not be installed, died or did not answer."""


def our_python() -> str:
    return sys.executable


@functools.cache
def trl_python() -> str:
    """TRL and the transformers it runs on, installed when they are not there yet."""
    place, requirements = PROJECT / ".peers" / "trl", HERE / "requirements-trl.txt"
    python, stamp = place / "bin" / "python", place / ".ready"
    wanted = hashlib.sha256(f"{TORCH}\n{requirements.read_text()}".encode()).hexdigest()
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"installing TRL into {place}, this once", file=sys.stderr)
        stamp.unlink(missing_ok=True)
        _run([sys.executable, "-m", "venv", "--clear", str(place)])
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*install, TORCH])
        _run([*install, "--no-deps", "-r", str(requirements)])
        _run([str(python), "-c", "import trl, transformers"])
        stamp.write_text(wanted)
    return str(python)


@functools.cache
def vllm_python() -> str:
    """The project's own environment for vLLM."""
    python = PROJECT / ".venv-vllm" / "bin" / "python"
    if not (PROJECT / ".venv-vllm" / ".ready").is_file():
        print("installing vLLM, this once: make setup-vllm", file=sys.stderr)
        _run(["make", "-C", str(PROJECT), "setup-vllm"])
    return str(python)


@functools.cache
def bf16_environment(python: str) -> dict[str, str]:
    """What bfloat16 products of this interpreter's torch need on this CPU.

    Some virtual machines announce AMX without the CPUID leaf that describes it; oneDNN then runs an illegal
    instruction. A child tries it, because that kills a process.
    """
    for extra in ({}, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}):
        code = subprocess.run([python, "-c", _BF16], env={**os.environ, **extra}, capture_output=True).returncode
        if code == 0:
            return extra
        if code != -signal.SIGILL:
            break
    raise PeerError(f"a bfloat16 product ended {python} with code {code}")


class Contestant:
    """A child process that answers requests, one at a time."""

    def __init__(
        self, script: str, job: Mapping[str, Any], *, python: str, start_s: float = 300, project: Path = PROJECT
    ) -> None:
        """Returns when it can be asked: `ready` is its first answer. `threads` of the job is how many it may use.

        `project` is the checkout of Penstock that it runs.
        """
        self.name = job["name"]
        self._scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the contestant
        threads = str(job["threads"])
        environment = {
            **os.environ,
            **bf16_environment(python),
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": str(project),
        }
        self._process = subprocess.Popen(
            [python, str(project / "benchmarks" / "peers" / script)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self.ready = self.ask({"scratch": self._scratch.name, **job}, timeout_s=start_s)

    def ask(self, request: Mapping[str, Any], *, timeout_s: float = 600) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            self.close()
            raise PeerError(f"{self.name} did not answer within {timeout_s} s")
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"{self.name} ended with code {self._process.wait()}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def reset_peak_memory(self) -> None:
        for pid in self._tree():
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def peak_memory_mb(self) -> float:
        """Of the process and those it started, each at its own peak since the reset."""
        return sum(_status_kb(pid, "VmHWM") for pid in self._tree()) / 1024

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def __enter__(self) -> Contestant:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._errors.close()
        self._scratch.cleanup()

    def _tree(self) -> list[int]:
        pids = [self._process.pid]
        for pid in pids:  # grows while it is walked
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                pids += [int(child) for child in task.read_text().split()]
        return pids

    def _last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-3000:]


def take_turns(
    contestants: Mapping[str, Contestant], request: Mapping[str, Any], rounds: int
) -> Iterator[dict[str, dict[str, Any]]]:
    """One answer of each per round, in an order that turns around, so that none always follows the same one."""
    names = list(contestants)
    for number in range(rounds):
        order = names if number % 2 == 0 else names[::-1]
        yield {name: contestants[name].ask(request) for name in order}


@contextlib.contextmanager
def busy_process() -> Iterator[None]:
    """One core's worth of other work, for as long as this lasts."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def report(figure: str, value: float, unit: str = "x", **detail: Any) -> None:
    print(json.dumps({"figure": figure, "value": round(value, 4), "unit": unit, "detail": detail}), flush=True)


def note(text: str) -> None:
    """What goes on, beside the figures."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def _status_kb(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    return 0


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise PeerError(f"{' '.join(command)} ended with code {done.returncode}: {done.stderr[-2000:]}")
