"""Whether this CPU runs what it claims. Some virtual machines announce AMX and then refuse its instructions."""

from __future__ import annotations

import functools
import subprocess
import sys

import torch

from penstock.errors import ModelError

_TRY = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"


def check_bfloat16() -> None:
    """Raises ModelError where a bfloat16 product would kill the process."""
    if torch.cpu.get_capabilities().get("amx_bf16") and not _child_survives():
        raise ModelError(
            "dtype is bfloat16, but this CPU announces AMX instructions and does not run them. Use float32, or set "
            "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment."
        )


@functools.cache
def _child_survives() -> bool:
    # An illegal instruction is a signal that ends the process, so a child has to try.
    return subprocess.run([sys.executable, "-c", _TRY], capture_output=True, timeout=120).returncode == 0
