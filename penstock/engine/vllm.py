"""vLLM behind the `Engine` port, and the only file that imports it. It runs in the process that `server.py` starts.

    VllmEngine            in that process: the port over `AsyncLLM`
    StoredWeightTransfer  in the processes that vLLM starts: reads stored weights where they are, and loads them

What a pause does to each request is in `vllm_door.py`: vLLM pauses as a whole.

A weight update is vLLM's own, always under its pause: `start_weight_update`, `update_weights` with the record that
says where the bytes are, `finish_weight_update` with the model step as the version. vLLM then names the version of
every run of tokens, and that is what an answer reports: not what this file believes is loaded. It does so with the last
token: the earlier pieces of a stream have what was loaded when they arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from vllm import SamplingParams
from vllm.config import VllmConfig, WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError, VLLMServerError
from vllm.inputs import tokens_input
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from penstock.engine.config import VllmEngineConfig
from penstock.engine.requests import ABORTED, FULL, check_request, check_score, rest_of
from penstock.engine.vllm_answers import Answer, Stopwatch, StraddlingStop, seed_of, step_of
from penstock.engine.vllm_door import Door
from penstock.engine.vllm_environment import WITHOUT_AMX, die_with_parent
from penstock.errors import DataFailure, InfrastructureFailure, ModelError, WeightSyncError
from penstock.models.context import rope_limit
from penstock.models.cores import ThreadCount
from penstock.models.resolve import read_json
from penstock.models.rounding import rounded
from penstock.models.threads import Team
from penstock.ports import Completion, EngineStats, GenerateRequest, LoadedWeights, Tokenizer, WeightSource
from penstock.rollout import FailureReason, pack_logprobs, unpack_ids
from penstock.weights.adapter import on_base
from penstock.weights.stored import StoredWeights

BACKEND = "penstock"
CORE_DIED = 70
"""How this process ends when vLLM's own has ended."""


def build_engine(
    config: VllmEngineConfig, model_dir: str, tokenizer: Tokenizer, *, threads: int | None, most_threads: int | None
) -> VllmEngine:
    """Start vLLM and load the model; blocks. The environment was prepared before this file was imported.

    `threads` are its for certain, and up to `most_threads` while the cores for them are idle.
    """
    stats = _Stats()
    limit = rope_limit(read_json(Path(model_dir) / "config.json"))
    if limit is not None and (config.max_context or 0) > limit:
        raise ModelError(f"max_context is {config.max_context}; the model in {model_dir} has {limit}")
    on_gpu = torch.cuda.is_available()
    arguments = AsyncEngineArgs(
        model=model_dir,
        dtype=config.dtype,
        max_num_seqs=config.max_running,
        # vLLM takes the frequencies of long sequences for all of them when it is to serve long ones.
        max_model_len=config.max_context or limit,
        enforce_eager=config.enforce_eager,
        kv_cache_memory_bytes=int(config.kv_cache_gb * (1 << 30)) if config.kv_cache_gb is not None else None,
        enable_prefix_caching=True,
        # On a CPU a prompt is computed in one step: vLLM steps a seeded request's generator back after a part of its
        # prompt, which generators of a CPU cannot do, and that ends the engine.
        enable_chunked_prefill=on_gpu,
        # After temperature: what the trainer computes, and what the sampled token was drawn from.
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        seed=0,
        enable_sleep_mode=on_gpu,
        worker_extension_cls=f"{__name__}.{WorkerExtension.__name__}",
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        disable_log_stats=False,
    )
    llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[lambda *_: stats])
    lent = (most_threads, threads or 1) if most_threads is not None and not on_gpu else None
    return VllmEngine(llm, tokenizer, stats, max_running=config.max_running, can_sleep=on_gpu, lent=lent)


