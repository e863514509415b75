"""What a user says about learning. Light: importing it imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from penstock.config import Config, Dtype, import_name, nearest
from penstock.errors import ConfigError
from penstock.learn.advantages import ESTIMATORS

if TYPE_CHECKING:
    from penstock.learn.worker import TorchTrainWorker

LOSS_NAMES = ("ppo", "policy_gradient")


class LossConfig(Config):
    """What is minimised."""

    name: str = "ppo"
    """`ppo`, `policy_gradient`, or the dotted path of a function `(LossTokens, LossConfig) -> LossTerms`."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.2, gt=0, le=1e6)
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]; a higher clip_high lets rare tokens grow."""
    ratio_cap: float | None = Field(default=3.0, gt=1, le=1e6)
    """Of `ppo`: the most a token with a negative advantage counts, as a multiple of that advantage. None: no bound."""
    aggregation: Literal["token-mean", "sequence-mean", "constant"] = "token-mean"
    """How token losses become one: each token counts the same, each answer counts the same, or (Dr.GRPO) the sum over
    an answer divided by `constant_length`, then the mean over answers."""
    constant_length: int | None = Field(default=None, ge=1, le=10**9)
    importance_cap: float | None = Field(default=None, gt=0, le=1e6)
    """Weigh each token by min(trainer's probability / engine's probability, this). Off when None. `ppo` uses it when
    its old logprobs are the trainer's own; against the engine's, the ratio itself is that weight."""

    def problems(self) -> Iterator[str]:
        yield from _name_problems("loss.name", self.name, LOSS_NAMES)
        if (self.aggregation == "constant") != (self.constant_length is not None):
            yield (
                f"loss.aggregation is {self.aggregation!r} and constant_length is {self.constant_length}; "
                "'constant' needs a constant_length (the longest answer), the others take none"
            )


class TrainWorkerConfig(Config):
    """How groups become a gradient, and a gradient a step."""

    lr: float = Field(default=1e-6, gt=0, le=10)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0, le=1)
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """Of matrices and embeddings. Norms and biases do not decay."""
    warmup_steps: int = Field(default=0, ge=0, le=10**9)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where linear and cosine end, as a share of `lr`: the step after the last would have it."""
    max_grad_norm: float = Field(default=1.0, gt=0, le=1e9)
    dtype: Dtype = "float32"
    """What matrix products are computed from; their sums, weights, gradients, optimiser and logits are float32 either
    way. Asked for bfloat16, models that are not `fused` and CPUs without AMX run under torch.autocast, the output
    embedding excepted; on a CPU `auto` leaves them in float32."""
    device: str = "cpu"
    """Where the model is trained. On anything but the CPU, which has not been tried yet, shared prompts go through
    FlexAttention."""
    loss: LossConfig = LossConfig()
    advantage: str = "grpo"
    max_tokens_per_micro_batch: int = Field(default=1024, ge=1, le=10**9)
    share_prompts: bool = True
    """Compute what several answers or segments have before them once. Falls back to once for each of them for models
    that cannot (metric `shared_prompts`)."""
    fused: bool = True
    """Compute the Llama and Qwen families by forward and backward passes written for them, on a CPU. Other models, and
    those that would differ, go through transformers either way (metric `fused`)."""
    activation_checkpointing: bool = False
    updates_per_batch: int = Field(default=1, ge=1, le=10**6)
    """Optimiser updates per train step, each on its share of the groups."""

    def problems(self) -> Iterator[str]:
        if not all(0 <= beta < 1 for beta in self.betas):
            yield f"betas is {self.betas}; both must be at least 0 and below 1"
        yield from _name_problems("advantage", self.advantage, tuple(ESTIMATORS))

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
        self, model_dir: str | Path, *, total_steps: int, deterministic: bool = False, threads: int | None = None
    ) -> TorchTrainWorker:
        """Load the model. Raises ModelError when it cannot be loaded or trained exactly."""
        from penstock.learn.worker import TorchTrainWorker

        self.check()
        return TorchTrainWorker(
            self, Path(model_dir), total_steps=total_steps, deterministic=deterministic, threads=threads
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
