"""A loss of the user's, by the dotted path of a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from penstock.config import import_name
from penstock.errors import ConfigError
from penstock.learn.losses.base import LossConfig, LossFunction, LossTerms, LossTokens


class CustomLossConfig(LossConfig):
    """A function `(LossTokens, CustomLossConfig) -> LossTerms`.

    Importance weights of `train.correction` are applied to what it answers only where the old policy is the trainer's
    own; against the engine's its ratio is taken for the weight.
    """

    function: str
    """`package.module.name` or `package.module:name`."""
    arguments: dict[str, Any] = {}
    """For the function, as `config.arguments`."""
    whole_answers: bool = False
    """Keep all trained tokens of an answer in one micro-batch, for `tokens.mean_over_answer` and its like."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        try:
            if not callable(import_name(self.function)):
                yield f"function is {self.function!r}, which is not a function"
        except ConfigError as error:
            yield f"function: {error}"

    def needs_whole_answers(self) -> bool:
        return self.whole_answers

    def follows_advantage(self) -> bool:
        return False

    def build(self) -> LossFunction:
        function = self.imported()

        def loss(tokens: LossTokens) -> LossTerms:
            terms: LossTerms = function(tokens, self)
            return terms

        return loss

    def imported(self) -> Callable[..., Any]:
        """The function itself. Raises ConfigError when it cannot be imported."""
        function: Callable[..., Any] = import_name(self.function)
        return function
