"""Answers that reached, or come near, the token budget (DAPO's over-long filtering and soft punishment)."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from penstock.config import Config


class OverlongConfig(Config):
    """What becomes of long answers. Lengths are of the tokens that the model wrote."""

    mask_truncated: bool = False
    """Do not train answers that the budget cut off. They stay in their group's baseline."""
    buffer_tokens: int | None = Field(default=None, ge=1, le=10**9)
    """The last so many tokens of the budget cost score: 0 at their beginning, `penalty` at the end. None: off."""
    penalty: float = Field(default=1.0, gt=0, le=1e6)
    """The most that length takes from a score. Only for `buffer_tokens`."""
    max_tokens: int | None = Field(default=None, ge=1, le=10**9)
    """The budget that `buffer_tokens` ends. None: the task's `sample_params.max_tokens`."""

    def problems(self) -> Iterator[str]:
        if self.buffer_tokens is not None and self.max_tokens is not None and self.buffer_tokens > self.max_tokens:
            yield f"buffer_tokens is {self.buffer_tokens}; it must be at most max_tokens, {self.max_tokens}"
        if self.buffer_tokens is None and (self.penalty != 1.0 or self.max_tokens is not None):
            yield (
                f"penalty is {self.penalty:g} and max_tokens {self.max_tokens}, but buffer_tokens is None: length "
                "costs nothing. Give buffer_tokens, or neither of them"
            )
        if not self.mask_truncated and self.buffer_tokens is None:
            yield "neither mask_truncated nor buffer_tokens is set; without them there is nothing to do"

    def shaping(self, length: int, budget: int) -> float:
        """What a length adds to the score: 0 or less."""
        if self.buffer_tokens is None:
            return 0.0
        budget = self.max_tokens or budget
        excess = length - (budget - self.buffer_tokens)
        return -self.penalty * min(1.0, max(0.0, excess / self.buffer_tokens))
