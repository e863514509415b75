"""What a user says about learning. Light: importing it imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from penstock.config import Config, Dtype, import_name, nearest
from penstock.errors import ConfigError
from penstock.learn.advantages import DISCOUNTS, ESTIMATORS, RATES
from penstock.learn.correction import PRESETS, CorrectionConfig
from penstock.learn.kl import KLConfig
from penstock.learn.lora import LoRAConfig
from penstock.learn.losses import LOSSES, CustomLossConfig, LossConfig, PPOLossConfig
from penstock.learn.overlong import OverlongConfig

if TYPE_CHECKING:
    from penstock.learn.worker import TorchTrainWorker


def _named_loss(value: Any) -> Any:
    """A word or the dotted path of a function stands for a loss with its defaults."""
    if not isinstance(value, str):
        return value
    if value in LOSSES:
        return LOSSES[value]()
    if "." in value or ":" in value:
        return CustomLossConfig(function=value)
    raise ValueError(f"it is not a loss.{nearest(value, list(LOSSES))}")


def _named_correction(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value in PRESETS:
        return PRESETS[value]
    raise ValueError(f"it is not a preset.{nearest(value, list(PRESETS))}")


class RanksConfig(Config):
    """Train ranks in processes or actors of their own: how long they may take, and what happens when one is lost."""

    start_timeout_s: float = Field(default=300.0, gt=0, le=86_400)
    """For all ranks to start, find each other and load the model."""
    exchange_timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    """For one rank to wait for another in the middle of a step: longer than a micro-batch takes."""
    call_timeout_s: float = Field(default=3600.0, gt=0, le=7 * 86_400)
    """For a whole train step, a checkpoint or an export."""
    max_restarts: int = Field(default=3, ge=0, le=1000)
    """How often the ranks may be lost without a train step in between."""
    keep_state: bool = True
    """Copy weights and optimiser after every step to where they outlive the ranks; that takes 24 bytes per weight.
    Without it a rank that is lost costs all steps after the newest checkpoint."""

    def problems(self) -> Iterator[str]:
        if self.exchange_timeout_s > self.call_timeout_s:
            yield (
                f"exchange_timeout_s is {self.exchange_timeout_s:g} and call_timeout_s {self.call_timeout_s:g}; an "
                "exchange is a part of a call: the first may not exceed the second"
            )


class TrainWorkerConfig(Config):
    """How groups become a gradient, and a gradient a step."""

    lr: float = Field(default=1e-6, gt=0, le=10)
    """Of AdamW, after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Of AdamW."""
    eps: float = Field(default=1e-8, gt=0, le=1)
    """Of AdamW."""
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """Of matrices and embeddings. Norms and biases do not decay."""
    warmup_steps: int = Field(default=0, ge=0, le=10**9)
    """Train steps over which the learning rate rises to `lr`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up, until `total_steps`."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where linear and cosine end, as a share of `lr`: the step after the last would have it."""
    max_grad_norm: float = Field(default=1.0, gt=0, le=1e9)
    """A longer gradient is shortened to this."""
    dtype: Dtype = "float32"
    """What matrix products are computed from; their sums, weights, gradients, optimiser and logits are float32 either
    way. Asked for bfloat16, models that are not `fused` and CPUs without AMX run under torch.autocast, the output
    embedding excepted; on a CPU `auto` leaves them in float32."""
    device: str = "cpu"
    """Where the model is trained. On anything but the CPU, which has not been tried yet, shared prompts go through
    FlexAttention."""
    loss: Annotated[LossConfig, BeforeValidator(_named_loss)] = PPOLossConfig()
    """A configuration of `learn/losses`. For short its name (`ppo`, `gspo`, `cispo`, `dppo`, `pg`), or the dotted path
    of a function `(LossTokens, CustomLossConfig) -> LossTerms`."""
    advantage: str = "grpo"
    """An estimator of `learn/advantages.py`, or the dotted path of a function."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """What a reward loses with every token before it; for `reinforce_plus_plus`."""
    correction: Annotated[CorrectionConfig, BeforeValidator(_named_correction)] = CorrectionConfig()
    """Of the difference between the engine and the trainer; for short the name of a preset: `tis`, `icepop`, ..."""
    kl: KLConfig | None = None
    """A penalty for leaving a reference model."""
    overlong: OverlongConfig | None = None
    """What becomes of answers that are too long."""
    lora: LoRAConfig | None = None
    """Train an adapter and leave the weights as they are."""
    max_tokens_per_micro_batch: int = Field(default=1024, ge=1, le=10**9)
    """How much is computed at once: memory against speed."""
    share_prompts: bool = True
    """Compute what several answers or segments have before them once. Falls back to once for each of them for models
    that cannot (metric `shared_prompts`)."""
    fused: bool = True
    """Compute the Llama and Qwen families by forward and backward passes written for them, on a CPU. Other models, and
    those that would differ, go through transformers either way (metric `fused`)."""
    activation_checkpointing: bool = False
    """Compute the layers' activations again in the backward pass: less memory, more time."""
    sharding: Literal["none", "fsdp2"] = "none"
    """Of weights, gradients and optimiser over the train ranks. `none`: every rank has all of them. `fsdp2`: each has
    its share, and a layer is gathered when it is computed; models go through transformers then."""
    ranks: RanksConfig = RanksConfig()
    """Their number is `resources.train.num_workers`."""
    updates_per_batch: int = Field(default=1, ge=1, le=10**6)
    """Optimiser updates per train step, each on its share of the groups."""
    epochs_per_batch: int = Field(default=1, ge=1, le=10**6)
    """How often a batch is gone through; each time has `updates_per_batch` updates."""

    def problems(self) -> Iterator[str]:
        if not all(0 <= beta < 1 for beta in self.betas):
            yield f"betas is {self.betas}; both must be at least 0 and below 1"
        yield from _name_problems("advantage", self.advantage, tuple(ESTIMATORS))
        if self.gamma != 1 and self.advantage in ESTIMATORS and self.advantage not in DISCOUNTS:
            yield f"gamma is {self.gamma}; {self.advantage} gives every token of an answer the same, without discount"
        if self.advantage in RATES and (lowered := self._lowers_scores()):
            yield (
                f"advantage is {self.advantage!r}, which divides by the mean score and needs scores of at least 0; "
                f"{lowered} takes from them: leave it out, or take grpo"
            )
        if self.schedule == "constant" and self.min_lr_ratio:
            yield f"min_lr_ratio is {self.min_lr_ratio}; schedule is 'constant', which never falls: use another, or 0"
        if self.advantage == "none":
            yield from self._unread_rewards()
        if self.correction.bypass_mode and self.correction.rollout_is is not None and self.loss.uses_ratio:
            yield (
                f"correction.bypass_mode takes the ratio of {type(self.loss).__name__} against the engine: that is the "
                f"importance weight already; rollout_is={self.correction.rollout_is!r} would apply it twice: use "
                "bypass_mode=False, or PGLossConfig"
            )

    def _lowers_scores(self) -> str:
        """The setting that makes a score of 0 a negative one."""
        if self.overlong is not None and self.overlong.buffer_tokens is not None:
            return "overlong.buffer_tokens"
        return "kl.place='reward'" if self.kl is not None and self.kl.place == "reward" else ""

    def _unread_rewards(self) -> Iterator[str]:
        rule = "advantage is 'none', which looks at no reward: choose another one, or leave it out"
        if self.kl is not None and self.kl.place == "reward":
            yield f"kl.place is 'reward' and {rule}"
        if self.overlong is not None and self.overlong.buffer_tokens is not None:
            yield f"overlong.buffer_tokens is {self.overlong.buffer_tokens} and {rule}"

    def lr_at(self, train_step: int, total_steps: int) -> float:
        """The learning rate of a train step (from 1): rises over the warm-up, then falls.

        The first step after the warm-up has all of it, and the last one still some: the end of the schedule is the
        step after it, as in transformers.
        """
        if train_step <= self.warmup_steps:
            return self.lr * train_step / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        done = min(1.0, (train_step - 1 - self.warmup_steps) / max(1, total_steps - self.warmup_steps))
        falling = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * falling)

    def build(
        self,
        model_dir: str | Path,
        *,
        total_steps: int,
        deterministic: bool = False,
        threads: int | None = None,
        most_threads: int | None = None,
    ) -> TorchTrainWorker:
        """Load the model. Raises ModelError when it cannot be loaded or trained exactly.

        It computes with at most `threads`, fewer beside others; with `most_threads` those are its for certain, and
        more while they are idle. Their number is fixed when it is deterministic.
        """
        from penstock.learn.worker import TorchTrainWorker

        self.check()
        return TorchTrainWorker(
            self,
            Path(model_dir),
            total_steps=total_steps,
            deterministic=deterministic,
            threads=threads,
            most_threads=most_threads,
        )


def _name_problems(field: str, name: str, known: tuple[str, ...]) -> Iterator[str]:
    """Of a known name, or of the dotted path of a function that can be imported."""
    if name in known:
        return
    if "." not in name and ":" not in name:
        yield f"{field} is {name!r}, which is not known.{nearest(name, list(known))}"
        return
    try:
        if not callable(import_name(name)):
            yield f"{field} is {name!r}, which is not a function"
    except ConfigError as error:
        yield f"{field}: {error}"
