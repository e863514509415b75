from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.agent_loop import AgentLoop, SingleTurnAgentLoop, rollout_seed
from penstock.agent_loop.asking import Asked
from penstock.agent_loop.transcript import Transcript
from penstock.errors import DataFailure, Interrupted
from penstock.ports import Completion, FinishedTurn, GenerateRequest
from penstock.replay.codec import encode_turn
from penstock.replay.schema import TurnRow
from penstock.replay.turns import put_back_turns
from penstock.rollout import (
    NO_TOKENS,
    ROOT,
    FinishReason,
    Group,
    Prompt,
    RolloutState,
    SampleParams,
    Segment,
    Status,
    Turn,
    pack_ids,
    unpack_ids,
)
from penstock.testing import CharTokenizer, EngineScript, ScriptedEngine, run_virtual


class Kept:
    """A turn log in memory."""

    def __init__(self) -> None:
        self.turns: list[FinishedTurn] = []

    async def append(self, turn: FinishedTurn, *, durable: bool = False) -> None:
        self.turns.append(turn)


class Noting(ScriptedEngine):
    """Says `text` to everybody, and notes what it was asked."""

    def __init__(self, text: str = "abc", **script: Any) -> None:
        super().__init__(EngineScript(tokens_per_s=1.0, answers=lambda _: [*map(ord, text), 0], **script))
        self.asked: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        self.asked.append(request)
        return await super().generate(request)


def rollout_of(*turns: Turn, **fields: Any) -> RolloutState:
    prompt = Prompt(ids=pack_ids([1, 63]))
    return RolloutState(prompt=prompt, task_name="t", group_id="t:0", rollout_id="t:0:0", turns=turns, **fields)


def transcript_of(rollout: RolloutState, engine: ScriptedEngine | None = None, **asked: Any) -> Transcript:
    options = {"tokenizer": CharTokenizer(), "sample_params": SampleParams()} | asked
    return Transcript(rollout, Asked(engine=engine or Noting(), **options))


async def say(text: str) -> str:
    return text


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


# The record.


def test_what_the_engine_and_the_tools_say_is_appended_turn_by_turn() -> None:
    async def main() -> RolloutState:
        transcript = transcript_of(rollout_of())
        await transcript.generate()
        await transcript.call_tool(lambda: say("[4]"), timeout_s=1.0, name="adder")
        await transcript.generate()
        return transcript.rollout

    rollout = run_virtual(main())
    assert [(turn.kind, turn.text, turn.name) for turn in rollout.turns] == [
        ("generate", "abc", ""),
        ("tool", "[4]", "adder"),
        ("generate", "abc", ""),
    ]
    assert rollout.response_ids.tolist() == [*letters("abc"), 0, *letters("[4]"), *letters("abc"), 0]
    assert rollout.response_mask.tolist() == [1] * 4 + [0] * 3 + [1] * 4


@pytest.mark.parametrize(
    ("recorded", "call"),
    [
        (Turn("tool", 2, None, "ab", 0, "adder"), "generate"),
        (Turn("generate", 2, FinishReason.STOP, "ab"), "tool"),
        (Turn("generate", 2, FinishReason.ABORT), "tool"),
        (Turn("tool", 2, None, "ab", 0, "adder"), "another tool"),
    ],
)
def test_a_record_of_another_kind_answers_no_call(recorded: Turn, call: str) -> None:
    async def main() -> None:
        tokens = NO_TOKENS.append([97, 98], [0.0, 0.0], model_step=0)
        transcript = transcript_of(rollout_of(recorded, segments=(Segment(tokens),)))
        if call == "generate":
            await transcript.generate()
        else:
            await transcript.call_tool(lambda: say("4"), timeout_s=1.0, name="adder" if call == "tool" else "search")

    with pytest.raises(DataFailure, match="played again in another way") as raised:
        run_virtual(main())
    assert raised.value.reason == "record_mismatch"


def test_a_tool_without_a_name_is_answered_from_any_tools_record() -> None:
    async def main() -> str:
        transcript = transcript_of(rollout_of(Turn("tool", 2, None, "ab", 0, "adder")))
        return await transcript.call_tool(lambda: say("4"), timeout_s=1.0)

    assert run_virtual(main()) == "ab"


