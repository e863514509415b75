"""The contract of all engines, through the controller."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from engine_contract import (
    CONTRACT,
    Subject,
)

from penstock.engine import RolloutControllerConfig


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_the_contract_holds_for_the_controller(
    check: Callable[[Subject], Awaitable[None]], subjects: dict[str, Subject]
) -> None:
    inner = subjects["llama"]
    config = RolloutControllerConfig()
    subject = Subject(
        make=lambda: config.build({"only": inner.make()}, max_running=6),
        other_weights=inner.other_weights,
        reference=inner.reference,
    )
    asyncio.run(check(subject))
