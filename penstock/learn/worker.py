"""The worker that holds the trained weights: one process, transformers model, AdamW.

A train step is all or nothing: when the loss or the gradient of any of its updates is not finite, the weights and the
optimiser are what they were before and `StepRefused` says what was seen.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import defaultdict
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
from penstock.learn.losses import LossTokens, Mismatch, answer_weights, get_loss
from penstock.learn.pack import MicroBatch, pack
from penstock.learn.save import save_hf
from penstock.models.bfloat16 import keep_onednn_alive
from penstock.models.threads import release_threads


class TorchTrainWorker:
    """Implements `ports.TrainWorker[TrainBatch]`. Not for two threads at once."""

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
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.steps_done = 0

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """One train step. Raises StepRefused, weights and optimiser unchanged; RunError for a batch it cannot split."""
        with self._torch_settings():
            return self._train(batch)

    def _train(self, batch: TrainBatch) -> dict[str, float]:
        started = time.perf_counter()
        lr = self._config.lr_at(self.steps_done + 1, self._total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        updates = self._updates(batch)
        # An update that is refused comes before its own optimiser step; only earlier updates must be undone.
        before = self._snapshot() if len(updates) > 1 else None
        step = _StepMetrics()
        try:
            for update in updates:
                self._update(update, on_policy=len(updates) == 1 and batch.on_policy, step=step)
        except BaseException:
            if before is not None:
                self._restore(before)
            raise
        finally:
            self._gradients.clear(self._parameters.values())
        self.steps_done += 1
        seconds = time.perf_counter() - started
        return {
            **step.metrics(),
            "lr": lr,
            "shared_prompts": float(self._way.share_prompts),
            "fused": float(self._way.one_row),
            "bfloat16": float(self._way.dtype == torch.bfloat16),
            "seconds/total": seconds,
            "tokens_per_s": step.tokens / seconds,
        }

    def score(self, batch: TrainBatch) -> list[np.ndarray[tuple[int], np.dtype[np.float32]]]:
        """The trainer's logprob of every token of every answer, trained or not, in the batch's order."""
        ends = np.cumsum([len(answer.ids) for answer in batch.answers])
        starts = ends - [len(answer.ids) for answer in batch.answers]
        scores = np.zeros(ends[-1], dtype=np.float32)
        with self._torch_settings(), torch.no_grad():
            self._way.refresh()
            for micro_batch in self._pack(batch, every_token=True):
                logprobs = self._way.logprobs(micro_batch, batch.temperature).logprobs.float().cpu().numpy()
                scores[starts[micro_batch.answer_index] + micro_batch.token_index] = logprobs
        return np.split(scores, ends[:-1])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The live weights by their Hugging Face names; tied ones once, under the name of the first."""
        seen: set[int] = set()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor.detach()

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take weights as `tensors` gave them. Raises RunError, nothing changed, when they are not of this model."""
        own = dict(self.tensors())
        wrong = [name for name in own.keys() | tensors.keys() if not _same_shape(own.get(name), tensors.get(name))]
        if wrong:
            raise RunError(f"the weights are not of {self._model_dir}: {sorted(wrong)[:3]} are missing or differ")
        for name, tensor in own.items():
            tensor.copy_(tensors[name])

    def save_hf(self, directory: str) -> None:
        """Write a float32 model directory with its tokenizer. It appears under its name only when it is complete."""
        save_hf(self.model, self._model_dir, Path(directory))

    def state_dict(self) -> dict[str, Tensor]:
        """Optimiser and schedule, flat: `<moment>.<parameter name>` and `steps_done`. The weights are `save_hf`'s."""
        state = {"steps_done": torch.tensor(self.steps_done)}
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                state[f"{key}.{name}"] = value
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Raises RunError, nothing changed, when the state is not of this model."""
        moments: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for path, value in state.items():
            key, _, name = path.partition(".")
            if name:
                moments[name][key] = value
        unknown = [name for name in moments if name not in self._parameters]
        missing = [name for name in self._parameters if moments and name not in moments]
        misshapen = [
            name
            for name, values in moments.items()
            if name in self._parameters
            and any(v.dim() and v.shape != self._parameters[name].shape for v in values.values())
        ]
        if unknown or missing or misshapen or "steps_done" not in state:
            raise RunError(
                f"the optimiser state is not of {self._model_dir}: unknown {unknown[:3]}, missing {missing[:3]}, "
                f"of another shape {misshapen[:3]}{'' if 'steps_done' in state else ', no steps_done'}"
            )
        self._optimizer.state.clear()
        for name, values in moments.items():
            parameter = self._parameters[name]
            self._optimizer.state[parameter] = {
                key: value.to(parameter.device, copy=True) for key, value in values.items()
            }
        self.steps_done = int(state["steps_done"])

    def _updates(self, batch: TrainBatch) -> list[TrainBatch]:
        count = self._config.updates_per_batch
        if count > len(batch.groups):
            raise RunError(
                f"updates_per_batch is {count}, but train step {batch.train_step} has {len(batch.groups)} groups"
            )
        bounds = np.linspace(0, len(batch.groups), count + 1).astype(int)
        return [replace(batch, groups=batch.groups[a:b]) for a, b in itertools.pairwise(bounds)]

    def _update(self, batch: TrainBatch, *, on_policy: bool, step: _StepMetrics) -> None:
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
            loss += self._accumulate(micro_batch, weights, batch.temperature, on_policy, step)
        with step.timed("clip"):
            norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._config.max_grad_norm).item()
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise StepRefused(
                f"train step {batch.train_step}: loss is {loss}, gradient norm is {norm}; "
                "the step is refused, the weights are unchanged"
            )
        with step.timed("optimizer"):
            self._optimizer.step()
        step.end_update(loss, norm)

    def _accumulate(
        self,
        micro_batch: MicroBatch,
        weights: np.ndarray[tuple[int], np.dtype[np.float64]],
        temperature: float,
        on_policy: bool,
        step: _StepMetrics,
    ) -> float:
        with step.timed("forward"):
            computed = self._way.logprobs(micro_batch, temperature)
            logprobs = computed.logprobs
            tokens = LossTokens(
                logprobs=logprobs,
                engine_logprobs=torch.from_numpy(micro_batch.engine_logprobs).to(logprobs),
                advantages=torch.from_numpy(micro_batch.advantages).to(logprobs),
                on_policy=on_policy,
            )
            try:
                terms = self._loss(tokens, self._config.loss)
            except Exception as error:
                raise UserFunctionError(
                    f"loss {self._config.loss.name} raised {type(error).__name__}: {error}"
                ) from error
            weight = torch.from_numpy(weights[micro_batch.answer_index]).to(logprobs)
            loss = (terms.loss * weight).sum()
        with step.timed("backward"):
            loss.backward()
        step.add(micro_batch, tokens, {"entropy": computed.entropy, **terms.shares})
        return loss.item()

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
        return weights, {key: value.clone() for key, value in self.state_dict().items()}

    def _restore(self, before: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
        weights, state = before
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(weights[name])
        self.load_state_dict(state)

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


class _StepMetrics:
    """What one train step says about itself, gathered over its micro-batches and updates."""

    def __init__(self) -> None:
        self.tokens = 0
        self._cells = 0
        self._used = 0
        self._micro_batches = 0
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._sums: dict[str, float] = defaultdict(float)
        self._seconds: dict[str, float] = defaultdict(float)
        self._mismatch = Mismatch()

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[part] += time.perf_counter() - started

    def add(self, micro_batch: MicroBatch, tokens: LossTokens, per_token: dict[str, Tensor]) -> None:
        self.tokens += len(micro_batch.targets)
        self._cells += micro_batch.num_cells
        self._used += micro_batch.num_used
        self._micro_batches += 1
        for name, values in per_token.items():
            self._sums[name] += values.double().sum().item()
        # After an update the trainer has moved on; what is left then is not a mismatch.
        if not self._losses:
            self._mismatch.add(tokens.logprobs, tokens.engine_logprobs)

    def end_update(self, loss: float, norm: float) -> None:
        self._losses.append(loss)
        self._norms.append(norm)

    def metrics(self) -> dict[str, float]:
        return {
            "loss": float(np.mean(self._losses)),
            "grad_norm": float(np.mean(self._norms)),
            "tokens": float(self.tokens),
            "micro_batches": float(self._micro_batches),
            "padding_share": 1 - self._used / self._cells,
            **{name: total / self.tokens for name, total in self._sums.items()},
            **self._mismatch.metrics(),
            **{f"seconds/{part}": seconds for part, seconds in self._seconds.items()},
        }


def _same_shape(own: Tensor | None, other: Tensor | None) -> bool:
    return own is not None and other is not None and own.shape == other.shape
