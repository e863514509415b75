"""What an agent pays for speaking to the session endpoint in place of the engine.

sessions.throughput_share_32, _96, _192, _384
                       tokens/s through the endpoint, with so many busy sessions, over those of direct calls of the same
                       engine: a scripted one that makes 40 tokens/s for each of up to 1,024 requests, answers of 128
                       tokens. Each turn of a session asks with all of its conversation, and waits for a turn on disk.
                       In `detail` the share of the time that the endpoint's process was on a core, and that it waited
                       for one because the machine had other work
sessions.turns_per_s   turns of one process, with an engine that answers at once and 64 sessions
sessions.added_ms_4k, _64k
                       what the endpoint adds to a turn of a conversation of so many tokens, from the client's side
sessions.durable_ms    how long a finished turn waits until it is on disk, alone; in `detail` with 64 at once

Engine and endpoint are in one process, the clients in another. The tokenizer and the chat template are SmolLM2's.

python benchmarks/sessions.py [--seconds 10] [--sizes 32,384]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from penstock.agent_loop.asking import Asked
from penstock.agent_loop.parsers import hermes
from penstock.agent_loop.rendering import Seams
from penstock.agent_loop.session.server import Access, SessionServer
from penstock.agent_loop.session.session import Session, SessionRules
from penstock.agent_loop.transcript import Transcript
from penstock.models import load_tokenizer, resolve_model
from penstock.ports import FinishedTurn, GenerateRequest, Tokenizer
from penstock.replay import Ledger, ReplayBuffer
from penstock.rollout import FinishReason, Prompt, RolloutState, SampleParams, Tokens, Turn, pack_ids
from penstock.testing import EngineScript, ScriptedEngine

SIZES = (32, 96, 192, 384)
TOKENS_PER_S = 40.0
ANSWER_TOKENS = 128
WARM_UP_S = 4.0
TURNS = 24
"""Measured at each length of history."""


def figure(name: str, value: float, unit: str, **detail: Any) -> None:
    line = {"figure": f"sessions.{name}", "value": round(value, 4), "unit": unit, "detail": detail}
    print(json.dumps(line), flush=True)


# The endpoint's process.


class Host:
    """An engine, and sessions over it that keep their turns in a ledger."""

    def __init__(self, tokenizer: Tokenizer, tokens_per_s: float, directory: Path) -> None:
        self.tokenizer = tokenizer
        end = sorted(tokenizer.stop_ids)[0]
        word = tokenizer.encode(" so")[0]
        answer = [word] * (ANSWER_TOKENS - 1) + [end]
        self.engine = ScriptedEngine(EngineScript(tokens_per_s=tokens_per_s, answers=lambda _: answer))
        self.prompt = Prompt(messages=(), ids=pack_ids(tokenizer.render([{"role": "user", "content": "Go on."}])))
        self.params = SampleParams(max_tokens=ANSWER_TOKENS)
        self.buffer = ReplayBuffer(storage=Ledger.open(directory))
        self.seams = Seams(tokenizer)
        self.number = 0

    def rollout(self) -> RolloutState:
        name = f"bench:{self.number}"
        rollout = RolloutState(
            prompt=self.prompt, task_name="bench", group_id=name, rollout_id=f"{name}:0", draw=self.number
        )
        self.number += 1
        self.buffer.draw([rollout], self.number)
        return rollout

    def session(self) -> Session:
        asked = Asked(
            engine=self.engine,
            tokenizer=self.tokenizer,
            sample_params=self.params,
            on_pause="keep",
            turn_log=self.buffer,
        )
        return Session(
            Transcript(self.rollout(), asked),
            tokenizer=self.tokenizer,
            sample_params=self.params,
            rules=SessionRules(max_turns=10**6),
            parser=hermes,
            seams=self.seams,
        )

    async def direct(self, seconds: float, sessions: int) -> float:
        """Tokens/s of direct calls."""

        async def play(number: int) -> None:
            ids = self.prompt.ids
            for turn in range(10**6):
                request = GenerateRequest(
                    request_id=f"{number}/{turn}", prompt_ids=ids, params=self.params, seed=number, on_pause="keep"
                )
                ids += (await self.engine.generate(request)).ids

        playing = [asyncio.create_task(play(number)) for number in range(sessions)]
        rate = await self.rate(seconds)
        for task in playing:
            task.cancel()
        await asyncio.wait(playing)
        return rate

    async def rate(self, seconds: float) -> float:
        """Tokens/s that the engine makes, after a moment."""
        await asyncio.sleep(WARM_UP_S)
        before, started = (await self.engine.stats()).generated_tokens, time.perf_counter()
        await asyncio.sleep(seconds)
        return ((await self.engine.stats()).generated_tokens - before) / (time.perf_counter() - started)


def serve(pipe: Connection, model_dir: str) -> None:
    """Answer [tokens/s of the engine, sessions, seconds] with the accesses, then with its own rate; until None."""
    tokenizer = load_tokenizer(Path(model_dir))
    gc.collect()
    gc.freeze()  # as `penstock train` does: a pass over all that was imported stops every session for up to a second
    asyncio.run(_serve(pipe, tokenizer))


async def _serve(pipe: Connection, tokenizer: Tokenizer) -> None:
    while (asked := await asyncio.to_thread(pipe.recv)) is not None:
        tokens_per_s, sessions, seconds = asked
        with tempfile.TemporaryDirectory() as directory:
            host = Host(tokenizer, tokens_per_s, Path(directory))
            direct = await host.direct(seconds, sessions) if sessions in SIZES else 0.0
            server = SessionServer()
            await server.start()
            opened = [host.session() for _ in range(sessions)]
            pipe.send([(access.base_url, access.key) for _, access in map(server.open, opened)])
            cpu, late = time.process_time(), waited_for_a_core()
            through = await host.rate(seconds) if seconds else 0.0
            await asyncio.to_thread(pipe.recv)  # the clients are done
            pipe.send((direct, through, time.process_time() - cpu, waited_for_a_core() - late))
            for session in opened:
                await session.close()
            await server.close()
            await host.buffer.close()


def waited_for_a_core() -> float:
    """Seconds in which this thread could run, and others did. On Linux; elsewhere 0."""
    counts = Path("/proc/self/schedstat")
    return int(counts.read_text().split()[1]) / 1e9 if counts.exists() else 0.0


# The clients' process.


class Client:
    """A conversation that goes on and on, over one connection; as little work as can be on this side."""

    def __init__(self, access: Access, messages: list[dict[str, str]] | None = None) -> None:
        self._url = httpx.URL(access.base_url)
        self._head = (
            f"POST {self._url.path}/chat/completions HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {access.key}\r\n"
            "content-type: application/json\r\ncontent-length: "
        )
        self._messages = messages or [{"role": "user", "content": "Go on."}]
        self._body = ",".join(map(json.dumps, self._messages))
        self.turns = 0

    async def play(self, turns: int, on_turn: Callable[[float], None] | None = None) -> None:
        reader, writer = await asyncio.open_connection(self._url.host, self._url.port)
        try:
            for _ in range(turns):
                started = time.perf_counter()
                body = f'{{"model":"m","messages":[{self._body}]}}'.encode()
                writer.write(f"{self._head}{len(body)}\r\n\r\n".encode() + body)
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                answer = json.loads(await reader.readexactly(length))
                if b" 200 " not in head.partition(b"\r\n")[0]:
                    raise RuntimeError(answer)
                if on_turn is not None:
                    on_turn(time.perf_counter() - started)
                said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
                self._body += f',{json.dumps(said)},{{"role":"user","content":"And then?"}}'
                self.turns += 1
        finally:
            writer.close()


async def play_for(accesses: list[Access], seconds: float) -> float:
    """Turns/s of all sessions together."""
    clients = [Client(access) for access in accesses]
    playing = [asyncio.create_task(client.play(10**6)) for client in clients]
    started = time.perf_counter()
    await asyncio.wait(playing, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    rate = sum(client.turns for client in clients) / (time.perf_counter() - started)
    for task in playing:
        task.cancel()
    outcomes = await asyncio.gather(*playing, return_exceptions=True)
    if failed := [error for error in outcomes if isinstance(error, Exception)]:
        raise failed[0]
    return rate


async def latency(access: Access, tokens: int, tokenizer: Tokenizer) -> list[float]:
    """Seconds of each turn of a conversation that begins with so many tokens."""
    paragraph = "The quick brown fox jumps over the lazy dog, and then it runs into the woods. " * 28
    each = len(tokenizer.encode(paragraph))
    roles = ["user", "assistant"] * (tokens // each // 2)
    said = [{"role": role, "content": f"{number}: {paragraph}"} for number, role in enumerate(roles)]
    seconds: list[float] = []
    await Client(access, [*said, {"role": "user", "content": "Go on."}]).play(TURNS + 2, seconds.append)
    return seconds[2:]  # the first encodes all of it


async def durable(directory: Path, at_once: int) -> float:
    """The median milliseconds until a turn is on disk."""
    buffer = ReplayBuffer(storage=Ledger.open(directory))
    tokens = Tokens().append(range(ANSWER_TOKENS), [-0.5] * ANSWER_TOKENS, model_step=0)
    waited: list[float] = []

    async def write(number: int) -> None:
        name = f"bench:{number}"
        rollout = RolloutState(
            prompt=Prompt(ids=pack_ids([1])), task_name="bench", group_id=name, rollout_id=f"{name}:0", draw=number
        )
        buffer.draw([rollout], number + 1)
        for index in range(40):
            turn = Turn("generate", ANSWER_TOKENS, FinishReason.STOP, "so " * ANSWER_TOKENS)
            finished = FinishedTurn(
                task_name="bench", group_id=name, rollout_id=f"{name}:0", index=index, turn=turn, tokens=tokens
            )
            started = time.perf_counter()
            await buffer.append(finished, durable=True)
            waited.append(1000 * (time.perf_counter() - started))

    await asyncio.gather(*map(write, range(at_once)))
    await buffer.close()
    return statistics.median(waited)


async def main(seconds: float, sizes: list[int], pipe: Connection, tokenizer: Tokenizer) -> None:
    async def ask(tokens_per_s: float, sessions: int, measured: float) -> list[Access]:
        pipe.send((tokens_per_s, sessions, measured))
        return [Access(*access) for access in await asyncio.to_thread(pipe.recv)]

    async def told() -> tuple[float, float, float, float]:
        """Tokens/s of direct calls and through the endpoint; of its process the seconds on a core, and without one."""
        pipe.send("done")
        rates: tuple[float, float, float, float] = await asyncio.to_thread(pipe.recv)
        return rates

    for size in sizes:
        accesses = await ask(TOKENS_PER_S, size, seconds)
        played_s = WARM_UP_S + seconds + 1
        turns = await play_for(accesses, played_s) * played_s
        direct, through, cpu, late = await told()
        figure(
            f"throughput_share_{size}", 100 * through / direct, "%",
            tokens_per_s_direct=round(direct), tokens_per_s_through=round(through),
            engine=f"scripted, {TOKENS_PER_S:g} tokens/s a request, answers of {ANSWER_TOKENS}",
            cpu_ms_per_turn=round(1000 * cpu / turns, 2),
            on_a_core=round(cpu / played_s, 2), waiting_for_a_core=round(late / played_s, 2),
        )  # fmt: skip
    rate = await play_for(await ask(1e9, 64, 0), seconds)
    cpu_ms = 1000 * (await told())[2] / (rate * seconds)
    figure("turns_per_s", rate, "turns/s", sessions=64, clients="in another process", cpu_ms_per_turn=round(cpu_ms, 2))
    for name, tokens in (("4k", 4096), ("64k", 65536)):
        (access,) = await ask(1e9, 1, 0)
        turns = await latency(access, tokens, tokenizer)
        figure(
            f"added_ms_{name}", 1000 * statistics.median(turns), "ms",
            slowest_ms=round(1000 * max(turns), 2), engine="answers at once", durable="yes",
        )  # fmt: skip
        await told()
    with tempfile.TemporaryDirectory() as alone, tempfile.TemporaryDirectory() as together:
        value = await durable(Path(alone), 1)
        figure("durable_ms", value, "ms", with_64_at_once_ms=round(await durable(Path(together), 64), 3))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="each throughput is measured for so long")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="of those, with how many busy sessions")
    arguments = parser.parse_args()
    model = resolve_model("smollm2-135m")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, str(model)))
    process.start()
    try:
        sizes = [int(size) for size in arguments.sizes.split(",")]
        asyncio.run(main(arguments.seconds, sizes, ours, load_tokenizer(model)))
        ours.send(None)
        process.join(20)
    finally:
        process.kill()
    sys.exit(0)
