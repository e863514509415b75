"""What judging costs: the contract over the bare call, and answers judged per second by each kind of judge.

judges.native_overhead       one call of a reward function in a worker process, under the contract, over a bare exchange
                             with the same worker: a frame there and a frame back; the function itself costs nothing
judges.http_overhead         one call of a service under the contract over a bare POST of the same body by httpx
judges.native_per_s, async_per_s, http_per_s, llm_per_s, composed_per_s, code_per_s
                             rollouts judged per second, 64 at a time. `composed` merges a function and a service
judges.sandbox_warm_per_s    programs run per second, one at a time, each in a sandbox that was ready
judges.sandbox_cold_per_s    the same, each waits for its sandbox to start

The services are in a process of their own and answer at once.

python benchmarks/judges.py [--seconds 3] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import msgspec

from penstock.judger import (
    CodeJudgerConfig,
    ComposedJudgerConfig,
    HTTPJudgerConfig,
    JudgerConfig,
    LLMJudgerConfig,
    NativeJudgerConfig,
    SandboxConfig,
    exact_match,
    weighted_sum,
)
from penstock.judger.native import NativeJudger
from penstock.judger.service import HTTPJudger
from penstock.ports import Judger
from penstock.rollout import RolloutState, Verdict, new_rollout

AT_A_TIME = 64
BATCH = 200
"""Calls of one kind before the other's turn: what else the machine does meets both."""


def figure(name: str, value: float, unit: str, **detail: Any) -> None:
    line = {"figure": f"judges.{name}", "value": round(value, 4), "unit": unit, "detail": detail}
    print(json.dumps(line), flush=True)


async def right_at_once(response: str, label: str, extra_info: dict[str, Any]) -> float:
    return float(response == label)


# The services.


