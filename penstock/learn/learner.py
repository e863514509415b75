"""The model and its optimiser: one train step, logprobs, and everything a restart needs.

A train step is all or nothing: when the loss or the gradient of any of its updates is not finite, the weights and the
optimiser are what they were before and `StepRefused` says what was seen.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from penstock.errors import RunError, StepRefused, UserFunctionError
from penstock.learn.batch import TrainBatch
from penstock.learn.config import TrainWorkerConfig
from penstock.learn.linear import Gradients
from penstock.learn.load import check_head, choose_way, load_model
from penstock.learn.losses import LossTerms, LossTokens, answer_weights, get_loss
from penstock.learn.pack import MicroBatch, pack
from penstock.learn.save import save_hf
from penstock.learn.state import optimizer_state, read_state, set_optimizer_state, weights_of, write_state
from penstock.learn.step_metrics import StepMetrics
from penstock.models.bfloat16 import keep_onednn_alive
from penstock.models.threads import release_threads
from penstock.ports import TrainOutcome
from penstock.rollout import FloatArray


class Stopped(Exception):
    """A train step ended early because it was asked to."""


class Learner:
    """Synchronous, and not for two threads at once; `TorchTrainWorker` gives it one."""

    def __init__(
        self,
        config: TrainWorkerConfig,
        model_dir: Path,
        *,
        total_steps: int,
        deterministic: bool = False,
        threads: int | None = None,
    ) -> None:
        self._config = config
        self._model_dir = model_dir
        self._total_steps = total_steps
        self._deterministic = deterministic
        self._threads = threads
        self._loss = get_loss(config.loss.name)
        self._gradients = Gradients()
        keep_onednn_alive()
        with self._torch_settings():
            self.model = load_model(
                model_dir, device=config.device, activation_checkpointing=config.activation_checkpointing
            )
            check_head(self.model)
            self._way = choose_way(self.model, config, self._gradients, deterministic=deterministic)
        self._parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        decaying = [p for p in self._parameters.values() if p.dim() > 1]
        others = [p for p in self._parameters.values() if p.dim() <= 1]
        self._optimizer = torch.optim.AdamW(
            [{"params": decaying, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        self.steps_done = 0

    def train(self, batch: TrainBatch, stopped: threading.Event) -> TrainOutcome:
        """One train step. `stopped` ends it between two micro-batches with Stopped, like a refused one.

        Raises StepRefused, weights and optimiser unchanged; RunError for a batch it cannot split.
        """
        with self._torch_settings():
            return self._train(batch, stopped)

    def _train(self, batch: TrainBatch, stopped: threading.Event) -> TrainOutcome:
        started = time.perf_counter()
        lr = self._config.lr_at(self.steps_done + 1, self._total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        updates = self._updates(batch)
        # An update that is refused comes before its own optimiser step; only earlier updates must be undone.
        before = self._snapshot() if len(updates) > 1 else None
        step = StepMetrics()
        logprobs: dict[str, list[FloatArray]] = {}
        try:
            for update in updates:
                seen = TokenTable(update)
                self._update(
                    update, on_policy=len(updates) == 1 and batch.on_policy, step=step, seen=seen, stopped=stopped
                )
                logprobs |= seen.by_rollout()
        except BaseException:
            if before is not None:
                self._restore(before)
            raise
        finally:
            self._gradients.clear(self._parameters.values())
        self.steps_done += 1
        seconds = time.perf_counter() - started
        metrics = {
            **step.metrics(),
            "lr": lr,
            "shared_prompts": float(self._way.share_prompts),
            "fused": float(self._way.one_row),
            "bfloat16": float(self._way.dtype == torch.bfloat16),
            "seconds/total": seconds,
            "tokens_per_s": step.tokens / seconds,
        }
        return TrainOutcome(metrics=metrics, logprobs=logprobs)

    def score(self, batch: TrainBatch) -> dict[str, list[FloatArray]]:
        """The logprob of every token, trained or not, by rollout and segment."""
        table = TokenTable(batch)
        with self._torch_settings(), torch.no_grad():
            self._way.refresh()
            for micro_batch in self._pack(batch, every_token=True):
                table.add(micro_batch, self._way.logprobs(micro_batch, batch.temperature).logprobs)
        return table.by_rollout()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The live weights by their Hugging Face names; tied ones once, under the name of the first."""
        return weights_of(self.model)

    def save(self, directory: Path) -> None:
        """Weights, optimiser and schedule, as files into `directory`. Raises StorageError."""
        write_state(directory, self.model, self._optimizer_state())

    def load(self, directory: Path) -> None:
        """What `save` wrote. Raises CheckpointError, nothing changed, when it is not of this model."""
        weights, state = read_state(directory, self.model, self._parameters)
        for name, tensor in self.tensors():
            tensor.copy_(weights[name])
        self.steps_done = set_optimizer_state(self._optimizer, self._parameters, state)

    def save_hf(self, directory: Path) -> None:
        """A float32 model directory with its tokenizer, whole or not there. Raises StorageError."""
        save_hf(self.model, self._model_dir, directory)

    def _optimizer_state(self) -> dict[str, Tensor]:
        return optimizer_state(self._optimizer, self._parameters, self.steps_done)

    def _updates(self, batch: TrainBatch) -> list[TrainBatch]:
        count = self._config.updates_per_batch
        if count > len(batch.groups):
            raise RunError(
                f"updates_per_batch is {count}, but train step {batch.train_step} has {len(batch.groups)} groups"
            )
        bounds = np.linspace(0, len(batch.groups), count + 1).astype(int)
        return [replace(batch, groups=batch.groups[a:b]) for a, b in itertools.pairwise(bounds)]

    def _update(
        self, batch: TrainBatch, *, on_policy: bool, step: StepMetrics, seen: TokenTable, stopped: threading.Event
    ) -> None:
        num_trained = np.asarray([answer.num_trained for answer in batch.answers])
        if not num_trained.any():
            # Every group of this mini-batch is masked; there is no gradient to step along.
            return
        weights = answer_weights(num_trained, self._config.loss)
        self._gradients.clear(self._parameters.values())
        with step.timed("round"):
            self._way.refresh()
        loss = 0.0
        for micro_batch in self._pack(batch):
            if stopped.is_set():
                raise Stopped
            computed, part = self._accumulate(micro_batch, weights, batch.temperature, on_policy, step)
            seen.add(micro_batch, computed)
            loss += part
        with step.timed("clip"):
            norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._config.max_grad_norm).item()
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise StepRefused(
                f"train step {batch.train_step}: loss is {loss}, gradient norm is {norm}; "
                "the step is refused, the weights are unchanged"
            )
        with step.timed("optimizer"):
            self._optimizer.step()
            largest = torch.nn.utils.get_total_norm(self._parameters.values(), math.inf).item()
        if not math.isfinite(largest):
            raise RunError(
                f"train step {batch.train_step}: the optimiser made weights that are not finite, with a gradient that "
                f"is; lr is {self._config.lr}, weight_decay {self._config.weight_decay}. Resume with smaller ones"
            )
        step.end_update(loss, norm)

    def _accumulate(
        self,
        micro_batch: MicroBatch,
        weights: np.ndarray[tuple[int], np.dtype[np.float64]],
        temperature: float,
        on_policy: bool,
        step: StepMetrics,
    ) -> tuple[Tensor, float]:
        """The logprobs, and this micro-batch's part of the loss; its gradient is added to that of the others."""
        with step.timed("forward"):
            computed = self._way.logprobs(micro_batch, temperature)
            logprobs = computed.logprobs
            tokens = LossTokens(
                logprobs=logprobs,
                engine_logprobs=torch.from_numpy(micro_batch.engine_logprobs).to(logprobs),
                advantages=torch.from_numpy(micro_batch.advantages).to(logprobs),
                on_policy=on_policy,
            )
            terms = self._loss_terms(tokens)
            weight = torch.from_numpy(weights[micro_batch.answer_index]).to(logprobs)
            loss = (terms.loss * weight).sum()
        with step.timed("backward"):
            loss.backward()
        step.add(micro_batch, tokens, {"entropy": computed.entropy, **terms.shares})
        return logprobs.detach(), loss.item()

    def _loss_terms(self, tokens: LossTokens) -> LossTerms:
        name = self._config.loss.name
        try:
            terms = self._loss(tokens, self._config.loss)
        except Exception as error:
            raise UserFunctionError(f"loss {name} raised {type(error).__name__}: {error}") from error
        if not isinstance(terms, LossTerms):
            raise UserFunctionError(f"loss {name} returned a {type(terms).__name__}; it must return LossTerms")
        wrong = {key: value for key, value in {"loss": terms.loss, **terms.shares}.items() if not _fits(value, tokens)}
        if wrong:
            raise UserFunctionError(f"loss {name}: {sorted(wrong)} must be tensors of {len(tokens.logprobs)} numbers")
        return terms

    def _pack(self, batch: TrainBatch, *, every_token: bool = False) -> list[MicroBatch]:
        return pack(
            batch,
            max_tokens=self._config.max_tokens_per_micro_batch,
            share_prompts=self._way.share_prompts,
            one_row=self._way.one_row,
            every_token=every_token,
        )

    def _snapshot(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        weights = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        return weights, {key: value.clone() for key, value in self._optimizer_state().items()}

    def _restore(self, before: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
        weights, state = before
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(weights[name])
        self.steps_done = set_optimizer_state(self._optimizer, self._parameters, state)

    @contextlib.contextmanager
    def _torch_settings(self) -> Iterator[None]:
        # The number of threads is set here and not once: with OpenMP it belongs to the calling thread, and the
        # trainer calls from whichever thread it has.
        threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
        try:
            if self._threads is not None:
                torch.set_num_threads(self._threads)
            if self._deterministic:
                torch.use_deterministic_algorithms(True)
            yield
        finally:
            torch.use_deterministic_algorithms(strict)
            torch.set_num_threads(threads)
            release_threads()


def _fits(value: object, tokens: LossTokens) -> bool:
    return isinstance(value, Tensor) and value.shape == tokens.logprobs.shape


class TokenTable:
    """One number per token of a batch, NaN until it is computed."""

    def __init__(self, batch: TrainBatch) -> None:
        self._batch = batch
        self._values = np.full(sum(len(segment) for segment in batch.segments), np.nan, dtype=np.float32)

    def add(self, micro_batch: MicroBatch, values: Tensor) -> None:
        self._values[micro_batch.token_index] = values.float().cpu().numpy()

    def by_rollout(self) -> dict[str, list[FloatArray]]:
        """One array per segment."""
        ends = np.cumsum([len(segment) for segment in self._batch.segments])
        pieces = iter(np.split(self._values, ends[:-1]))
        return {answer.rollout_id: [next(pieces) for _ in answer.segments] for answer in self._batch.answers}