class ChangesItsMind(AgentLoop):
    """Asks a tool first, or last, as it likes."""

    tool_first = True

    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        tool_first, type(self).tool_first = self.tool_first, False
        if tool_first:
            await self.call_tool(rollout, lambda: say("[tool]"), timeout_s=1.0)
        await self.generate(rollout)
        await self.call_tool(rollout, lambda: say("[tool]"), timeout_s=1.0)
        return rollout


def test_a_loop_that_branches_differently_after_an_interruption_never_takes_a_tools_text_for_the_models() -> None:
    async def main() -> Group:
        ChangesItsMind.tool_first = True
        engine = Noting("hello")
        loop = ChangesItsMind(engine=engine, tokenizer=CharTokenizer(), judger=None, sample_params=SampleParams())
        group = [rollout_of()]
        playing = asyncio.create_task(loop.generate_group(group, enable_partial_rollout=True))
        await asyncio.sleep(2.5)
        await engine.pause_generation()
        await playing
        assert group[0].status is Status.ABORTED
        await engine.continue_generation()
        return await loop.generate_group(group, enable_partial_rollout=True)

    (rollout,) = run_virtual(main())
    assert rollout.status is Status.FAILED
    assert rollout.error is not None
    assert rollout.error.reason == "record_mismatch"
    assert not rollout.error.infrastructure


# Budgets.


def test_a_turn_whose_budget_is_used_up_is_finished_without_asking() -> None:
    async def main() -> tuple[Noting, RolloutState, FinishReason]:
        tokens = NO_TOKENS.append(letters("abcd"), [0.0] * 4, model_step=0)
        engine = Noting()
        rollout = rollout_of(Turn("generate", 4, FinishReason.ABORT), segments=(Segment(tokens),))
        answer = await transcript_of(rollout, engine).generate(SampleParams(max_tokens=4))
        assert answer.text == "abcd"
        return engine, rollout, answer.finish_reason

    engine, rollout, reason = run_virtual(main())
    assert engine.asked == []
    assert reason is FinishReason.LENGTH
    assert [turn.finish_reason for turn in rollout.turns] == [FinishReason.LENGTH]
    assert rollout.num_tokens == 4


# Requests and random numbers.


def test_a_linear_rollout_counts_its_random_numbers_over_all_its_tokens() -> None:
    async def main() -> tuple[list[GenerateRequest], RolloutState]:
        engine, rollout = Noting(), rollout_of()
        transcript = transcript_of(rollout, engine, run_seed=7, namespace="eval/", on_pause="serve")
        await transcript.generate()
        await transcript.call_tool(lambda: say("[4]"), timeout_s=1.0)
        await transcript.generate()
        return engine.asked, rollout

    (first, second), rollout = run_virtual(main())
    assert (first.first_uniform, second.first_uniform) == (0, 7)
    assert first.seed == second.seed == rollout_seed(7, rollout)
    assert first.request_id == second.request_id == "eval/t:0:0"
    assert (first.group_id, first.on_pause) == ("eval/t:0", "serve")
    assert unpack_ids(second.prompt_ids).tolist() == [1, 63, *letters("abc"), 0, *letters("[4]")]
    assert second.response_ids == b""


def test_an_interrupted_turn_goes_on_from_its_tokens_with_the_next_random_number() -> None:
    async def main() -> list[GenerateRequest]:
        engine, rollout = Noting("abcdef"), rollout_of()
        playing = asyncio.create_task(transcript_of(rollout, engine).generate())
        await asyncio.sleep(3.5)
        await engine.pause_generation()
        with pytest.raises(Interrupted):
            await playing
        assert [turn.finish_reason for turn in rollout.turns] == [FinishReason.ABORT]
        await engine.continue_generation()
        assert (await transcript_of(rollout, engine).generate()).text == "abcdef"
        assert rollout.num_tokens == 7
        return engine.asked

    first, second = run_virtual(main())
    assert (first.first_uniform, second.first_uniform) == (0, 3)
    assert unpack_ids(second.response_ids).tolist() == letters("abc")


# Segments.


