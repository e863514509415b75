"""What vLLM finds when it is imported and when it starts its processes. Nothing here imports it."""

from __future__ import annotations

import os
import signal
import sys

WITHOUT_AMX = "PENSTOCK_WITHOUT_AMX"
"""Set where the CPU has AMX and does not describe it, for the processes that vLLM starts."""

_ALWAYS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "HF_HUB_OFFLINE": "1",
}
_ON_CPU = {
    # Two engines would be bound to the same cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The model runs in vLLM's core process: one more process, waiting in a loop, takes a core from the trainer.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def prepare_environment(*, dtype: str, threads: int | None) -> None:
    """Before vLLM is imported, in the process that will start it."""
    import torch

    from penstock.models.bfloat16 import amx_is_hidden

    os.environ.update(_ALWAYS)
    if torch.cuda.is_available():
        return
    os.environ.update(_ON_CPU)
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    if dtype == "bfloat16" and amx_is_hidden():
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
        os.environ[WITHOUT_AMX] = "1"


def die_with_parent() -> None:
    """The kernel ends this process with the one that started it: nobody else would, after a kill -9."""
    if sys.platform == "linux":
        import ctypes

        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
