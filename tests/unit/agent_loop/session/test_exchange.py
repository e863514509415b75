"""A response and its client, without a socket."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.agent_loop.session.exchange import SEND_TIMEOUT_S, Exchange, Gone
from penstock.testing import run_virtual


def test_a_client_that_does_not_read_what_it_is_sent_is_taken_for_gone() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def never_taken(message: Any) -> None:
        await asyncio.Event().wait()

    async def main() -> float:
        exchange = Exchange({"headers": [], "path": "/v1/models"}, receive, never_taken)
        with pytest.raises(Gone):
            await exchange.respond(200, b"{}")
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == SEND_TIMEOUT_S