def test_a_branch_goes_on_from_where_it_begins_and_nothing_is_stored_twice() -> None:
    async def main() -> tuple[list[GenerateRequest], RolloutState]:
        engine, rollout = Noting(), rollout_of()
        transcript = transcript_of(rollout, engine, run_seed=7)
        await transcript.generate()
        assert transcript.branch(0, 2) == 1
        await transcript.call_tool(lambda: say("!"), timeout_s=1.0)
        await transcript.generate()
        await transcript.generate(segment=0)
        return engine.asked, rollout

    asked, rollout = run_virtual(main())
    assert [(s.parent, s.start, len(s.tokens)) for s in rollout.segments] == [(-1, -1, 8), (0, 2, 5)]
    assert [turn.segment for turn in rollout.turns] == [0, 1, 1, 0]
    assert unpack_ids(asked[1].prompt_ids).tolist() == [1, 63, *letters("ab!")]
    assert [request.request_id for request in asked] == ["t:0:0", "t:0:0#1", "t:0:0"]
    assert [request.first_uniform for request in asked] == [0, 1, 4]
    assert asked[1].seed == rollout_seed(7, rollout, 1) != asked[0].seed


def test_several_requests_of_one_rollout_may_be_open_at_once_but_one_per_segment() -> None:
    async def main() -> tuple[list[str], str, RolloutState]:
        rollout = rollout_of()
        transcript = transcript_of(rollout)
        other = transcript.branch()
        asking = [asyncio.create_task(transcript.generate(segment=s)) for s in (0, other)]
        await asyncio.sleep(1)
        open_requests, stage = transcript.requests, transcript.stage
        with pytest.raises(RuntimeError, match="begin another segment with `branch`"):
            await transcript.generate(segment=0)
        await asyncio.gather(*asking)
        assert transcript.requests == []
        return open_requests, stage, rollout

    open_requests, stage, rollout = run_virtual(main())
    assert open_requests == ["t:0:0", "t:0:0#1"]
    assert stage == "engine"
    assert [len(segment.tokens) for segment in rollout.segments] == [4, 4]


@pytest.mark.parametrize("second", ["tool", "generate"])
def test_one_call_at_a_time_writes_a_segment(second: str) -> None:
    async def slow() -> str:
        await asyncio.sleep(2)
        return "slow"

    async def main() -> RolloutState:
        rollout = rollout_of()
        transcript = transcript_of(rollout)
        first = asyncio.create_task(transcript.call_tool(slow, timeout_s=9.0))
        await asyncio.sleep(1)
        with pytest.raises(RuntimeError, match="is being written by another call"):
            if second == "tool":
                await transcript.call_tool(lambda: say("fast"), timeout_s=9.0)
            else:
                await transcript.generate()
        await first
        await transcript.generate()
        return rollout

    assert [(turn.kind, turn.text) for turn in run_virtual(main()).turns] == [("tool", "slow"), ("generate", "abc")]


async def branched(transcript: Transcript) -> None:
    other = transcript.branch()
    await asyncio.gather(transcript.generate(segment=0), transcript.generate(segment=other))
    await transcript.generate(segment=other)


@pytest.mark.parametrize("second", [0.5, 2.5, 6.5])
def test_an_interrupted_tree_is_played_again_to_the_same_end(second: float) -> None:
    async def main(interrupted: bool) -> tuple[RolloutState, Kept]:
        engine, rollout, kept = Noting("abcd"), rollout_of(), Kept()
        playing = asyncio.create_task(branched(transcript_of(rollout, engine, turn_log=kept)))
        if interrupted:
            await asyncio.sleep(second)
            await engine.pause_generation()
            with pytest.raises(Interrupted):
                await playing
            await asyncio.sleep(0)
            await engine.continue_generation()
            await branched(transcript_of(rollout, engine, turn_log=kept))
        else:
            await playing
        return rollout, kept

    whole, _ = run_virtual(main(False))
    again, kept = run_virtual(main(True))
    assert again.segments == whole.segments
    assert sorted(turn.segment for turn in again.turns) == [0, 1, 1]
    assert all(turn.finish_reason is FinishReason.STOP for turn in again.turns)
    assert [finished.turn for finished in kept.turns] == list(again.turns)
    assert [finished.index for finished in kept.turns] == [0, 1, 2]


