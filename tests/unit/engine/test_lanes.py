"""A decode step that is split by rows is the step that is not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.engine import EmbeddedEngineConfig
from penstock.engine.torch_engine.build import load_model
from penstock.engine.torch_engine.cache import Prefix, SlotCache, round_up
from penstock.engine.torch_engine.forward import FusedModel
from penstock.engine.torch_engine.lanes import AGAIN, FEWEST_ROWS, FIRST, STEPS, LaneChoice, Lanes


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    found = Lanes()
    yield found
    found.close()


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_lanes_give_the_same_logits_and_the_same_cache(kind: str, model_dirs: dict[str, Path]) -> None:
    model, _ = load_model(EmbeddedEngineConfig(), str(model_dirs[kind]), deterministic=False)
    assert isinstance(model, FusedModel)
    rows = 2 * FEWEST_ROWS + 5
    found = []
    for count in (1, 2, 3):
        model.lanes.count = count
        cache = SlotCache(model.cache_layers, model.dtype, model.device)
        cache.reserve(rows, 40, max_slots=rows, max_length=64)
        with torch.inference_mode():
            for slot in range(rows):
                prefix = Prefix(torch.arange(slot % 7 + 1) * 5 % 96, model.cache_layers, model.dtype)
                model.prefill([(prefix, len(prefix.ids))])
                cache.place(prefix, [slot])
            positions = torch.arange(rows) % 7 + 1
            logits = model.decode(torch.arange(rows) % 96, positions, cache, round_up(8)).clone()
        found.append((logits, [tensor.clone() for tensor in cache.keys + cache.values]))
    model.lanes.close()
    for logits, cached in found[1:]:
        torch.testing.assert_close(logits, found[0][0], rtol=1e-4, atol=1e-4)
        for mine, first in zip(cached, found[0][1], strict=True):
            torch.testing.assert_close(mine, first, rtol=1e-4, atol=1e-4)


def test_every_row_is_in_one_lane_and_none_is_nearly_empty(lanes: Lanes) -> None:
    lanes.count = 4
    for rows in (1, FEWEST_ROWS, 2 * FEWEST_ROWS, 100):
        parts = lanes.parts(rows)
        assert [row for part in parts for row in range(part.start, part.stop)] == list(range(rows))
        assert len(parts) == max(1, min(4, rows // FEWEST_ROWS))


def test_what_a_lane_raises_is_raised_when_all_have_ended(lanes: Lanes) -> None:
    lanes.count = 2
    ended = []

    def work(part: slice) -> None:
        ended.append(part.start)
        if part.start:
            raise ValueError("broken")

    threads = torch.get_num_threads()
    with pytest.raises(ValueError, match="broken"):
        lanes.run(work, lanes.parts(2 * FEWEST_ROWS))
    assert sorted(ended) == [0, FEWEST_ROWS]
    assert torch.get_num_threads() == threads


def follow(choice: LaneChoice, steps: int, *, whole: float, split: float, rows: int = 64) -> list[bool]:
    """The ways it goes, where a step takes so long one way and the other."""
    ways = []
    for _ in range(steps):
        ways.append(choice.split)
        choice.took(split if choice.split else whole, rows)
    return ways


def test_the_way_that_is_faster_is_found_within_a_few_steps_and_kept() -> None:
    choice = LaneChoice()
    ways = follow(choice, 200, whole=1.0, split=0.8)
    assert ways[:FIRST] == [False] * FIRST
    # The other way has its three steps now and then.
    assert ways[FIRST:].count(False) <= STEPS * 3
    assert choice.split


def test_a_way_that_is_slower_is_tried_ever_more_seldom() -> None:
    choice = LaneChoice()
    ways = follow(choice, 1200, whole=1.0, split=1.3)
    tried = [at for at in range(1, len(ways)) if ways[at] and not ways[at - 1]]
    between = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert between == sorted(between) and between[0] >= AGAIN and ways.count(True) == STEPS * len(tried)


def test_when_steps_become_slower_the_other_way_is_tried_at_once() -> None:
    choice = LaneChoice()
    follow(choice, FIRST + 2 * STEPS, whole=1.0, split=1.3)
    assert not choice.split
    ways = follow(choice, 10, whole=5.0, split=2.0)
    assert ways.index(True) <= STEPS
    assert choice.split


def test_a_way_is_not_judged_by_another_amount_of_work() -> None:
    choice = LaneChoice()
    follow(choice, FIRST, whole=1.0, split=0.5)
    assert choice.trying
    choice.took(0.1, 8)
    assert not choice.trying and not choice.split