class VllmEngine:
    """The `Engine` port. Belongs to the event loop of its first call."""

    def __init__(
        self,
        llm: AsyncLLM,
        tokenizer: Tokenizer,
        stats: _Stats,
        *,
        max_running: int,
        can_sleep: bool,
        lent: tuple[int, int] | None = None,
    ) -> None:
        """`lent` is the most and the least of threads, where they follow the machine."""
        self._llm = llm
        self._lent = lent
        self._tokenizer = tokenizer
        self._stats = stats
        self._max_running = max_running
        self._vocab_size: int = llm.model_config.get_vocab_size()
        self._stop_ids = [token for token in tokenizer.stop_ids if token < self._vocab_size]
        self._max_context: int = llm.model_config.max_model_len
        self._door = Door(llm, can_sleep=can_sleep, on_change=self._note_work)
        self._loaded_step = 0
        self._numbers = itertools.count()
        self._damage = ""
        """Why the weights cannot be used any more: a load that failed half way."""
        self._generated_tokens = 0
        self._busy = Stopwatch()

    async def generate(self, request: GenerateRequest) -> Completion:
        if (known := self._answer_at_the_door(request)) is not None:
            return known
        answer = Answer(request.request_id, request.on_pause)
        async with contextlib.aclosing(self._outputs(answer, request)) as outputs:
            async for _ in outputs:
                pass
        return answer.completion()

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
        if (known := self._answer_at_the_door(request)) is not None:
            yield known
            return
        answer, sent = Answer(request.request_id, request.on_pause), 0
        async with contextlib.aclosing(self._outputs(answer, request)) as outputs:
            async for finished in outputs:
                piece = answer.piece(sent)
                if piece.ids and not finished:
                    sent += len(piece.ids) // 4
                    yield piece
        yield rest_of(answer.completion(), sent)

    def _answer_at_the_door(self, request: GenerateRequest) -> Completion | None:
        check_request(request, vocab_size=self._vocab_size, max_context=self._max_context)
        self._check_weights()
        if len(request.response_ids) >= 4 * request.params.max_tokens:
            return FULL
        return ABORTED if self._door.paused and request.on_pause == "abort" else None

    async def _outputs(self, answer: Answer, request: GenerateRequest) -> AsyncGenerator[bool, None]:
        """Whatever vLLM sends goes into the answer; whether that was the last of it."""
        given = unpack_ids(request.response_ids).tolist()
        stop = StraddlingStop(self._tokenizer, request.params.stop, given)
        prompt = tokens_input(unpack_ids(request.prompt_ids).tolist() + given)
        with _as_failures(request.request_id):
            async with self._door.passing(answer) as passed:
                if not passed:
                    answer.abort()
                    return
                async for output in self._llm.generate(prompt, self._params(request, len(given)), request.request_id):
                    new = output.outputs[0]
                    answer.take(new, self._loaded_step)
                    self._generated_tokens += len(new.token_ids)
                    if answer.cut is None and (cut := stop.find(answer.ids)) is not None:
                        answer.cut = cut
                        await self._llm.abort(request.request_id)
                    yield output.finished

    async def score(self, ids: bytes) -> bytes:
        """One token fewer than the context: vLLM always makes one more."""
        check_score(ids, vocab_size=self._vocab_size, max_context=self._max_context - 1)
        self._check_weights()
        if len(ids) < 8:
            return b""
        tokens = unpack_ids(ids).tolist()
        name = f"score-{next(self._numbers)}"
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        tables: Any = None
        with _as_failures(name):
            async with self._door.passing(Answer(name, "serve")):
                async for output in self._llm.generate(tokens_input(tokens), params, name):
                    tables = output.prompt_logprobs or tables
        if tables is None or len(tables) != len(tokens):
            raise InfrastructureFailure(f"{name}: vLLM scored nothing", reason=FailureReason.ENGINE_ERROR)
        return pack_logprobs([table[token].logprob for table, token in zip(tables[1:], tokens[1:], strict=True)])

    def _params(self, request: GenerateRequest, given: int) -> SamplingParams:
        params = request.params
        return SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            max_tokens=params.max_tokens - given,
            min_tokens=max(0, params.min_tokens - given),
            stop=list(params.stop),
            stop_token_ids=sorted({*params.stop_token_ids, *self._stop_ids}),
            # The ids that end an answer are the tokenizer's of the run, not what the model's files say.
            ignore_eos=True,
            seed=seed_of(request.seed, request.first_uniform),
            logprobs=0,
            detokenize=bool(params.stop),
            output_kind=RequestOutputKind.DELTA,
        )

    async def pause_generation(self) -> None:
        with _as_failures("pause_generation"):
            await self._door.pause()

    async def continue_generation(self) -> None:
        with _as_failures("continue_generation"):
            await self._door.resume()

    async def abort(self, request_ids: Sequence[str]) -> None:
        with _as_failures("abort"):
            await self._door.abort(request_ids)

    async def sleep(self) -> None:
        """A CPU build has nothing to give up."""
        with _as_failures("sleep"):
            await self._door.sleep()

    async def wake(self) -> None:
        with _as_failures("wake"):
            await self._door.wake()

    async def load_weights(self, source: WeightSource, model_step: int) -> LoadedWeights:
        if not isinstance(source, StoredWeights):
            raise WeightSyncError(f"vLLM loads stored weights only, not {type(source).__name__}; the old ones are kept")
        return await self.load_stored(source, model_step)

    async def load_stored(self, stored: StoredWeights, model_step: int) -> LoadedWeights:
        """vLLM's workers read the bytes themselves. Frozen answers are computed anew under the new weights."""
        async with self._door.control:
            self._check_weights()
            with _as_failures("load_weights"):
                try:
                    if not self._door.frozen:  # also under a request that is served
                        await self._door.freeze()
                    checksum = await self._update_whole(stored, model_step)
                finally:
                    if not self._door.frozen and not self._damage:
                        await self._llm.resume_generation()
        return LoadedWeights(model_step=model_step, checksum=checksum)

    async def _update_whole(self, stored: StoredWeights, model_step: int) -> str:
        try:
            checksum = await self._update(stored, model_step)
        except asyncio.CancelledError:
            self._damage = f"loading weights {model_step} was cancelled half way"
            raise
        self._loaded_step = model_step
        return checksum

    async def _update(self, stored: StoredWeights, model_step: int) -> str:
        update = {"stored": msgspec.json.encode(stored).decode()}
        await self._llm.start_weight_update()
        try:
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=update))
        except VLLMServerError:
            raise
        except Exception as error:
            raise await self._refusal(model_step, error) from error
        await self._llm.finish_weight_update(weight_version=str(model_step))
        # Also the cache of frozen answers: siblings that come later would reuse keys of the old weights.
        await self._llm.reset_prefix_cache(reset_running_requests=True)
        received = {worker["checksum"] for worker in await self._llm.collective_rpc("weights_received")}
        if len(received) != 1:
            self._damage = f"vLLM's workers received different weights: {sorted(received)}"
            raise WeightSyncError(self._damage)
        return str(received.pop())

    async def _refusal(self, model_step: int, error: Exception) -> WeightSyncError:
        workers = await self._llm.collective_rpc("weights_received")
        if all(worker["intact"] for worker in workers):
            return WeightSyncError(f"weights {model_step} refused, the old ones are kept: {error}")
        self._damage = f"loading weights {model_step} failed half way: {error}"
        return WeightSyncError(self._damage)

    async def model_step(self) -> int:
        self._check_weights()
        with _as_failures("model_step"):
            return step_of(await self._llm.get_weight_version())

    async def check_health(self) -> None:
        """Asks vLLM's core, which answers between two steps, and looks at the machine then."""
        self._check_weights()
        with _as_failures("check_health"):
            await self._llm.check_health()
            await self._llm.get_weight_version()
            if self._lent is not None:
                await self._llm.collective_rpc("follow_machine", args=self._lent)

    async def stats(self) -> EngineStats:
        inside = len(self._door.inside)
        running = min(inside, self._max_running)
        return EngineStats(
            running=running,
            waiting=inside - running + len(self._door.before),
            generated_tokens=self._generated_tokens,
            busy_seconds=self._busy.seconds(),
            cache_use=self._stats.cache_use if inside else 0.0,
        )

    async def close(self) -> None:
        await asyncio.to_thread(self._llm.shutdown, 1.0)

    def _check_weights(self) -> None:
        if self._damage:
            raise InfrastructureFailure(
                f"{self._damage}; the engine must be restarted", reason=FailureReason.WEIGHTS_DAMAGED
            )

    def _note_work(self) -> None:
        self._busy.run(bool(self._door.inside) and not self._door.frozen)


