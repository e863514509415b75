"""The model and its optimiser: one train step, logprobs, and everything a restart needs.

A train step is all or nothing: when the loss or the gradient of any of its updates is not finite, the weights and the
optimiser are what they were before and `StepRefused` says what was seen.

With several ranks each has a learner. All of them are given the whole batch, so that what a token counts is known
without asking, and each computes the answers that `deal` gives it; gradients, loss and norm are those of all.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from penstock.errors import ModelError, RunError, StepRefused, UserFunctionError
from penstock.learn.batch import TrainBatch, with_columns
from penstock.learn.config import TrainWorkerConfig
from penstock.learn.correction import OldPolicy, old_policy
from penstock.learn.deal import deal
from penstock.learn.linear import Gradients
from penstock.learn.load import LogprobModel, check_head, choose_way, idle_micro_batch, load_model
from penstock.learn.lora import adapter_tensors, merged_tensors, save_adapter
from penstock.learn.losses import LossTerms, answer_weights
from penstock.learn.objective import Objective
from penstock.learn.pack import LongArray, MicroBatch, pack
from penstock.learn.peers import Alone, Peers
from penstock.learn.reference import build_reference
from penstock.learn.rounds import Rounds, StopSign
from penstock.learn.save import save_hf
from penstock.learn.shard import gathered, own, shard
from penstock.learn.snapshot import Snapshot, copied
from penstock.learn.state import (
    MODEL,
    OPTIMIZER,
    optimizer_state,
    read_state,
    set_optimizer_state,
    weights_of,
    write_state,
)
from penstock.learn.step_metrics import StepMetrics, StepReport
from penstock.models.bfloat16 import keep_onednn_alive
from penstock.models.cores import ThreadCount
from penstock.models.threads import Pace, Team
from penstock.rollout import FloatArray
from penstock.unbuffered import FileSum
from penstock.weights.digest import with_pool
from penstock.weights.stored import tensors_checksum


class Learner:
    """Synchronous, and not for two threads at once; `TorchTrainWorker` gives it one. `peers` are the other ranks."""

    def __init__(
        self,
        config: TrainWorkerConfig,
        model_dir: Path,
        *,
        total_steps: int,
        deterministic: bool = False,
        threads: int | None = None,
        most_threads: int | None = None,
        peers: Peers | None = None,
    ) -> None:
        self._config = config
        self._peers = peers or Alone()
        self._sharded = config.sharding == "fsdp2"
        self._model_dir = model_dir
        self._total_steps = total_steps
        self._deterministic = deterministic
        # What other ranks use of the same cores is not taken from this one; on a GPU threads do not make the pace.
        fixed = deterministic or self._peers.size > 1 or not config.device.startswith("cpu")
        self._team = Team(ThreadCount.of(threads or torch.get_num_threads(), most_threads, fixed=fixed))
        self._objective = Objective(config)
        self._gradients = Gradients()
        keep_onednn_alive()
        with self._torch_settings():
            self.model = load_model(
                model_dir,
                device=config.device,
                activation_checkpointing=config.activation_checkpointing,
                lora=config.lora,
            )
            check_head(self.model)
            self._way = choose_way(
                self.model,
                config,
                self._gradients,
                deterministic=deterministic,
                sharded=self._sharded,
                pace=Pace(self._team),
            )
            self._reference = (
                build_reference(config.kl, self.model, self._way, config, model_dir, deterministic=deterministic)
                if config.kl is not None
                else None
            )
        if self._peers.size > 1:
            self._require_same_weights()
        if self._sharded:
            shard(self._way.module, self.model, self._peers.mesh)
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

    def train(self, batch: TrainBatch, stopped: StopSign) -> StepReport:
        """This rank's part of one train step. `stopped`, on any rank, ends it between two micro-batches with Stopped.

        Raises StepRefused, weights and optimiser unchanged; RunError for a batch it cannot split.
        """
        with self._torch_settings():
            return self._train(batch, stopped)

    def _train(self, batch: TrainBatch, stopped: StopSign) -> StepReport:
        step = StepMetrics()
        lr = self._config.lr_at(self.steps_done + 1, self._total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        count = self._config.updates_per_batch * self._config.epochs_per_batch
        old = old_policy(self._config.correction, self._config.loss, on_policy=batch.on_policy, num_updates=count)
        if old == "proximal":
            with step.timed("proximal"):
                batch = with_columns(batch, proximal_logprobs=self._scored(batch, self._way, stopped))
        if self._objective.kl_in_loss and batch.segments[0].reference_logprobs is None:
            with step.timed("reference"):
                batch = with_columns(batch, reference_logprobs=self._scored(batch, self._required_reference(), stopped))
        updates = self._updates(batch) * self._config.epochs_per_batch
        # An update that is refused comes before its own optimiser step; only earlier updates must be undone.
        before = self._snapshot() if len(updates) > 1 else None
        logprobs: dict[str, list[FloatArray]] = {}
        try:
            for update in updates:
                for rollout, computed in self._update(update, old=old, step=step, stopped=stopped).items():
                    # Those of the first time that an answer is gone through.
                    logprobs.setdefault(rollout, computed)
        except BaseException:
            if before is not None:
                self._restore(before)
            raise
        finally:
            self._gradients.clear(self._parameters.values())
        self.steps_done += 1
        settings = {
            "lr": lr,
            "shared_prompts": float(self._way.share_prompts),
            "fused": float(self._way.one_row),
            "bfloat16": float(self._way.dtype == torch.bfloat16),
            "threads": float(self._team.count),
        }
        return step.report(settings, logprobs)

    def score(self, batch: TrainBatch) -> dict[str, list[FloatArray]]:
        """The logprob of every token, trained or not, of this rank's answers, by rollout and segment."""
        with self._torch_settings():
            return self._table(batch, self._way, threading.Event(), every_token=True).by_rollout()

    def score_reference(self, batch: TrainBatch) -> dict[str, list[FloatArray]]:
        """As `score`, of the reference model. Raises RunError where there is none."""
        with self._torch_settings():
            return self._table(batch, self._required_reference(), threading.Event(), every_token=True).by_rollout()

    def _required_reference(self) -> LogprobModel:
        if self._reference is None:
            raise RunError("there is no reference model: train.kl is not set")
        return self._reference

    def _scored(self, batch: TrainBatch, way: LogprobModel, stopped: StopSign) -> dict[str, list[FloatArray]]:
        """A column of the batch: the logprobs of this rank's trained tokens, NaN elsewhere.

        Update by update, because answers are dealt so.
        """
        column: dict[str, list[FloatArray]] = {}
        for update in self._updates(batch):
            column |= self._table(update, way, stopped).of_every_rollout()
        return column

    def _table(
        self, batch: TrainBatch, way: LogprobModel, stopped: StopSign, *, every_token: bool = False
    ) -> TokenTable:
        table = TokenTable(batch, self._deal(batch, every_token=every_token))
        with torch.no_grad():
            way.refresh()
            rounds = self._rounds(batch, table.answers, stopped, way, every_token=every_token)
            for micro_batch in rounds:
                with rounds.guard():
                    computed = way.logprobs(micro_batch or idle_micro_batch(way))
                    if micro_batch is not None:
                        table.add(micro_batch, computed.logprobs)
            self._reshard()
        return table

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What engines are given: the live weights by their Hugging Face names; tied ones once, under the name of the
        first. With LoRA the adapter is in them, or it is all that they are given.

        Of sharded weights all rows, one tensor after the other: every rank must go through to the end.
        """
        if self._config.lora is None:
            return ((name, gathered(tensor)) for name, tensor in weights_of(self.model))
        return merged_tensors(self.model) if self._config.lora.sync == "merged" else adapter_tensors(self.model)

    def save(self, directory: Path) -> dict[str, FileSum]:
        """Weights, optimiser and schedule, as files into `directory`, which are returned. Raises StorageError.

        Of sharded weights every rank writes what it has; otherwise the first rank writes everything.
        """
        if self._peers.rank and not self._sharded:
            return {}
        shard = self._peers.rank if self._sharded else None
        return write_state(directory, dict(weights_of(self.model)), self._optimizer_state(), shard=shard)

    def load(self, directory: Path) -> None:
        """What `save` wrote, of any number of ranks. Raises CheckpointError, nothing changed, when it does not fit."""
        weights, state = read_state(directory, self.model, self._parameters)
        for name, tensor in weights_of(self.model):
            own(tensor).copy_(weights[name])
        self.steps_done = set_optimizer_state(self._optimizer, self._parameters, state)
        self._reshard()

    def state(self) -> dict[str, Tensor]:
        """What this rank holds of weights, optimiser and schedule, as it is in memory."""
        optimizer = {f"{OPTIMIZER}/{key}": own(value) for key, value in self._optimizer_state().items()}
        return {f"{MODEL}/{name}": own(tensor) for name, tensor in weights_of(self.model)} | optimizer

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """What `state` gave, here or in another process of the same rank."""
        for name, tensor in weights_of(self.model):
            own(tensor).copy_(state[f"{MODEL}/{name}"])
        prefix = f"{OPTIMIZER}/"
        moments = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        self.steps_done = set_optimizer_state(self._optimizer, self._parameters, moments)
        self._reshard()

    def save_hf(self, directory: Path) -> None:
        """A float32 model directory with its tokenizer, whole or not there; with LoRA the adapter is in the weights,
        and also by itself in `adapter/`. Raises StorageError.

        The first rank writes it; of sharded weights every rank must ask.
        """
        weights = None
        if self._config.lora is not None:
            weights = {name: tensor.cpu() for name, tensor in merged_tensors(self.model)}
        elif self._sharded:
            weights = {name: tensor.cpu() for name, tensor in self.tensors()}
        if self._peers.rank == 0:
            self._write_hf(directory, weights, dict(weights_of(self.model)))

    def snapshot(self, *, optimizer: bool, export: bool) -> Snapshot:
        """What `save` and `save_hf` would write now, or one of them, to be written later. Not for sharded weights."""
        with self._torch_settings():
            weights = copied(weights_of(self.model))
            state = copied(self._optimizer_state().items()) if optimizer else {}
            exported = weights
            if self._config.lora is not None and export:
                # What has no adapter is the model's own, and does not change.
                exported = {name: tensor.cpu() for name, tensor in merged_tensors(self.model)}
        return Snapshot(weights, state, lambda directory: self._write_hf(directory, exported, weights))

    def _write_hf(self, directory: Path, exported: Mapping[str, Tensor] | None, kept: Mapping[str, Tensor]) -> None:
        """`kept` are the weights that a checkpoint has: with LoRA the adapter's."""
        lora = self._config.lora

        def adapter(unfinished: Path) -> None:
            assert lora is not None
            save_adapter(self.model, kept, lora, str(self._model_dir), unfinished / "adapter")

        save_hf(self.model, self._model_dir, directory, exported, beside=adapter if lora is not None else None)

    def _require_same_weights(self) -> None:
        # All of them: with LoRA `weights_of` is the adapter alone, which begins alike on whatever base.
        tensors = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        found = with_pool(lambda pool: tensors_checksum(tensors, pool))
        if not self._peers.all_equal(bytes.fromhex(found)):
            raise ModelError(f"{self._model_dir}: the ranks found different weights there; every node needs the same")

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
        self, batch: TrainBatch, *, old: OldPolicy, step: StepMetrics, stopped: StopSign
    ) -> dict[str, list[FloatArray]]:
        """The logprobs that this rank computed, by rollout."""
        seen = TokenTable(batch, self._deal(batch))
        num_trained = np.asarray([answer.num_trained for answer in batch.answers])
        if not num_trained.any():
            # Every group of this mini-batch is masked; there is no gradient to step along.
            return seen.by_rollout()
        weights = answer_weights(num_trained, self._config.loss)
        self._gradients.clear(self._parameters.values())
        with step.timed("round"):
            self._way.refresh()
        loss = 0.0
        apart = self._without_gradient(batch)
        rounds = self._rounds(batch, seen.answers, stopped, self._way, apart=apart)
        for micro_batch in rounds:
            learns = micro_batch is None or not apart or bool(micro_batch.advantages.any())
            with rounds.guard(), torch.set_grad_enabled(learns):
                if micro_batch is None:
                    (0.0 * self._way.logprobs(self._idle).logprobs).sum().backward()
                    continue
                computed, part = self._accumulate(micro_batch, weights, old, batch.train_step, step, rounds)
                seen.add(micro_batch, computed)
                loss += part
        if len(apart) == len(num_trained):
            # An optimiser makes a step along a gradient of 0 too.
            self._gradients.zero(self._parameters.values())
        with step.timed("exchange"):
            loss = self._peers.total(loss)
            if not self._sharded:
                self._peers.sum_gradients(self._parameters.values())
        with step.timed("clip"):
            norm = _number(torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._config.max_grad_norm))
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise StepRefused(
                f"train step {batch.train_step}: loss is {loss}, gradient norm is {norm}; "
                "the step is refused, the weights are unchanged"
            )
        with step.timed("optimizer"):
            self._optimizer.step()
            largest = _number(torch.nn.utils.get_total_norm(self._parameters.values(), math.inf))
        if not math.isfinite(largest):
            raise RunError(
                f"train step {batch.train_step}: the optimiser made weights that are not finite, with a gradient that "
                f"is; lr is {self._config.lr}, weight_decay {self._config.weight_decay}. Resume with smaller ones"
            )
        step.end_update(loss, norm)
        return seen.by_rollout()

    def _accumulate(
        self,
        micro_batch: MicroBatch,
        weights: np.ndarray[tuple[int], np.dtype[np.float64]],
        old: OldPolicy,
        train_step: int,
        step: StepMetrics,
        rounds: Rounds,
    ) -> tuple[Tensor, float]:
        """The logprobs, and this micro-batch's part of the loss. Its gradient, if there is one, is added to the
        others'."""
        with step.timed("forward"):
            computed = self._way.logprobs(micro_batch, entropy_gradient=self._objective.entropy_gradient)
            logprobs = computed.logprobs
            tokens = self._objective.tokens(micro_batch, computed, old, train_step=train_step)
            try:
                terms = self._objective(tokens, old)
            except UserFunctionError as error:
                if not self._sharded:
                    raise
                # The others make this backward pass, and wait for this rank in it.
                rounds.failure, terms = error, LossTerms(0.0 * logprobs)
            weight = torch.from_numpy(weights[micro_batch.answer_index]).to(logprobs)
            loss = (terms.loss * weight).sum()
        if torch.is_grad_enabled():
            with step.timed("backward"):
                loss.backward()
        step.add(micro_batch, tokens, {"entropy": computed.entropy.detach(), **terms.shares})
        return logprobs.detach(), loss.item()

    def _without_gradient(self, batch: TrainBatch) -> set[int]:
        """The answers of groups in which every advantage is 0: they go through the model for their logprobs alone.

        None where that is no reason to have no gradient, and where ranks make every pass together.
        """
        if self._sharded or not self._objective.follows_advantage:
            return set()
        found: set[int] = set()
        first = 0
        for group in batch.groups:
            segments = [segment for answer in group.answers for segment in answer.segments]
            if not any((segment.advantages * segment.mask).any() for segment in segments):
                found |= set(range(first, first + len(group.answers)))
            first += len(group.answers)
        return found

    def _deal(self, batch: TrainBatch, *, every_token: bool = False) -> LongArray:
        """The answers that this rank computes."""
        return deal(batch, self._peers.size, every_token=every_token)[self._peers.rank]

    def _rounds(
        self,
        batch: TrainBatch,
        answers: LongArray,
        stopped: StopSign,
        way: LogprobModel,
        *,
        every_token: bool = False,
        apart: Collection[int] = (),
    ) -> Rounds:
        """Those of `apart` are in micro-batches of their own."""
        is_apart = np.isin(answers, list(apart))
        micro_batches = [
            micro_batch
            for part in (answers[~is_apart], answers[is_apart])
            for micro_batch in pack(
                batch,
                max_tokens=self._config.max_tokens_per_micro_batch,
                share_prompts=way.share_prompts,
                one_row=way.one_row,
                every_token=every_token,
                whole_answers=self._objective.whole_answers and not every_token,
                answers=part,
            )
        ]
        return Rounds(self._peers, micro_batches, stopped, together=self._sharded)

    @functools.cached_property
    def _idle(self) -> MicroBatch:
        """What is computed when only the other ranks have something to compute."""
        return idle_micro_batch(self._way)

    def _reshard(self) -> None:
        """Weights that were gathered for a pass are not the newest when others take their place."""
        if self._sharded:
            self._way.module.reshard()

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
            self._team.gather()
            if self._deterministic:
                torch.use_deterministic_algorithms(True)
            yield
        finally:
            torch.use_deterministic_algorithms(strict)
            torch.set_num_threads(threads)
            self._team.rest()


def _number(value: Tensor) -> float:
    """Of a tensor that may be a sum over ranks."""
    return gathered(value).item()


class TokenTable:
    """One number per token of a batch, NaN until it is computed; of these answers some are."""

    def __init__(self, batch: TrainBatch, answers: LongArray) -> None:
        self.answers = answers
        self._batch = batch
        self._values = np.full(sum(len(segment) for segment in batch.segments), np.nan, dtype=np.float32)

    def add(self, micro_batch: MicroBatch, values: Tensor) -> None:
        self._values[micro_batch.token_index] = values.float().cpu().numpy()

    def by_rollout(self) -> dict[str, list[FloatArray]]:
        """One array per segment, of the table's answers."""
        every = list(self.of_every_rollout().items())
        return dict(every[index] for index in self.answers)

    def of_every_rollout(self) -> dict[str, list[FloatArray]]:
        """As `by_rollout`, NaN for the others'."""
        ends = np.cumsum([len(segment) for segment in self._batch.segments])
        pieces = iter(np.split(self._values, ends[:-1]))
        return {answer.rollout_id: [next(pieces) for _ in answer.segments] for answer in self._batch.answers}
