"""What a child process sees of this process's environment: what programs need to start and compute, and no secrets.
Which Python runs it, where that is another environment's.

An engine's process and a judge's worker run models and functions of others. They get the variables named here and
those that a configuration adds by name.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

PROJECT = Path(__file__).parents[1]
"""Where Penstock's Makefile is, when it runs from its sources."""

_NAMES = """
    PATH HOME USER LOGNAME SHELL PWD LANG LANGUAGE TZ TERM TMPDIR TMP TEMP VIRTUAL_ENV CONDA_PREFIX SYSTEMROOT
    GLIBC_TUNABLES REQUESTS_CA_BUNDLE CURL_CA_BUNDLE
"""
_PREFIXES = """
    LC_ XDG_ PYTHON LD_ DYLD_ SSL_CERT_ MALLOC_
    HF_ HUGGINGFACE_ TRANSFORMERS_ TOKENIZERS_ SAFETENSORS_ TORCH PYTORCH_ TRITON_ VLLM_ PENSTOCK_
    CUDA_ NVIDIA_ NCCL_ ROCR_ HIP_ OMP_ GOMP_ KMP_ MKL_ ONEDNN_ DNNL_ OPENBLAS_ BLIS_ NUMEXPR_ ATEN_
"""
_SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIALS")
"""A name that ends like this is passed on only when it is asked for: `HF_TOKEN` is no setting."""


def child_environment(extra: Sequence[str] = ()) -> dict[str, str]:
    """The environment for a child process, with the variables named in `extra` if they are set."""
    return {name: value for name, value in os.environ.items() if name in extra or _is_harmless(name)}


def named_environment(names: Sequence[str]) -> dict[str, str]:
    """Those of these variables that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


def find_interpreter(python: str) -> str | None:
    """The Python at a path from here, or from the project's directory; None where there is none."""
    # Not resolved: a virtual environment is found by the path of its link to the interpreter.
    return next((str(path) for path in (Path.cwd() / python, PROJECT / python) if path.is_file()), None)


@contextlib.contextmanager
def environment_replaced(variables: Mapping[str, str]) -> Iterator[None]:
    """For a library that reads the environment as it starts, and writes into it. Afterwards it is what it was."""
    before = dict(os.environ)
    try:
        _become(variables)
        yield
    finally:
        _become(before)


def _become(variables: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(variables):
        del os.environ[name]
    os.environ.update(variables)


def _is_harmless(name: str) -> bool:
    return (name in _NAMES.split() or name.startswith(tuple(_PREFIXES.split()))) and not name.upper().endswith(_SECRETS)