def test_a_branch_that_begins_elsewhere_than_on_record_is_refused() -> None:
    async def main() -> None:
        rollout = rollout_of()
        first = transcript_of(rollout)
        await first.generate()
        first.branch(0, 2)
        await first.generate()
        transcript_of(rollout).branch(0, 3)

    with pytest.raises(DataFailure, match="another beginning"):
        run_virtual(main())


@pytest.mark.parametrize(("parent", "start"), [(0, 5), (ROOT, 3)])
def test_a_branch_cannot_begin_where_its_parent_has_no_token(parent: int, start: int) -> None:
    async def main() -> None:
        transcript = transcript_of(rollout_of())
        await transcript.generate()
        assert transcript.branch(parent, start - 1) == 1
        transcript.branch(parent, start)

    with pytest.raises(ValueError, match="cannot branch after token"):
        run_virtual(main())


# The turn log.


def test_every_finished_turn_is_kept_with_its_own_tokens() -> None:
    async def main() -> tuple[Kept, RolloutState]:
        engine, rollout, kept = Noting("abcdef"), rollout_of(), Kept()
        playing = asyncio.create_task(transcript_of(rollout, engine, turn_log=kept).generate())
        await asyncio.sleep(2.5)
        await engine.pause_generation()
        with pytest.raises(Interrupted):
            await playing
        assert kept.turns == []
        await engine.load_weights(None, 1)  # type: ignore[arg-type]
        await engine.continue_generation()
        transcript = transcript_of(rollout, engine, turn_log=kept)
        await transcript.generate()
        await transcript.call_tool(lambda: say("[4]"), timeout_s=1.0)
        return kept, rollout

    kept, rollout = run_virtual(main())
    first, second = kept.turns
    assert (first.task_name, first.group_id, first.rollout_id) == ("t", "t:0", "t:0:0")
    assert [finished.turn for finished in kept.turns] == list(rollout.turns)
    assert (first.index, second.index) == (0, 1)
    assert first.tokens.steps == ((0, 2), (1, 5))
    assert second.tokens.mask == bytes(3)
    assert first.tokens.ids + second.tokens.ids == rollout.response.ids


def test_branches_that_finished_out_of_order_before_a_crash_go_on_where_they_began() -> None:
    async def written(rollout: RolloutState, kept: Kept, engine: Noting) -> None:
        transcript = transcript_of(rollout, engine, turn_log=kept)
        await transcript.generate()
        one, two = transcript.branch(0, 2), transcript.branch(0, 3)
        long, short = SampleParams(max_tokens=9), SampleParams(max_tokens=2)
        await asyncio.gather(transcript.generate(long, segment=one), transcript.generate(short, segment=two))

    async def main() -> tuple[RolloutState, RolloutState]:
        kept, engine, whole, restored = Kept(), Noting("abcd"), rollout_of(), rollout_of()
        playing = asyncio.create_task(written(whole, kept, engine))
        await asyncio.sleep(8)
        rows = [TurnRow(i, 0, turn.rollout_id, turn.index, encode_turn(turn)) for i, turn in enumerate(kept.turns)]
        put_back_turns(restored, rows, model_step=0)
        assert [len(segment.tokens) for segment in restored.segments] == [5, 0, 2]
        await playing
        await written(restored, Kept(), engine)
        return whole, restored

    whole, restored = run_virtual(main())
    assert restored.segments == whole.segments


@pytest.mark.parametrize(("loop", "kept_turns"), [(SingleTurnAgentLoop, 0), (ChangesItsMind, 2)])
def test_a_single_turn_is_stored_with_its_group_and_not_twice(loop: type[AgentLoop], kept_turns: int) -> None:
    ChangesItsMind.tool_first = False
    kept = Kept()

    async def main() -> None:
        player = loop(
            engine=Noting(),
            tokenizer=CharTokenizer(),
            judger=None,
            sample_params=SampleParams(),
            turn_log=kept,
        )
        await player.generate_group([rollout_of()], enable_partial_rollout=False)

    run_virtual(main())
    assert len(kept.turns) == kept_turns
