"""Tools for tests, where worker processes can import them."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal


async def add(a: int, b: int = 1) -> str:
    """Adds two numbers
    and says the sum.

    Args:
        a: The first one,
            on two lines.
        b (int): The second one.

    Returns:
        The sum.
    """
    return str(a + b)


async def colour(name: Literal["red", "blue"], shades: list[str] | None = None) -> dict[str, Any]:
    """Looks a colour up."""
    return {"name": name, "shades": shades or []}


async def breaks() -> str:
    """Breaks."""
    raise ValueError("it is broken")


async def hangs() -> str:
    """Never answers."""
    await asyncio.get_running_loop().create_future()
    return ""


async def stubborn() -> str:
    """Never answers, and does not hear at once that it should end."""
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        await asyncio.sleep(3600)
    return ""


async def row_of(extra_info: dict[str, Any]) -> str:
    """Says what the row has."""
    return str(extra_info.get("city"))


def plain(word: str) -> str:
    """Doubles a word, without await."""
    return word * 2


def plain_breaks(word: str) -> str:
    """Raises."""
    raise KeyError(word)


def plain_hangs() -> str:
    """Sleeps."""
    time.sleep(3600)
    return ""


async def unhinted(a) -> str:  # type: ignore[no-untyped-def]
    return str(a)


async def positional(*words: str) -> str:
    return " ".join(words)
