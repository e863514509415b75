"""Reward functions that behave well, and that do not. Loaded by file, as a run's configuration is."""

import asyncio
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path


def length(response, label, extra_info):
    return len(response)


def rich(response, label, extra_info):
    return {"score": True, "format": 0.5, "text": "well done", "pred": "ignored", "label_is": label == [1, {"a": "b"}]}


def by_command(response, label, extra_info):
    """Does what the response says; shows each kind of misbehaviour through one function."""
    if response == "hang":
        time.sleep(3600)
    if response == "hang and tell":
        Path(label).touch()
        time.sleep(3600)
    if response == "hang with a child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        Path(label).write_text(str(child.pid))
        time.sleep(3600)
    if response == "exit":
        os._exit(3)
    if response == "sys.exit":
        sys.exit(0)
    if response == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if response == "raise":
        raise ValueError("no such thing")
    if response == "print":
        print("x" * 100_000, flush=True)
        os.write(1, b"\x00\x00\x00\x05garbage")
    if response == "eat memory":
        hoard = []
        while True:
            hoard.append(bytearray(16 << 20))
            time.sleep(0.01)
    if response == "leak":
        LEAKED.append(bytearray(b"x") * (160 << 20))
    if response == "fork":
        os.fork()
        return 7.0
    if response == "slow pid":
        time.sleep(0.1)
        return os.getpid()
    if response == "pid":
        return os.getpid()
    if response == "wait for children":
        try:
            return os.wait()[0]
        except ChildProcessError:
            return 0.0
    if response == "torch":
        return "torch" in sys.modules or "pydantic" in sys.modules
    return 1.0


LEAKED = []


def verl_compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": solution_str == ground_truth, "source_is": data_source == "gsm8k", "level": extra_info["level"]}


def verl_gsm8k(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    assert method == "strict"
    return score if solution_str == ground_truth else format_score


def verl_open(solution_str, **kwargs):
    return kwargs["data_source"] == "gsm8k" and solution_str == kwargs["ground_truth"]


async def verl_async(data_source, solution_str, ground_truth, extra_info):
    return data_source == "gsm8k" and solution_str == ground_truth


def trl_reward(completions, **kwargs):
    return [0.0 for _ in completions]


def trl_with_prompts(prompts, completions, answer=None):
    return [0.0 for _ in completions]


def verl_batch(data_sources, solution_strs, ground_truths, extra_infos=None):
    return [0.0 for _ in solution_strs]


def openrlhf(queries, prompts, labels):
    return 0.0


def other_order(data_source, answer, label):
    return 0.0


def verl_with_more(data_source, solution_str, ground_truth, tokenizer):
    return 0.0


class Unshowable:
    def __repr__(self):
        raise RuntimeError


def forges(response, label, extra_info):
    """Answer in the worker's stead: a frame on its channel, which any code of its process can reach."""
    os.write(int(sys.argv[1]), struct.pack(">I", len(label)) + label)
    time.sleep(3600)


def strange(response, label, extra_info):
    if response == "raise surrogate":
        raise ValueError("\ud800")
    return {
        "nan": float("nan"),
        "inf": float("-inf"),
        "string": "1.0",
        "none": None,
        "missing": {"points": 1.0},
        "huge": {"score": 1.0, "text": "x" * 10_000_000},
        "huge string": "x" * 10_000_000,
        "list": [1.0],
        "huge int": 10**400,
        "complex": 1j,
        "part nan": {"score": 1.0, "style": float("nan")},
        "many parts": {"score": 1.0} | {f"part {index}": 1.0 for index in range(101)},
        "score string": {"score": "0.5"},
        "surrogate": {"score": 1.0, "text": "\ud800"},
        "no repr": Unshowable(),
    }[response]


def fails_once(response, label, extra_info):
    """Fails the first time it is called, in whichever process: the file is the memory."""
    if not Path(label).exists():
        Path(label).touch()
        os._exit(1)
    return 1.0


def counts_calls(response, label, extra_info):
    with Path(label).open("a") as calls:
        calls.write("x")
    return Path(label).stat().st_size


async def thinks(response, label, extra_info):
    if response == "hang":
        await asyncio.sleep(3600)
    if response == "stubborn":
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if label.is_set():
                    raise
    if response == "raise":
        raise ValueError("no such thing")
    if response == "sys.exit":
        sys.exit(1)
    await asyncio.sleep(0)
    return {"score": 0.25}


def average(verdicts):
    return sum(verdict.score for verdict in verdicts.values()) / len(verdicts)


def hanging_merge(verdicts):
    time.sleep(3600)


class Graded:
    def __init__(self, response, label, extra_info):
        self.score = 1.0


class Grader:
    @staticmethod
    def grade(response, label, extra_info):
        return 2.0

    def method(self, response, label, extra_info):
        return 1.0


def make_closure():
    def inner(response, label, extra_info):
        return 1.0

    return inner


not_a_function = 3


def sees_variable(response, label, extra_info):
    """Whether a worker sees the variable that the label names."""
    return float(label in os.environ)


def obeys(response, label, extra_info):
    """A score that only this answer has, or whatever else the response says."""
    if response.startswith("score "):
        return float(response.removeprefix("score "))
    if response.startswith("slow "):
        time.sleep(0.02)
        return float(response.removeprefix("slow "))
    if response == "100 MB":
        return "x" * (100 << 20)
    if response in ("nan", "inf", "string", "none", "missing", "list", "surrogate"):
        return strange(response, label, extra_info)
    return by_command(response, label, extra_info)


async def obeys_on_the_loop(response, label, extra_info):
    if response in ("hang", "raise", "sys.exit"):
        return await thinks(response, label, extra_info)
    if response.startswith("slow "):
        await asyncio.sleep(0.02)
        return float(response.removeprefix("slow "))
    return obeys(response, label, extra_info)


def obeys_for_a_group(responses, label, extra_info):
    if "short" in responses:
        return [1.0]
    return [obeys(response, label, extra_info) for response in responses]


def merges_or_not(verdicts):
    """The mean; of the scores that have a meaning here, something else."""
    score = average(verdicts)
    return {1001.0: "text", 1002.0: float("nan"), 1003.0: None}.get(score, score)
