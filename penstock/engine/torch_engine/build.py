"""A model directory becomes a running engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from penstock.engine.torch_engine.engine import EmbeddedEngine
from penstock.engine.torch_engine.forward import FusedModel
from penstock.engine.torch_engine.lanes import LaneTeam
from penstock.engine.torch_engine.model import LanguageModel
from penstock.engine.torch_engine.scheduler import Finish, Scheduler
from penstock.errors import ModelError
from penstock.models.arithmetic import choose, work_of
from penstock.models.bfloat16 import keep_onednn_alive
from penstock.models.context import attention_window, rope_limit
from penstock.models.cores import ThreadCount
from penstock.models.families import describe, is_like_llama, read_weights
from penstock.models.load import load_causal_lm
from penstock.models.threads import Team, release_threads
from penstock.ports import Tokenizer

if TYPE_CHECKING:
    from penstock.engine.config import EmbeddedEngineConfig


def build_engine(
    config: EmbeddedEngineConfig,
    model_dir: str,
    tokenizer: Tokenizer,
    *,
    deterministic: bool,
    threads: int | None,
    most_threads: int | None = None,
) -> EmbeddedEngine:
    """It computes with at most `threads`; with `most_threads` those are its for certain, and more while they are idle.
    In a deterministic run the number is fixed."""
    model, limit = load_model(config, model_dir, deterministic=deterministic)
    release_threads()
    max_context = limit if config.max_context is None else config.max_context
    if max_context > limit:
        raise ModelError(f"max_context is {max_context}; the model in {model_dir} has {limit}")

    def make_scheduler(finish: Finish) -> Scheduler:
        return Scheduler(
            model,
            finish,
            max_running=config.max_running,
            max_context=max_context,
            prefill_chunk_tokens=config.prefill_chunk_tokens,
            stop_ids=tokenizer.stop_ids,
            deterministic=deterministic,
        )

    return EmbeddedEngine(
        make_scheduler,
        tokenizer,
        model_dir=Path(model_dir),
        vocab_size=model.vocab_size,
        max_context=max_context,
        team=_team(model, threads or torch.get_num_threads(), most_threads, deterministic=deterministic),
    )


def _team(model: LanguageModel, threads: int, most_threads: int | None, *, deterministic: bool) -> Team | LaneTeam:
    if deterministic:
        # Kernels split rows among threads; a power of two splits them at the same places for every row count used.
        fixed = 1 << (threads.bit_length() - 1)
        return Team(ThreadCount.of(fixed, fixed=True))
    team = Team(ThreadCount.of(threads, most_threads))
    return LaneTeam(team, model.lanes) if isinstance(model, FusedModel) and model.device.type == "cpu" else team


def load_model(config: EmbeddedEngineConfig, model_dir: str, *, deterministic: bool) -> tuple[LanguageModel, int]:
    """The model in the engine's layout, and how many tokens it can hold."""
    device, directory = torch.device(config.device), Path(model_dir)
    keep_onednn_alive()
    try:
        described = describe(directory)
        fused = config.fused and is_like_llama(described)
        state = read_weights(directory, described) if fused else None
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(f"the model in {model_dir} cannot be loaded as a causal language model: {error}") from error
    work = work_of(described, rows=config.max_running, packed=config.packed) if fused else None
    dtype = choose(config.dtype, work, deterministic=deterministic, device=config.device).torch_dtype
    model: LanguageModel
    if fused:
        state = load_causal_lm(directory).state_dict() if state is None else state
        model = FusedModel(described, state, dtype, device, deterministic=deterministic, packed=config.packed)
    else:
        # Imported here: it brings the modules of transformers, which take seconds.
        from penstock.engine.torch_engine.generic import GenericModel

        model = GenericModel(load_causal_lm(directory), dtype, device, deterministic=deterministic)
    return model, _context(described.get_text_config())


def _context(config: Any) -> int:
    lengths = [getattr(config, "max_position_embeddings", None), rope_limit(config.to_dict())]
    kinds = getattr(config, "layer_types", None)
    if kinds is None or any(kind != "full_attention" for kind in kinds):
        lengths.append(attention_window(config))
    return min((length for length in lengths if length), default=1 << 20)