class _Stats(StatLoggerBase):
    """The last word of vLLM's scheduler."""

    def __init__(self) -> None:
        self.cache_use = 0.0

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        if scheduler_stats is not None:
            self.cache_use = float(scheduler_stats.kv_cache_usage)

    def log_engine_initialized(self) -> None:
        pass


@contextlib.contextmanager
def _as_failures(name: str) -> Iterator[None]:
    try:
        yield
    except VLLMClientError as error:
        raise DataFailure(f"request {name}: vLLM refused it: {error}", reason=FailureReason.REQUEST_REFUSED) from error
    except EngineDeadError:
        # Its last words are on standard error, which the owner of this process tells with how it ended.
        sys.stderr.flush()
        os._exit(CORE_DIED)
    except VLLMServerError as error:
        cause = error.__cause__ or error
        raise InfrastructureFailure(
            f"{name}: vLLM failed: {type(cause).__name__}: {cause}", reason=FailureReason.ENGINE_ERROR
        ) from error


# What follows runs in the processes that vLLM starts. They import this file to find the extension below, before a
# model is loaded.


@dataclass
class NoInit(WeightTransferInitInfo):
    pass


@dataclass
class StoredUpdate(WeightTransferUpdateInfo):
    stored: str
    """`StoredWeights` as JSON."""


