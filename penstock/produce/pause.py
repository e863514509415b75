"""Pausing the engines while the strategies drain: asked again until it is heard, never in the way of the drain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from penstock.errors import PenstockError
from penstock.ports import Engine
from penstock.replay import Signal

logger = logging.getLogger(__name__)


class PauseDeadlines(msgspec.Struct, frozen=True, kw_only=True):
    request_timeout_s: float = 30.0
    resend_interval_s: float = 5.0
    """0: the pause is asked for once."""


async def pause_engines(
    engine: Engine | None, deadlines: PauseDeadlines, *, none_protected: Callable[[], bool], changed: Signal
) -> None:
    """Wait for what must not be interrupted, then ask for the pause until it succeeds. Runs beside the drain.

    Whoever drains bounds the first wait: it cancels what is still protected at its deadline.
    """
    await changed.wait_until(none_protected)
    while engine is not None:
        try:
            async with asyncio.timeout(deadlines.request_timeout_s):
                await engine.pause_generation()
            return
        except (TimeoutError, PenstockError) as error:
            logger.warning("pausing the engines failed: %s: %s", type(error).__name__, error)
        if not deadlines.resend_interval_s:
            return
        await asyncio.sleep(deadlines.resend_interval_s)
