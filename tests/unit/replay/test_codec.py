from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ports import FinishedTurn
from penstock.replay.codec import (
    StoredGroup,
    StoredRollout,
    StoredSegment,
    StoredTurn,
    decode_statuses,
    decode_turn,
    encode_draw,
    encode_rollouts,
    encode_statuses,
    encode_turn,
)
from penstock.rollout import (
    ROOT,
    WHOLE,
    Failure,
    FailureReason,
    FinishReason,
    Group,
    Prompt,
    RolloutState,
    Segment,
    Status,
    Tokens,
    Turn,
    Verdict,
)

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
words = st.text(max_size=8)
prompts = st.builds(
    Prompt,
    messages=st.lists(st.dictionaries(words, plain, max_size=2), max_size=2).map(tuple),
    ids=st.binary(max_size=8),
    ground_truth=plain,
    data_source=words,
    tools=st.lists(st.dictionaries(words, plain, max_size=2), max_size=2).map(tuple),
    extra_info=st.dictionaries(words, plain, max_size=3),
)


@st.composite
def some_tokens(draw: Any) -> Tokens:
    tokens = Tokens()
    for step, n in draw(st.lists(st.tuples(st.integers(-1, 9), st.integers(1, 3)), max_size=3)):
        logprobs = draw(st.lists(st.floats(width=32), min_size=n, max_size=n))
        tokens = tokens.append(range(n), logprobs, model_step=step, trained=draw(st.booleans()))
    return tokens


@st.composite
def trees(draw: Any) -> tuple[Segment, ...]:
    """Mostly one segment after the prompt; else several, each after an earlier one or a part of the prompt."""
    segments: list[Segment] = []
    for number in range(draw(st.sampled_from([0, 1, 1, 2, 4]))):
        parent = draw(st.integers(ROOT, number - 1))
        start = draw(st.integers(WHOLE, 5)) if parent == ROOT else draw(st.integers(0, len(segments[parent].tokens)))
        segments.append(Segment(draw(some_tokens()), parent, start))
    return tuple(segments)


all_turns = st.builds(
    Turn, words, st.integers(0, 9), st.none() | st.sampled_from(FinishReason), words, st.integers(0, 3), words
)


@st.composite
def rollouts(draw: Any, prompt: Prompt) -> RolloutState:
    return RolloutState(
        prompt=prompt,
        task_name="t",
        group_id="t:7",
        rollout_id=draw(words),
        draw=7,
        segments=draw(trees()),
        response_text=draw(words),
        turns=tuple(draw(st.lists(all_turns, max_size=2))),
        finish_reason=draw(st.none() | st.sampled_from(FinishReason)),
        reward=draw(
            st.none()
            | st.builds(
                Verdict,
                st.floats(allow_nan=False),
                st.dictionaries(words, st.floats(allow_nan=False)),
                st.none() | words,
            )
        ),
        status=draw(st.sampled_from(Status)),
        num_tries=draw(st.integers(0, 5)),
        infrastructure_failures=draw(st.integers(0, 5)),
        data_failures=draw(st.integers(0, 5)),
        group_generate_time_s=draw(st.floats(0, 1e6)),
        error=draw(st.none() | st.builds(Failure, st.sampled_from(FailureReason), words, st.booleans())),
    )


whole_groups = prompts.flatmap(lambda prompt: st.lists(rollouts(prompt), min_size=1, max_size=3))


@settings(max_examples=50)
@given(whole_groups)
def test_a_group_comes_back_as_it_was(group: Group) -> None:
    statuses = tuple(rollout.status for rollout in group)
    stored = StoredGroup("t", "t:7", 7, encode_draw(group), encode_rollouts(group))
    assert decode_statuses(encode_statuses(statuses)) == statuses
    back = stored.decode(statuses)
    assert back == group
    assert all(rollout.prompt is back[0].prompt for rollout in back)


def test_every_field_of_a_rollout_is_stored() -> None:
    """A field added to the record and not to the ledger would be lost at a restart."""
    beside = {"prompt", "task_name", "group_id", "draw", "status"}
    tokens = {"ids", "logprobs", "mask", "steps"}
    place = {"parent", "start"}
    assert set(StoredRollout.__struct_fields__) == set(RolloutState.__struct_fields__) - beside | tokens
    assert set(Tokens.__struct_fields__) == tokens
    assert set(Segment.__struct_fields__) == {"tokens"} | place
    assert set(StoredSegment.__struct_fields__) == tokens | place
    assert set(StoredTurn.__struct_fields__) == {"turn"} | tokens | place


@settings(max_examples=50)
@given(some_tokens(), all_turns, st.integers(ROOT, 3), st.integers(0, 9))
def test_a_finished_turn_comes_back_as_it_was(tokens: Tokens, turn: Turn, parent: int, start: int) -> None:
    finished = FinishedTurn(
        task_name="t", group_id="t:7", rollout_id="t:7:1", index=2, turn=turn, tokens=tokens, parent=parent, start=start
    )
    back = decode_turn(encode_turn(finished))
    assert (back.turn, back.tokens, back.parent, back.start) == (turn, tokens, parent, start)


def test_an_answer_that_never_branched_costs_its_tokens_and_little_more(groups: Any) -> None:
    sizes = []
    for n in (64, 1064):
        group = groups.play(groups.new(1, k=8), tokens=n, model_step=1)
        sizes.append(len(encode_rollouts(group)) / 8)
    per_token = (sizes[1] - sizes[0]) / 1000
    assert per_token < 9.05
    assert sizes[0] - 64 * per_token < 200


def test_a_drawn_group_comes_back_with_its_ids_and_nothing_else(groups: Any) -> None:
    group = groups.new(7, "t", k=3)
    back = StoredGroup("t", "t:7", 7, encode_draw(group), None).decode((Status.ABORTED,) * 3)
    for rollout in group:
        rollout.status = Status.ABORTED
    assert back == group


def test_statuses_that_do_not_fit_the_rollouts_are_refused(groups: Any) -> None:
    group = groups.new(1)
    with pytest.raises(ValueError, match="shorter"):
        StoredGroup("t", "t:1", 1, encode_draw(group), None).decode((Status.ABORTED,))
