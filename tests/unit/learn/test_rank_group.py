"""What a call of all ranks comes to when some refuse it and some are lost; with ranks that follow a script."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.errors import InfrastructureFailure, StorageError, WeightSyncError
from penstock.learn.config import RanksConfig
from penstock.learn.rank_group import Broken, RankGroup, refusals
from penstock.rollout import FailureReason


class Scripted:
    """A rank that answers, refuses or dies, on a machine that may be gone."""

    address = "127.0.0.1"

    def __init__(self, does: Any, *, dies: bool = False, node: str = "here", lives: bool = True) -> None:
        self._does = does
        self.death: str | None = None
        self._dies = dies
        self.node = node
        self._lives = lives

    async def node_lives(self) -> bool:
        return self._lives

    async def call(self, method: str, *arguments: Any) -> Any:
        if self._dies:
            self.death = "it was killed"
            raise InfrastructureFailure(self.death, reason=FailureReason.ACTOR_DIED)
        if isinstance(self._does, Exception):
            raise self._does
        return self._does


def _called(*ranks: Any) -> list[Any]:
    return asyncio.run(RankGroup(ranks, RanksConfig()).call("write_weights"))


def test_what_a_rank_refuses_while_another_is_lost_is_what_the_loss_did_to_it() -> None:
    with pytest.raises(Broken, match="rank 1: it was killed") as broken:
        _called(Scripted(WeightSyncError("connection reset")), Scripted(None, dies=True))
    assert list(broken.value.culprits) == [1]
    assert broken.value.cause is None, "new ranks are asked again"


def test_what_a_rank_refuses_while_another_fails_and_none_is_lost_is_the_cause() -> None:
    refusal = StorageError("no space left")
    failure = InfrastructureFailure("a peer did not come", reason=FailureReason.ENGINE_ERROR)
    with pytest.raises(Broken) as broken:
        _called(Scripted(refusal), Scripted(failure))
    assert (list(broken.value.culprits), broken.value.cause) == ([1], refusal)


def test_what_all_refuse_is_answered_and_breaks_nothing() -> None:
    refusal = StorageError("no space left")
    assert refusals(_called(Scripted(refusal), Scripted(refusal))) == [refusal, refusal]


def test_with_a_rank_whose_machine_is_gone_all_others_there_are_lost_too_and_none_elsewhere() -> None:
    there = [Scripted(None, node="there", lives=False) for _ in range(2)]
    group = RankGroup([there[0], Scripted(None), there[1]], RanksConfig())  # type: ignore[list-item]
    assert asyncio.run(group.lost_with({2: "killed"})) == {0: "its machine is gone", 2: "killed"}
    assert asyncio.run(group.lost_with({1: "killed"})) == {1: "killed"}, "its machine lives"
    assert asyncio.run(group.lost_with({})) == {}
