"""The sampler: the exact sequence of prompts, over epochs and restarts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import AdditionConfig, EndOfData, PromptSet, Sampler, SamplerConfig
from penstock.data.sampler import epoch_order
from penstock.errors import ConfigError, DatasetError
from penstock.rollout import Group, Prompt, RolloutState, Status


class Nothing:
    def get(self, n: int, task: str, status: Status) -> list[Group]:
        return []

    def draw(self, group: Group, cursor: int) -> None:
        pass


def sampler_over(n: int, **fields: Any) -> Sampler:
    prompts = PromptSet([Prompt(ids=b"....", ground_truth=i) for i in range(n)])
    return Sampler(prompts, **({"prompt_repeat_k": 2, "shuffle": True, "seed": 0, "waiting": Nothing()} | fields))


def draw(sampler: Sampler, n: int, task: str = "t") -> list[Group]:
    async def several() -> list[Group]:
        return [await sampler.sample(task) for _ in range(n)]

    return asyncio.run(several())


def asked(groups: list[Group]) -> list[int]:
    return [group[0].ground_truth for group in groups]


def test_a_group_is_k_new_rollouts_of_one_prompt():
    first, second = draw(sampler_over(5, prompt_repeat_k=3), 2, "gsm8k")
    assert [rollout.rollout_id for rollout in first] == ["gsm8k:0:0", "gsm8k:0:1", "gsm8k:0:2"]
    assert [rollout.rollout_id for rollout in second] == ["gsm8k:1:0", "gsm8k:1:1", "gsm8k:1:2"]
    for number, group in enumerate((first, second)):
        assert {(r.group_id, r.task_name, r.draw, r.status) for r in group} == {
            (f"gsm8k:{number}", "gsm8k", number, Status.INIT)
        }
        assert all(rollout.prompt is group[0].prompt for rollout in group)


def test_prompts_are_shared_with_the_prompt_set_and_over_epochs():
    sampler = sampler_over(3)
    held = {id(prompt) for prompt in sampler.prompt_set.prompts}
    assert {id(group[0].prompt) for group in draw(sampler, 9)} == held


def test_every_epoch_holds_every_prompt_once_in_another_order():
    sampler = sampler_over(50)
    epochs = [asked(draw(sampler, 50)) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(50))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert len(sampler) == 50


def test_without_shuffling_every_epoch_is_in_file_order():
    assert asked(draw(sampler_over(3, shuffle=False), 7)) == [0, 1, 2, 0, 1, 2, 0]


def test_the_order_is_the_same_on_every_machine():
    # Written down, because a resumed run depends on it: a change here breaks every saved run.
    assert epoch_order(0, 0, 10).tolist() == [4, 8, 0, 1, 7, 6, 2, 5, 3, 9]
    assert epoch_order(0, 1, 10).tolist() == [4, 0, 1, 8, 5, 7, 9, 3, 2, 6]
    assert epoch_order(-1, 2**40, 10).tolist() == [1, 8, 7, 9, 6, 5, 4, 2, 3, 0]


def test_seeds_give_orders_of_their_own():
    orders = {tuple(epoch_order(seed, epoch, 20).tolist()) for seed in range(-10, 10) for epoch in range(20)}
    assert len(orders) == 400


@given(
    n=st.integers(1, 12),
    cut=st.integers(0, 40),
    rest=st.integers(1, 30),
    seed=st.integers(),
    shuffle=st.booleans(),
)
def test_a_resumed_sampler_continues_the_exact_sequence_from_any_cut(n, cut, rest, seed, shuffle):
    whole = draw(sampler_over(n, seed=seed, shuffle=shuffle), cut + rest)
    before = sampler_over(n, seed=seed, shuffle=shuffle)
    head = draw(before, cut)
    after = sampler_over(n, seed=seed, shuffle=shuffle)
    after.load_state_dict(before.state_dict())
    assert head + draw(after, rest) == whole
    assert len({group[0].group_id for group in whole}) == len(whole)


def test_a_state_loaded_after_the_first_sample_takes_effect():
    reference = asked(draw(sampler_over(7), 20))
    sampler = sampler_over(7)
    draw(sampler, 3)
    sampler.load_state_dict(sampler_over(7).state_dict() | {"cursor": 16})
    assert asked(draw(sampler, 4)) == reference[16:]
    sampler.seek(2)
    assert asked(draw(sampler, 4)) == reference[2:6]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"num_prompts": 6}, "saved num_prompts is 6, now it is 5"),
        ({"seed": 9}, "saved seed is 9, now it is 0"),
        ({"shuffle": False}, "saved shuffle is False, now it is True"),
        ({"cursor": -1}, "cursor is -1; it must be at least 0"),
    ],
)
def test_a_state_of_another_sequence_is_refused(change, problem):
    sampler = sampler_over(5)
    with pytest.raises(DatasetError, match=problem):
        sampler.load_state_dict(sampler.state_dict() | change)
    assert sampler.cursor == 0


def test_a_state_with_missing_parts_is_refused():
    with pytest.raises(DatasetError, match="cursor is not in the sampler's saved state"):
        sampler_over(5).load_state_dict({"num_prompts": 5, "shuffle": True, "seed": 0})


def test_waiting_groups_come_first_in_the_order_of_the_given_states(new_waiting):
    waiting = new_waiting()
    sampler = sampler_over(5, waiting=waiting)
    aborted, expired, other = ([RolloutState(prompt=Prompt(), group_id=name)] for name in ("a", "e", "o"))
    waiting.groups = {
        ("t", Status.ABORTED): [aborted],
        ("t", Status.EXPIRED): [expired],
        ("other", Status.ABORTED): [other],
    }

    async def sample() -> list[str]:
        states = [Status.EXPIRED, Status.MAX_TRIES, Status.ABORTED]
        return [(await sampler.sample("t", group_status=states))[0].group_id for _ in range(4)]

    assert asyncio.run(sample()) == ["e", "a", "t:0", "t:1"]
    assert waiting.drawn == [("t:0", 1), ("t:1", 2)]


def test_without_states_the_buffer_is_not_asked(new_waiting):
    waiting = new_waiting()
    waiting.groups = {("t", Status.ABORTED): [[RolloutState(prompt=Prompt(), group_id="a")]]}
    assert draw(sampler_over(5, waiting=waiting), 1)[0][0].group_id == "t:0"


def test_a_draw_that_cannot_be_recorded_is_not_made(new_waiting):
    waiting = new_waiting()
    sampler = sampler_over(5, waiting=waiting)
    reference = asked(draw(sampler_over(5), 2))
    waiting.disk_full = True
    with pytest.raises(OSError, match="no space left"):
        draw(sampler, 1)
    assert sampler.cursor == 0
    waiting.disk_full = False
    assert asked(draw(sampler, 2)) == reference


def test_the_asked_epochs_end_but_what_waits_is_still_handed_out(new_waiting):
    waiting = new_waiting()
    sampler = sampler_over(3, waiting=waiting, epochs=2)
    assert len(draw(sampler, 6)) == 6
    with pytest.raises(EndOfData, match="task 't': all 6 groups are drawn"):
        draw(sampler, 1)
    waiting.groups = {("t", Status.ABORTED): [[RolloutState(prompt=Prompt(), group_id="a")]]}
    assert asyncio.run(sampler.sample("t", [Status.ABORTED]))[0].group_id == "a"
    with pytest.raises(EndOfData):
        asyncio.run(sampler.sample("t", [Status.ABORTED]))


def test_an_empty_prompt_set_and_an_empty_group_are_refused():
    with pytest.raises(DatasetError, match="the prompt set is empty"):
        sampler_over(0)
    with pytest.raises(ConfigError, match="prompt_repeat_k is 0"):
        sampler_over(1, prompt_repeat_k=0)


def test_a_config_builds_a_sampler_over_its_scanned_dataset(tokenizer, new_waiting):
    config = SamplerConfig(dataset=AdditionConfig(max_number=3, held_out=4), prompt_repeat_k=2, seed=5)
    prompts = config.dataset.load(tokenizer, context=64, max_tokens=8, data_sources=None)
    sampler = config.build(prompts, waiting=new_waiting(), epochs=1)
    groups = draw(sampler, len(sampler))
    assert len({group[0].messages[0]["content"] for group in groups}) == len(sampler) == 12
    with pytest.raises(EndOfData):
        draw(sampler, 1)
    with pytest.raises(DatasetError, match="exceeds the model's context of 10"):
        config.dataset.load(tokenizer, context=10, max_tokens=8, data_sources=None)


def test_a_wrong_sampler_config_names_its_fields():
    with pytest.raises(ConfigError) as caught:
        SamplerConfig(dataset="rows.jsonl", prompt_repeat_k=0, shufle=True)
    text = str(caught.value)
    assert "SamplerConfig.dataset is 'rows.jsonl'; input should be an instance of PromptSourceConfig" in text
    assert "SamplerConfig.prompt_repeat_k is 0; input should be greater than or equal to 1" in text
    assert "SamplerConfig.shufle is not a field. Did you mean 'shuffle'?" in text


def test_problems_of_the_dataset_are_found_by_checking_the_sampler(tmp_path):
    from penstock.data import DatasetConfig

    config = SamplerConfig(dataset=DatasetConfig(path=tmp_path / "none.jsonl"), prompt_repeat_k=8)
    with pytest.raises(ConfigError, match=r"dataset: path is '.*none\.jsonl'; there is no such file"):
        config.check()


def test_importing_the_room_brings_no_heavy_library():
    code = (
        "import sys, penstock.data;"
        "print([m for m in ('torch', 'ray', 'transformers', 'pyarrow', 'reasoning_gym') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
