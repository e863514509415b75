"""A run ends with what it lives on, whatever it waits for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from penstock.errors import EngineUnavailable, RunError
from penstock.testing import run_virtual
from penstock.trainer.site import LocalSite, ends_with


class Mortal(LocalSite):
    """Is lost after ten seconds."""

    async def lost(self) -> str:
        await asyncio.sleep(10)
        return "the cluster is gone"


async def swallows() -> None:
    """Work that is not given up when its caller is cancelled, and fails in its own way."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(100)
    raise EngineUnavailable("no engine is left")


async def forever() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("work", [forever, swallows])
def test_what_waits_ends_when_the_site_is_lost_and_says_why(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> tuple[float, int]:
        task = asyncio.current_task()
        assert task is not None
        with pytest.raises(RunError, match=r"^the cluster is gone; resume it$"):
            async with ends_with(Mortal(), "; resume it"):
                await work()
        ended_at = asyncio.get_running_loop().time()
        await asyncio.sleep(1)  # it is not cancelled any more
        return ended_at, task.cancelling()

    assert run_virtual(main()) == (10.0, 0)


def test_what_ends_before_is_left_alone() -> None:
    async def main() -> None:
        async with ends_with(Mortal()):
            await asyncio.sleep(5)
        with pytest.raises(EngineUnavailable):
            async with ends_with(Mortal()):
                raise EngineUnavailable("no engine is left")
        await asyncio.sleep(100)

    run_virtual(main())


def test_who_is_told_to_end_meanwhile_ends_for_that() -> None:
    async def main() -> None:
        async def run() -> None:
            async with ends_with(Mortal()):
                try:
                    await forever()
                finally:
                    await asyncio.sleep(5)  # it takes its time, and is told to end by somebody else

        running = asyncio.create_task(run())
        await asyncio.sleep(12)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    run_virtual(main())