def serve(ports: Any) -> None:
    """One address for scores and one for chat completions, until the process is ended."""

    async def main() -> None:
        chat = {"choices": [{"message": {"content": "Rating: [[10]]"}, "finish_reason": "stop"}]}
        scores = await asyncio.start_server(lambda r, w: answer(r, w, b'{"score": 1.0}'), "127.0.0.1", 0)
        chats = await asyncio.start_server(lambda r, w: answer(r, w, json.dumps(chat).encode()), "127.0.0.1", 0)
        ports.send([server.sockets[0].getsockname()[1] for server in (scores, chats)])
        await asyncio.gather(scores.serve_forever(), chats.serve_forever())

    asyncio.run(main())


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> None:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        while True:
            asked = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(asked.partition(b"content-length:")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            writer.write(head + body)
            await writer.drain()
    writer.close()


@contextlib.contextmanager
def services() -> Iterator[tuple[str, str]]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    try:
        scores, chats = ours.recv()
        yield f"http://127.0.0.1:{scores}/judge", f"http://127.0.0.1:{chats}/v1"
    finally:
        process.terminate()
        process.join()


# What is judged.


def answered(number: int, kind: str) -> RolloutState:
    """Each is another answer: nothing is remembered."""
    label: Any = {"inputs": [""], "outputs": [str(number)]} if kind == "code" else str(number)
    rollout = new_rollout(f"What is {number}?", ground_truth=label)
    rollout.response_text = f"print({number})" if kind == "code" else str(number)
    return rollout


@contextlib.asynccontextmanager
async def built(config: JudgerConfig) -> Any:
    judger = config.build()
    try:
        yield judger
    finally:
        await judger.close()


async def rate(kind: str, judger: Judger, seconds: float) -> tuple[float, int]:
    """Judged per second, AT_A_TIME under way, and how many; the first of each place do not count."""
    loop, numbers, done = asyncio.get_running_loop(), iter(range(10**9)), 0
    await asyncio.gather(*(judger.judge(answered(next(numbers), kind)) for _ in range(AT_A_TIME)))
    started = loop.time()

    async def place() -> None:
        nonlocal done
        while loop.time() < started + seconds:
            verdict = await judger.judge(answered(next(numbers), kind))
            assert isinstance(verdict, Verdict) and verdict.score > 0, verdict
            done += 1

    await asyncio.gather(*(place() for _ in range(AT_A_TIME)))
    return done / (loop.time() - started), done


async def kinds(service: str, chat: str, seconds: float) -> None:
    function = NativeJudgerConfig(reward_handler=exact_match)
    by_service = HTTPJudgerConfig(url=service)
    merged = ComposedJudgerConfig(
        all_of={"right": function, "service": by_service}, merge=weighted_sum, weights={"right": 1.0, "service": 0.5}
    )
    configs: dict[str, JudgerConfig] = {
        "native": function,
        "async": NativeJudgerConfig(reward_handler=right_at_once),
        "http": by_service,
        "llm": LLMJudgerConfig(base_url=chat, model="judge"),
        "composed": merged,
        "code": CodeJudgerConfig(sandbox=SandboxConfig(warm=4, max_running=2)),
    }
    for kind, config in configs.items():
        async with built(config) as judger:
            per_s, done = await rate(kind, judger, seconds)
            figure(f"{kind}_per_s", per_s, "rollouts/s", rollouts=done, at_a_time=AT_A_TIME, cores=os.cpu_count())


# The contract over the bare call.


async def compared(
    bare: Callable[[RolloutState], Awaitable[Any]], judged: Callable[[RolloutState], Awaitable[Any]], rounds: int
) -> tuple[float, float, float]:
    """How much longer the second takes, and microseconds of each, one at a time, in turns."""
    took: dict[str, list[float]] = {"bare": [], "judged": []}
    for _ in range(rounds + 1):
        for name, call in (("bare", bare), ("judged", judged)):
            rollouts = [answered(number, "") for number in range(BATCH)]
            started = time.perf_counter()
            for rollout in rollouts:
                await call(rollout)
            took[name].append((time.perf_counter() - started) / BATCH)
    ratios = [judged_s / bare_s for bare_s, judged_s in zip(took["bare"][1:], took["judged"][1:], strict=True)]
    return statistics.median(ratios), *(1e6 * statistics.median(took[name][1:]) for name in ("bare", "judged"))


async def overheads(service: str, rounds: int) -> None:
    async with built(NativeJudgerConfig(reward_handler=exact_match, num_workers=1)) as native:
        assert isinstance(native, NativeJudger)
        await native.judge(answered(0, ""))
        pool = native._caller.pool
        assert pool is not None
        (worker,) = pool._workers

        async def exchange(rollout: RolloutState) -> None:
            worker.calls += 1
            arguments = msgspec.msgpack.encode([rollout.response_text, rollout.ground_truth, {}])
            await worker._exchange(arguments)

        ratio, bare_us, judged_us = await compared(exchange, native.judge, rounds)
    figure("native_overhead", ratio, "x", bare_us=round(bare_us), judged_us=round(judged_us), rounds=rounds)

    async with built(HTTPJudgerConfig(url=service)) as http, httpx.AsyncClient(trust_env=False) as client:
        assert isinstance(http, HTTPJudger)

        async def post(rollout: RolloutState) -> None:
            body = msgspec.json.encode(http._question([rollout]))
            reply = await client.post(service, content=body, headers={"content-type": "application/json"})
            assert reply.json()["score"] == 1.0

        ratio, bare_us, judged_us = await compared(post, http.judge, rounds)
    figure("http_overhead", ratio, "x", bare_us=round(bare_us), judged_us=round(judged_us), rounds=rounds)


# The sandbox.


async def sandbox(warm: bool, runs: int) -> None:
    config = CodeJudgerConfig(sandbox=SandboxConfig(warm=1 if warm else 0, max_running=1))
    async with built(config) as judger:
        seconds = []
        for number in range(runs + 1):
            if warm:
                # Ready before the run, and not counted: a model writes its answers meanwhile.
                judger.pool.fill()
                await judger.pool._warm[0].get_ready(30.0)
            started = time.perf_counter()
            verdict = await judger.judge(answered(number, "code"))
            seconds.append(time.perf_counter() - started)
            assert verdict == Verdict(1.0, {"tests_passed": 1.0}), verdict
    middle = statistics.median(seconds[1:])
    name = "sandbox_warm_per_s" if warm else "sandbox_cold_per_s"
    figure(name, 1 / middle, "runs/s", ms=round(1e3 * middle, 1), runs=runs, kind=judger.pool.walls.kind)


async def main(seconds: float, rounds: int, runs: int) -> None:
    with services() as (service, chat):
        await overheads(service, rounds)
        await kinds(service, chat, seconds)
    await sandbox(True, runs)
    await sandbox(False, runs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each kind")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=40, help="of the sandbox")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.seconds, arguments.rounds, arguments.runs))
