"""The sampler: which prompt comes next.

Its whole state is one number, the count of draws made. Draw d is prompt `order(seed, epoch)[d % n]` of epoch
`d // n`; the order is a pure function, so a restart continues the exact sequence from the number alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pydantic

from penstock.config import Config
from penstock.data.prompts import PromptSet, PromptSourceConfig
from penstock.errors import ConfigError, DatasetError
from penstock.rollout import Group, RolloutState, Status

_MASK = (1 << 64) - 1


class EndOfData(Exception):
    """All epochs that were asked for are drawn and nothing waits."""


class WaitingGroups(Protocol):
    """What the sampler asks of the replay buffer."""

    def get(self, n: int, task: str, status: Status) -> list[Group]:
        """Up to `n` waiting groups of this status, removed and marked as running."""
        ...

    def draw(self, group: Group, cursor: int) -> None:
        """Record a new group and the sampler's cursor after it, both or neither."""
        ...


class SamplerConfig(Config):
    """Draws prompts of a dataset, each `prompt_repeat_k` times, epoch after epoch."""

    dataset: pydantic.InstanceOf[PromptSourceConfig]
    """Where the prompts come from."""
    prompt_repeat_k: int = pydantic.Field(ge=1, le=10**5)
    """Rollouts per prompt: the size of a group."""
    shuffle: bool = True
    """Another order in every epoch; False: as they stand."""
    seed: int = 0
    """Of the order."""

    def build(self, prompts: PromptSet, *, waiting: WaitingGroups, epochs: int | None = None) -> Sampler:
        """`prompts` are those of `dataset.load`; the scan comes first, so that bad rows cost no device time."""
        return Sampler(
            prompts,
            prompt_repeat_k=self.prompt_repeat_k,
            shuffle=self.shuffle,
            seed=self.seed,
            waiting=waiting,
            epochs=epochs,
        )


class Sampler:
    """Hands out groups: first what waits in the buffer, then the next prompt, K rollouts of it."""

    def __init__(
        self,
        prompts: PromptSet,
        *,
        prompt_repeat_k: int,
        shuffle: bool,
        seed: int,
        waiting: WaitingGroups,
        epochs: int | None = None,
    ) -> None:
        """With `epochs`, `sample` raises EndOfData after that many passes; without, it goes on for ever."""
        if not len(prompts):
            raise DatasetError("the prompt set is empty; a sampler needs at least 1 prompt")
        if prompt_repeat_k < 1:
            raise ConfigError(f"prompt_repeat_k is {prompt_repeat_k}; it must be at least 1")
        self.prompt_set = prompts
        self._prompts = prompts.prompts
        self._n = len(prompts)
        self._suffixes = [f":{k}" for k in range(prompt_repeat_k)]
        self._shuffle = shuffle
        self._seed = seed
        self._waiting = waiting
        self._end = None if epochs is None else epochs * self._n
        self._cursor = 0
        self._order: Sequence[int] | None = None
        self._order_epoch = -1

    def __len__(self) -> int:
        return self._n

    @property
    def cursor(self) -> int:
        """How many groups were drawn, over all epochs."""
        return self._cursor

    async def sample(self, task_name: str, group_status: Sequence[Status] = ()) -> Group:
        """The first group that waits in one of these states, asked in order; otherwise a new one.

        Never waits. Raises EndOfData when the asked epochs are over; a draw that cannot be recorded is not made.
        """
        for status in group_status:
            if groups := self._waiting.get(1, task_name, status):
                return groups[0]
        draw = self._cursor
        if self._end is not None and draw >= self._end:
            raise EndOfData(f"task {task_name!r}: all {draw} groups are drawn")
        epoch, index = divmod(draw, self._n)
        order = self._order
        if order is None or epoch != self._order_epoch:
            order = self._begin_epoch(epoch)
        prompt = self._prompts[order[index]]
        group_id = f"{task_name}:{draw}"
        group = [
            RolloutState(prompt=prompt, task_name=task_name, group_id=group_id, rollout_id=group_id + suffix, draw=draw)
            for suffix in self._suffixes
        ]
        self._waiting.draw(group, draw + 1)
        self._cursor = draw + 1
        return group

    def seek(self, cursor: int) -> None:
        """Go on as if `cursor` groups had been drawn."""
        if cursor < 0:
            raise DatasetError(f"the sampler's cursor is {cursor}; it must be at least 0")
        self._cursor = cursor

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self._cursor, "num_prompts": self._n, "shuffle": self._shuffle, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Raises DatasetError when it belongs to another sequence of prompts."""
        mine = self.state_dict()
        problems = [f"{key} is not in the sampler's saved state" for key in mine if key not in state]
        problems += [
            f"the sampler's saved {key} is {state[key]}, now it is {mine[key]}; "
            "the sequence of prompts cannot be continued"
            for key in ("num_prompts", "shuffle", "seed")
            if key in state and state[key] != mine[key]
        ]
        if problems:
            raise DatasetError(problems)
        self.seek(int(state["cursor"]))

    def _begin_epoch(self, epoch: int) -> Sequence[int]:
        # A memoryview gives plain ints at a quarter of a list's memory.
        self._order = epoch_order(self._seed, epoch, self._n).data if self._shuffle else range(self._n)
        self._order_epoch = epoch
        return self._order


def epoch_order(seed: int, epoch: int, n: int) -> npt.NDArray[np.int64]:
    """The order of `n` prompts in one epoch: their indices sorted by a hash of (seed, epoch, index).

    Own arithmetic, because libraries may change the stream of their generators, and a run that is resumed after an
    upgrade must go on in the same order.
    """
    base = _mix(np.array([seed & _MASK], dtype=np.uint64))
    base = _mix(base ^ np.array([epoch & _MASK], dtype=np.uint64))
    indices: npt.NDArray[np.uint64] = np.arange(n, dtype=np.uint64)
    return np.argsort(_mix(base + indices), kind="stable").astype(np.int64)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64, element by element."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
