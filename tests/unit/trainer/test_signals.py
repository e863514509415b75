"""How a person ends a run, whatever the user's code does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

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
