"""A loop that does not turn is noticed from outside, and the process ends with the stack that blocks it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

PROGRAM = """\
import asyncio, os, subprocess, sys, time
from pathlib import Path
import psutil
from penstock.judger import NativeJudgerConfig
from penstock.rollout import new_rollout
from penstock.trainer.heartbeat import Heartbeat

def blocks_for_ever():
    time.sleep(3600)

def turns_by_itself():
    while True:
        pass

async def main(behaviour, file):
    with Heartbeat(asyncio.get_running_loop(), Path(file), timeout_s=1.0, interval_s=0.05):
        if behaviour == "judge":
            judger = NativeJudgerConfig(reward_handler="penstock.judger.exact_match", num_workers=1).build()
            await judger.judge(new_rollout("q", ground_truth="a"))
            print(*(child.pid for child in psutil.Process().children()), flush=True)
            blocks_for_ever()
        if behaviour == "block":
            blocks_for_ever()
        if behaviour == "spin":
            turns_by_itself()
        print("begun", flush=True)
        await asyncio.sleep(1.5)
        time.sleep(0.5)
        await asyncio.sleep(0.1)
    print("done", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


def start(behaviour: str, file: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, behaviour, str(file)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_call_that_blocks_the_loop_ends_the_process_with_its_stack(tmp_path):
    for behaviour, function in (("block", "blocks_for_ever"), ("spin", "turns_by_itself")):
        file = tmp_path / behaviour
        process = start(behaviour, file)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "the event loop did not turn for 1 s" in said
        assert f"in {function}" in said
        assert file.read_text() == said


def test_a_loop_that_turns_is_left_alone(tmp_path):
    process = start("work", tmp_path / "stalled")
    out, said = process.communicate(timeout=60)
    assert (process.returncode, out, said) == (0, "begun\ndone\n", "")
    assert not (tmp_path / "stalled").exists()


def test_a_process_that_was_stopped_and_goes_on_is_not_stalled(tmp_path):
    process = start("work", tmp_path / "stalled")
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    process.send_signal(signal.SIGCONT)
    out, said = process.communicate(timeout=60)
    assert (process.returncode, out, said) == (0, "done\n", "")


def test_child_processes_end_with_it(tmp_path):
    process = start("judge", tmp_path / "stalled")
    out, _ = process.communicate(timeout=60)
    (pid,) = map(int, out.split())
    until = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert process.returncode == 1


def is_running(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
