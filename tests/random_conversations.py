"""Conversations drawn at random, as agents have them."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from session_clients import Message, Talk, as_message, places, receive, system, user

from penstock.agent_loop.rendering import APPENDS, template_problems
from penstock.rollout import RolloutState
from penstock.testing import run_virtual

WORDS = (
    *("assistant", "user", "the", "end", "4.", "\n\n", "\n", "tool", "it's", "a", "b", "{}", '"x":', "é", "🜁", "中文"),
    *("<think>", "</think>\n", "im_end", "as", "sis", "tant", ""),
)
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Adds.", "parameters": {"type": "object"}}}
    for name in ("add", "look_up")
]


def text(rng: random.Random) -> str:
    return "".join(rng.choice(WORDS) + rng.choice(["", " ", "\n"]) for _ in range(rng.randint(1, 8))).strip() or "so"


class Wanders:
    """A client that goes on, edits, forks, retries, resamples, calls tools, compacts and changes its mind."""

    def __init__(self, talk: Talk, rng: random.Random) -> None:
        self.talk = talk
        self.rng = rng
        refused = {problem.append for problem in template_problems(talk.tokenizer) if problem.refused}
        self.roles = [append for append in APPENDS if append not in refused]
        self.lines: list[list[Message]] = []
        self.samples = 0
        """Answers that this client had made for it, and has."""
        self.lost = 0

    async def wander(self, steps: int) -> None:
        self.lines.append([user("hello")])
        await self.extend(self.lines[0])
        for _ in range(steps):
            line = self.rng.choice(self.lines)
            move = self.rng.choice(["grow", "grow", "grow", "fork", "edit", "begin", "retry", "lose", "again", "tools"])
            await getattr(self, move)(line)

    async def grow(self, line: list[Message], **fields: Any) -> None:
        line += self.next_messages(line[-1])
        await self.extend(line, **fields)

    async def fork(self, line: list[Message]) -> None:
        turns = [place for place, message in enumerate(line) if message["role"] == "assistant"]
        self.lines.append(line[: self.rng.choice(turns) + 1])
        await self.grow(self.lines[-1])

    async def edit(self, line: list[Message]) -> None:
        edited = [dict(message) for message in line]
        place = self.rng.choice([i for i, message in enumerate(edited) if message["role"] == "user"])
        edited[place]["content"] += " " + text(self.rng)
        self.lines.append(edited)
        await self.grow(edited)

    async def begin(self, line: list[Message]) -> None:
        summary = user("summary: " + text(self.rng))
        self.lines.append([system(text(self.rng)), summary] if "system" in self.roles else [summary])
        await self.extend(self.lines[-1])

    async def retry(self, line: list[Message]) -> None:
        before = line[:-1]
        first = self.talk.ask(*before)
        second = self.talk.ask(*before, retried=True)
        assert first is second
        self.samples += 1
        self.lines.append([*before, as_message(await receive(second))])

    async def lose(self, line: list[Message]) -> None:
        reply = self.talk.ask(*line[:-1])
        await reply.changed.wait_until(lambda: reply.is_over)
        self.lost += 1

    async def again(self, line: list[Message]) -> None:
        self.lines.append(line[:-1])
        await self.extend(self.lines[-1])

    async def tools(self, line: list[Message]) -> None:
        await self.grow(list(line), tools=TOOLS[: self.rng.randint(1, 2)])

    async def extend(self, line: list[Message], **fields: Any) -> None:
        streams = self.rng.random() < 0.3
        line.append(as_message(await receive(self.talk.ask(*line, stream=streams, **fields))))
        self.samples += 1

    def next_messages(self, last: Message) -> list[Message]:
        said = text(self.rng)
        if last.get("tool_calls") and "tool" in self.roles:
            return [{"role": "tool", "tool_call_id": call["id"], "content": said} for call in last["tool_calls"]]
        if "system" in self.roles and self.rng.random() < 0.1:
            return [system(said), user(text(self.rng))]
        return [user(said)]


def answer(rng: random.Random) -> str:
    if rng.random() < 0.2:
        calls = [
            f'<tool_call>\n{{"name": "add", "arguments": {{"a": {n}}}}}\n</tool_call>' for n in range(rng.randint(1, 2))
        ]
        return "\n".join([text(rng), *calls][rng.randint(0, 1) :])
    return text(rng)


def conversed(family: str, seed: int, steps: int, **options: Any) -> tuple[Talk, Wanders]:
    """A session that such a client had, from its beginning to its end."""
    if "engine" in options:
        return asyncio.run(converse(family, seed, steps, **options))
    return run_virtual(converse(family, seed, steps, **options))


async def converse(family: str, seed: int, steps: int, **options: Any) -> tuple[Talk, Wanders]:
    rng = random.Random(f"{family}/{seed}")
    talk = Talk(*(answer(rng) for _ in range(4 * steps)), family=family, **options)
    client = Wanders(talk, rng)
    await client.wander(steps)
    await talk.over()
    return talk, client


def trained(rollout: RolloutState) -> list[bool]:
    """Of each answer on record, whether it is trained; it is so as a whole or not at all."""
    found = []
    for turn, (segment, begin, end) in places(rollout):
        mask = rollout.segments[segment].tokens.mask[begin:end]
        assert mask in (bytes(len(mask)), b"\x01" * len(mask))
        if turn.kind == "generate":
            found.append(mask[:1] == b"\x01")
        else:
            assert not any(mask)
    return found
