"""How a person ends a run, whatever the user's code does."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from penstock.testing import run_virtual
from penstock.trainer.signals import Stop

PROGRAM = """
import asyncio, sys, time
from penstock.events import Nobody
from penstock.trainer import signals

signals.END_WITHIN_S = 1.0

async def ends():
    await asyncio.sleep(60)

async def swallows():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

async def blocks():
    time.sleep(60)

async def main():
    stop = signals.Stop()
    with signals.stopped_by_signals(stop, Nobody()):
        print("ready", flush=True)
        await globals()[sys.argv[1]]()

try:
    asyncio.run(main())
except asyncio.CancelledError:
    sys.exit(130)
"""


@pytest.mark.parametrize("behaviour", ["ends", "swallows", "blocks"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_two_signals_end_the_process_whatever_its_code_does(behaviour: str, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, behaviour], stdout=subprocess.PIPE, text=True, env=os.environ.copy()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        time.sleep(0.2)
        assert process.poll() is None, "the first signal only asks"
        process.send_signal(number)
        assert process.wait(timeout=30) == 130


def test_what_a_stop_cuts_off_has_ended_when_that_is_known() -> None:
    ended: list[str] = []

    async def work(name: str, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
            ended.append(f"{name} done")
        except asyncio.CancelledError:
            await asyncio.sleep(1)
            ended.append(f"{name} cut off")
            raise

    async def main() -> None:
        stop = Stop()
        assert not await stop.cuts_off(work("first", 5))
        asyncio.get_running_loop().call_later(5, stop.request)
        assert await stop.cuts_off(work("second", 50))
        assert await stop.cuts_off(work("third", 5))
        assert ended == ["first done", "second cut off"]

    run_virtual(main())


def test_what_fails_before_a_stop_fails_as_itself() -> None:
    async def fails() -> None:
        raise ValueError("as itself")

    with pytest.raises(ValueError, match="as itself"):
        run_virtual(Stop().cuts_off(fails()))
