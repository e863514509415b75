from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tool_functions
from chat_families import tokenizer_of

from penstock.agent_loop import ToolAgentLoop
from penstock.agent_loop.tools import ToolLimits
from penstock.played import read_played
from penstock.ports import Completion, FinishedTurn, GenerateRequest
from penstock.replay.codec import encode_turn
from penstock.replay.schema import TurnRow
from penstock.replay.turns import put_back_turns
from penstock.rollout import FinishReason, Prompt, RolloutState, SampleParams, Status, pack_ids, unpack_ids
from penstock.testing import CharTokenizer, EngineScript, ScriptedEngine, run_virtual
from penstock.testing.tokenizer import END, TURN


class NoWeights:
    def tensors(self) -> Any:
        yield from ()


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def rollout_of(tokenizer: Any = None, **fields: Any) -> RolloutState:
    messages = ({"role": "user", "content": "?"},)
    prompt = Prompt(messages=messages, ids=pack_ids((tokenizer or CharTokenizer()).render(messages)))
    return RolloutState(prompt=prompt, task_name="t", group_id="t:0", rollout_id="t:0:0", **fields)


class Saying(ScriptedEngine):
    """Its n-th answer is the n-th text; notes what it made for whom."""

    def __init__(self, *texts: str, tokens_per_s: float = 10.0, tokenizer: Any = None) -> None:
        self._encode = (tokenizer or CharTokenizer()).encode
        self._end = min((tokenizer or CharTokenizer()).stop_ids)
        self._texts = texts
        self.made: list[tuple[GenerateRequest, Completion]] = []
        super().__init__(EngineScript(tokens_per_s=tokens_per_s, answers=self._say))

    def _say(self, request: GenerateRequest) -> list[int]:
        # An answer ends with its end token; the prompt has one for each before it.
        turn = unpack_ids(request.prompt_ids).tolist().count(self._end)
        return [*self._encode(self._texts[turn]), self._end]

    async def generate(self, request: GenerateRequest) -> Completion:
        completion = await super().generate(request)
        self.made.append((request, completion))
        return completion


def build(engine: ScriptedEngine, *functions: Any, tokenizer: Any = None, **options: Any) -> ToolAgentLoop:
    return ToolAgentLoop(
        engine=engine,
        tokenizer=tokenizer or CharTokenizer(),
        judger=None,
        sample_params=options.pop("sample_params", SampleParams(max_tokens=10_000)),
        tools=functions or (tool_functions.add,),
        parser=options.pop("parser", "json"),
        **options,
    )


def play(loop: ToolAgentLoop, rollout: RolloutState | None = None) -> RolloutState:
    async def main() -> RolloutState:
        [played] = await loop.generate_group([rollout or rollout_of()], enable_partial_rollout=True)
        await loop.close()
        return played

    found: RolloutState = run_virtual(main())
    return found


def said(rollout: RolloutState) -> list[tuple[str, str, str]]:
    return [(turn.kind, turn.name, turn.text) for turn in rollout.turns]


# A conversation.


def test_calls_are_made_and_the_model_goes_on_after_their_results() -> None:
    first = call("add", a=1, b=2)
    rollout = play(build(Saying(first, "It is 3.")))
    assert rollout.status is Status.COMPLETED
    assert said(rollout) == [
        ("generate", "", first), ("tool", "add", "3"), ("message", "", ""), ("generate", "", "It is 3."),
    ]  # fmt: skip
    told = [TURN, *map(ord, "3")]
    assert rollout.response_ids.tolist() == [*map(ord, first), END, *told, *map(ord, "It is 3."), END]
    assert rollout.response_mask.tolist() == [1] * (len(first) + 1) + [0] * len(told) + [1] * 9
    assert rollout.response_text == first + "It is 3."


def test_what_it_did_is_kept_with_its_seconds() -> None:
    async def slow(a: int) -> str:
        """Waits."""
        await asyncio.sleep(2.5)
        return "5"

    first = call("slow", a=1)
    rollout = play(build(Saying(first, "It is 5.", tokens_per_s=10.0), slow))
    spans = [(span.stage, round(span.seconds, 3)) for span in read_played(rollout.played)]
    assert spans == [("generate", (len(first) + 1) / 10), ("tool", 2.5), ("generate", 0.9)]


