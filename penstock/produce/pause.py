"""Pausing the engines while the strategies drain: asked again until it is heard, never in the way of the drain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from penstock.ports import Engine
from penstock.replay import Signal

logger = logging.getLogger(__name__)


class PauseDeadlines(msgspec.Struct, frozen=True, kw_only=True):
    request_timeout_s: float = 30.0
    resend_interval_s: float = 5.0
    """0: the pause is asked for once."""


async def pause_engines(
    engine: Engine,
    deadlines: PauseDeadlines,
    *,
    none_protected: Callable[[], bool],
    changed: Signal,
    paused: asyncio.Event,
) -> None:
    """Wait for what must not be interrupted, then ask for the pause, again and again: an engine may miss one.

    Runs beside the drain until it is cancelled; `paused` is set when an engine agreed. Whoever drains bounds the first
    wait: it cancels what is still protected at its deadline.
    """
    await changed.wait_until(none_protected)
    while True:
        try:
            async with asyncio.timeout(deadlines.request_timeout_s):
                await engine.pause_generation()
            paused.set()
        except Exception as error:
            logger.warning("pausing the engines failed: %s: %s", type(error).__name__, error)
        if not deadlines.resend_interval_s:
            return
        await asyncio.sleep(deadlines.resend_interval_s)