class StoredWeightTransfer(WeightTransferEngine[NoInit, StoredUpdate]):
    """One update brings all weights, or none: they are checked as a whole before the first is touched."""

    init_info_cls = NoInit
    update_info_cls = StoredUpdate

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        die_with_parent()
        self.checksum = ""
        self.intact = True
        self._shapes = _checkpoint_shapes(Path(self.model_config.model))
        tied = getattr(self.model_config.hf_config, "tie_word_embeddings", False)
        self._optional = frozenset({"lm_head.weight"} if tied else ())

    def init_transfer_engine(self, init_info: NoInit) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: StoredUpdate) -> None:
        stored = msgspec.json.decode(update_info.stored, type=StoredWeights)
        with stored.receive() as received:
            given = dict(on_base(received, Path(self.model_config.model)).tensors())
            self._check(given)
            self.intact = False
            # Layer by layer: the weights in use are packed, so they cannot be written in place. The views of `given`
            # are read until the last layer is finalized.
            initialize_layerwise_reload(self.model)
            # As the trainer's own products have them; vLLM would round to the nearest.
            served = ((name, rounded(tensor, self.model_config.dtype)) for name, tensor in given.items())
            self.model.load_weights(served)
            finalize_layerwise_reload(self.model, self.model_config)
            self._pack_tied_head()
            self.intact = True
            self.checksum = received.checksum

    def _pack_tied_head(self) -> None:
        """A head that shares the embedding's weights received none, and would multiply by the packed old ones."""
        for module in self.model.modules() if self._optional else ():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def _check(self, given: dict[str, torch.Tensor]) -> None:
        needed = self._shapes.keys() - self._optional
        wrong = [f"{name} is missing" for name in needed - given.keys()]
        wrong += [f"{name} is not a weight of this model" for name in given.keys() - needed - self._optional]
        wrong += [
            f"{name} has shape {tuple(given[name].shape)}; the model needs {self._shapes[name]}"
            for name in needed & given.keys()
            if tuple(given[name].shape) != self._shapes[name]
        ]
        if wrong:
            more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise WeightSyncError("; ".join(sorted(wrong)[:5]) + more)


class WorkerExtension:
    """What vLLM's worker class gets besides its own methods."""

    weight_transfer_engine: StoredWeightTransfer
    penstock_team: Team | None = None

    def follow_machine(self, most: int, least: int) -> None:
        """Compute with as many threads as there are cores for, from the next step on."""
        if self.penstock_team is None:
            self.penstock_team = Team(ThreadCount(most, least))
        self.penstock_team.gather()

    def weights_received(self) -> dict[str, Any]:
        transfer = self.weight_transfer_engine
        return {"checksum": transfer.checksum, "intact": transfer.intact}


def _checkpoint_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """What the trainer must send: the names and shapes of the files that the model was loaded from."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


with contextlib.suppress(ValueError):  # the file may be imported twice, as itself and by vLLM
    WeightTransferEngineFactory.register_engine(BACKEND, StoredWeightTransfer)

if WITHOUT_AMX in os.environ:
    # vLLM's own kernels ask torch, which believes the CPU.
    torch.cpu._is_amx_tile_supported = lambda: False