def test_several_calls_of_an_answer_run_at_once_up_to_the_limit() -> None:
    running, most = 0, 0

    async def slow(a: int) -> str:
        """Waits."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(4 - a)
        running -= 1
        return str(a)

    calls = json.dumps([{"name": "slow", "arguments": {"a": a}} for a in range(4)])
    rollout = play(build(Saying(calls, "done"), slow, max_parallel_calls=2))
    assert most == 2
    assert rollout.response_ids.tolist()[len(calls) + 1 :][:8] == [TURN, 48, TURN, 49, TURN, 50, TURN, 51]


def test_the_turn_cap_ends_the_conversation_without_calling_again() -> None:
    calls = Counter[str]()

    async def count() -> str:
        """Counts."""
        calls["count"] += 1
        return "1"

    rollout = play(build(Saying(*[call("count")] * 9), count, max_turns=3))
    assert rollout.status is Status.COMPLETED
    assert calls["count"] == 2
    assert [kind for kind, _, _ in said(rollout)].count("generate") == 3


def test_the_budget_counts_answers_and_results_and_ends_the_conversation() -> None:
    first = call("add", a=1)
    budget = len(first) + 1 + 2  # the answer with its end, and all of the result
    rollout = play(build(Saying(first, "never"), sample_params=SampleParams(max_tokens=budget)))
    assert rollout.finish_reason is FinishReason.LENGTH
    assert rollout.num_tokens == len(first) + 1
    longer = play(build(Saying(first, "never"), sample_params=SampleParams(max_tokens=budget + 2)))
    assert longer.finish_reason is FinishReason.LENGTH
    assert longer.response_text == first + "ne"


def test_a_turn_has_a_budget_of_its_own_and_a_call_that_is_cut_is_not_made() -> None:
    first = call("add", a=1)
    rollout = play(build(Saying(first, "never"), max_tokens_per_turn=len(first)))
    assert said(rollout) == [("generate", "", first)]
    assert rollout.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("family", ["qwen2.5", "llama3", "mistral", "glm4"])
def test_results_are_written_by_the_models_own_template(family: str) -> None:
    tokenizer = tokenizer_of(family)
    parser = "llama3_json" if family == "llama3" else "hermes"
    first = call("add", a=1, b=2) if family == "llama3" else f"<tool_call>\n{call('add', a=1, b=2)}\n</tool_call>"
    engine = Saying(first, "3", tokenizer=tokenizer)
    engine._say = lambda request: [  # type: ignore[method-assign]
        *tokenizer.encode("3" if request.prompt_ids != rollout.prompt.ids else first), min(tokenizer.stop_ids)
    ]  # fmt: skip
    engine.script = EngineScript(tokens_per_s=10.0, answers=engine._say)
    rollout = rollout_of(tokenizer)
    played = play(build(engine, tokenizer=tokenizer, parser=parser), rollout)
    assert played.status is Status.COMPLETED, played.error
    middle = played.response_ids[played.response_mask == 0].tolist()
    written = str(tokenizer.inner.decode(middle))
    assert {
        "qwen2.5": "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        "llama3": "<|start_header_id|>ipython<|end_header_id|>\n\n3<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "mistral": '[TOOL_RESULTS] {"content": "3", "call_id": "call00100"}[/TOOL_RESULTS]',
        "glm4": "\n3<|assistant|>\n",
    }[family] == written


# What goes wrong.


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (call("subtract"), "unknown_tool"),
        (call("add", a="x"), "bad_call"),
        ('{"name": "add", "arguments": {', "bad_call"),
        (call("breaks"), "raised"),
        (call("hangs"), "timeout"),
        (call("stubborn"), "timeout"),
    ],
)
def test_a_call_that_fails_is_told_to_the_model_which_goes_on(text: str, outcome: str) -> None:
    tools = (tool_functions.add, tool_functions.breaks, tool_functions.hangs, tool_functions.stubborn)
    rollout = play(build(Saying(text, "Sorry."), *tools, limits=ToolLimits(timeout_s=30.0)))
    assert rollout.status is Status.COMPLETED
    assert [turn.outcome for turn in rollout.turns if turn.kind == "tool"] == [outcome]
    assert rollout.response_text.endswith("Sorry.")


def test_a_hanging_tool_costs_its_deadline_and_no_sibling_waits_for_it() -> None:
    async def main() -> tuple[list[RolloutState], float]:
        loop = build(Saying(call("hangs"), "Sorry."), tool_functions.hangs, limits=ToolLimits(timeout_s=30.0))
        group = [rollout_of() for _ in range(4)]
        for number, rollout in enumerate(group):
            rollout.rollout_id = f"t:0:{number}"
        played = await loop.generate_group(group, enable_partial_rollout=False)
        return played, asyncio.get_running_loop().time()

    group, seconds = run_virtual(main())
    assert {rollout.status for rollout in group} == {Status.COMPLETED}
    assert seconds < 30 + 10


# Any interleaving of answers, tools, failures and pauses.


class Kept:
    """A turn log in memory, as a ledger keeps it."""

    def __init__(self) -> None:
        self.rows: list[TurnRow] = []

    async def append(self, turn: FinishedTurn, *, durable: bool = False) -> None:
        self.rows.append(TurnRow(len(self.rows), 0, turn.rollout_id, turn.index, encode_turn(turn)))


now_playing: list[World] = []


async def work(key: str, seconds: float, fails: bool) -> str:
    """Works."""
    now_playing[-1].calls[key] += 1
    await asyncio.sleep(seconds)
    if fails:
        raise ValueError(key)
    return key * 2


class World:
    """One random conversation, and what must come out of it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.calls: Counter[str] = Counter()
        """Calls that were begun, by their key."""
        self.crashes = 0
        self.over: dict[str, int] = {}
        """How often those were begun that a crash found on record."""
        self.texts = [self._answer(turn) for turn in range(self.rng.randint(1, 4))] + ["Done."]
        self.engine = Saying(*self.texts, tokens_per_s=self.rng.choice([5.0, 40.0, 1000.0]))
        self.kept = Kept()
        at_once, limits = self.rng.randint(1, 3), ToolLimits(timeout_s=5.0)
        self.loop = build(self.engine, work, limits=limits, max_parallel_calls=at_once, turn_log=self.kept)
        now_playing.append(self)

    def _answer(self, turn: int) -> str:
        calls = [self._call(f"{turn}.{number}") for number in range(self.rng.randint(1, 3))]
        if self.rng.random() < 0.1:
            return '{"name": "work", "arguments": {"key": '
        return json.dumps(calls)

    def _call(self, key: str) -> dict[str, Any]:
        name = self.rng.choice(["work", "work", "work", "unknown"])
        arguments = {"key": key, "seconds": self.rng.choice([0.0, 0.3, 2.0, 99.0]), "fails": self.rng.random() < 0.2}
        return {"name": name, "arguments": arguments if self.rng.random() < 0.9 else {"kee": key}}

    async def play(self, disturbances: int) -> RolloutState:
        """To its end, whatever comes between."""
        rollout, model_step = rollout_of(), 0
        while rollout.status is not Status.COMPLETED:
            rollout.status = Status.INIT
            playing = asyncio.create_task(self.loop.generate_group([rollout], enable_partial_rollout=True))
            if disturbances:
                disturbances -= 1
                await asyncio.wait({playing}, timeout=self.rng.choice([0.0, 0.1, 0.7, 3.0, 8.0]))
                if self.rng.random() < 0.3:
                    rollout = await self._crash(playing, model_step)
                    continue
                await self.engine.pause_generation()
                await playing
                model_step += self.rng.randint(0, 1)
                await self.engine.load_weights(NoWeights(), model_step)
                await self.engine.continue_generation()
            [rollout] = await playing
            assert rollout.status is not Status.FAILED, rollout.error
        return rollout

    async def _crash(self, playing: asyncio.Task[Any], model_step: int) -> RolloutState:
        """The process dies; what a ledger kept is put back."""
        self.crashes += 1
        playing.cancel()
        await asyncio.wait({playing})
        rollout = rollout_of()
        put_back_turns(rollout, self.kept.rows, model_step=model_step)
        answers = 0
        for turn in rollout.turns:
            answers += turn.kind == "generate"
            if turn.kind == "tool":
                key = f"{answers - 1}.{turn.call}"
                self.over[key] = self.calls[key]
        return rollout


@pytest.mark.sized
def test_masks_logprobs_and_versions_are_right_over_a_thousand_random_interleavings(
    size: Callable[[int, int], int],
) -> None:
    for seed in range(size(250, 1000)):
        undisturbed = run_virtual(World(seed).play(0))
        world = World(seed)
        rollout = run_virtual(world.play(random.Random(seed).randint(1, 6)))
        where = f"seed {seed}"
        assert rollout.response_ids.tolist() == undisturbed.response_ids.tolist(), where
        mask = rollout.response_mask
        assert mask.tolist() == undisturbed.response_mask.tolist(), where
        assert said(rollout) == said(undisturbed), where
        made = rollout.response_ids[mask == 1]
        assert made.tolist() == [i for text in world.texts[: len(made)] for i in (*map(ord, text), END)][: len(made)]
        assert np.array_equal(rollout.logprobs[mask == 1], np.float32(-0.5) - (made % 8) / np.float32(8)), where
        assert not rollout.logprobs[mask == 0].any(), where
        assert rollout.model_steps[mask == 1].tolist() == made_by(world.engine, rollout), where
        assert (np.diff(rollout.model_steps) >= 0).all(), where
        assert all(world.calls[key] == count for key, count in world.over.items()), where
        assert world.crashes or all(count == 1 for count in world.calls.values()), where


def made_by(engine: Saying, rollout: RolloutState) -> list[int]:
    """The model step of every token the model wrote, by what the engine said when it made them."""
    by_place: dict[int, int] = {}
    for request, completion in engine.made:
        place = (len(request.prompt_ids) + len(request.response_ids) - len(rollout.prompt.ids)) // 4
        for step, count in completion.steps:
            # What a crash took was made again, later.
            by_place.update({place + i: step for i in range(count)})
            place += count
    return [by_place[place] for place in np.flatnonzero(rollout.response_mask)]
