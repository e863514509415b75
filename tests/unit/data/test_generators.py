"""Built-in tasks: what they ask, and that train and eval never meet."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data import (
    AdditionConfig,
    OneLineFunctionConfig,
    PromptSet,
    PromptSourceConfig,
    ReasoningGymConfig,
    ReverseWordConfig,
    SortLettersConfig,
)
from penstock.data.generators import draw_distinct
from penstock.errors import ConfigError, DatasetError
from penstock.rollout import Prompt, unpack_ids


def load(config: PromptSourceConfig, tokenizer: Any, **limits: Any) -> PromptSet:
    return config.load(tokenizer, **({"context": None, "max_tokens": 8, "data_sources": None} | limits))


def texts(prompts: PromptSet) -> list[str]:
    return [prompt.messages[0]["content"] for prompt in prompts.prompts]


def test_addition_asks_for_sums(tokenizer):
    prompts = load(AdditionConfig(), tokenizer)
    assert len(prompts) == 21 * 21 - 100
    for prompt, text in zip(prompts.prompts, texts(prompts), strict=True):
        a, b = text.removeprefix("What is ").removesuffix("? Answer with the number only.").split(" + ")
        assert prompt.ground_truth == str(int(a) + int(b))
        assert prompt.data_source == "addition"
        assert tokenizer.decode(unpack_ids(prompt.ids)[1:]) == text


def test_functions_of_one_line_come_with_their_tests(tokenizer):
    train, held_out = (
        OneLineFunctionConfig(template="{task}", held_out=70, split=split) for split in ("train", "eval")
    )
    asked = [*load(train, tokenizer).prompts, *load(held_out, tokenizer).prompts]
    assert len({prompt.messages[0]["content"] for prompt in asked}) == len(asked) == 270
    signs = {"add": "+", "sub": "-", "mul": "*"}
    for prompt in asked:
        word, number = prompt.messages[0]["content"].split()
        tests = prompt.ground_truth
        for (x,), wanted in zip(tests["inputs"], tests["outputs"], strict=True):
            assert {"+": x + int(number), "-": x - int(number), "*": x * int(number)}[signs[word]] == wanted
    for split, number in (("eval", 0), ("eval", 271), ("train", 270)):
        with pytest.raises(ConfigError, match="held_out is"):
            OneLineFunctionConfig(held_out=number, split=split).check()


def test_reversed_words_and_sorted_letters(tokenizer):
    fields: dict[str, Any] = {"alphabet": "cab", "template": "{word}", "size": 20, "held_out": 5, "max_length": 4}
    for prompt in load(ReverseWordConfig(**fields), tokenizer).prompts:
        assert prompt.ground_truth == prompt.messages[0]["content"][::-1]
    for prompt in load(SortLettersConfig(**fields), tokenizer).prompts:
        assert prompt.ground_truth == "".join(sorted(prompt.messages[0]["content"], key="cab".index))


@settings(max_examples=50)
@given(max_number=st.integers(1, 15), seed=st.integers(-5, 1000), share=st.floats(0.01, 0.99))
def test_the_splits_of_addition_partition_all_pairs(max_number, seed, share):
    pairs = (max_number + 1) ** 2
    held_out = max(1, int(share * pairs))
    train, held = (
        [
            (prompt.messages[0]["content"], prompt.ground_truth)
            for prompt in AdditionConfig(max_number=max_number, seed=seed, held_out=held_out, split=split).prompts()
        ]
        for split in ("train", "eval")
    )
    assert len(held) == held_out
    assert len({*train, *held}) == len(train) + len(held) == pairs


@settings(max_examples=50)
@given(
    alphabet=st.sampled_from(["a", "ab", "xyz", "abcdef"]),
    lengths=st.tuples(st.integers(1, 3), st.integers(1, 3)).map(sorted),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_the_splits_of_a_word_task_never_share_a_word(alphabet, lengths, seed, data):
    words = sum(len(alphabet) ** length for length in range(lengths[0], lengths[1] + 1))
    held_out = data.draw(st.integers(0, words - 1))
    size = data.draw(st.integers(1, words - held_out))
    train, held = (
        [
            prompt.messages[0]["content"]
            for prompt in ReverseWordConfig(
                alphabet=alphabet,
                min_length=lengths[0],
                max_length=lengths[1],
                seed=seed,
                size=size,
                held_out=held_out,
                split=split,
                template="{word}",
            ).prompts()
        ]
        for split in ("train", "eval")
    )
    assert (len(train), len(held)) == (size, held_out)
    assert len({*train, *held}) == size + held_out


def test_the_eval_split_stays_when_the_train_split_grows(tokenizer):
    small, large = (ReverseWordConfig(size=size, split="eval") for size in (10, 900))
    assert texts(load(small, tokenizer)) == texts(load(large, tokenizer))


def test_lengths_take_turns_instead_of_the_longest_winning(tokenizer):
    config = ReverseWordConfig(min_length=3, max_length=6, template="{word}", size=100)
    lengths = [len(word) for word in texts(load(config, tokenizer))]
    assert {length: lengths.count(length) for length in set(lengths)} == {3: 25, 4: 25, 5: 25, 6: 25}


def test_a_generator_is_a_function_of_its_seed(tokenizer):
    same = [texts(load(SortLettersConfig(seed=3), tokenizer)) for _ in range(2)]
    assert same[0] == same[1] != texts(load(SortLettersConfig(seed=4), tokenizer))


def test_a_space_far_larger_than_memory_can_be_drawn_from(tokenizer):
    config = ReverseWordConfig(alphabet="abcdefghijklmnopqrstuvwxyz", min_length=100, max_length=100, size=10)
    assert len(load(config, tokenizer)) == 10


@given(st.integers(0, 200), st.integers(0, 10))
def test_drawing_gives_every_number_once(total, seed):
    assert sorted(draw_distinct(random.Random(seed), total)) == list(range(total))


@pytest.mark.parametrize("template", ["What is {a}?", "{a} {b} {c}", "{a} + {b", "{a.real} + {b}", "{} + {}", "sum"])
def test_a_template_without_its_placeholders_is_refused(template):
    with pytest.raises(ConfigError, match=r"AdditionConfig\.template is .* \{a\} and \{b\}"):
        AdditionConfig(template=template)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (AdditionConfig(max_number=2, held_out=9), "held_out is 9; there are 9 pairs up to max_number 2."),
        (AdditionConfig(max_number=2, held_out=10, split="eval"), "held_out is 10; there are 9 pairs"),
        (AdditionConfig(held_out=0, split="eval"), "the eval split needs at least 1"),
        (ReverseWordConfig(min_length=4, max_length=3), "min_length is 4; it must be at most max_length, which is 3."),
        (ReverseWordConfig(alphabet="ab", max_length=3, size=10, held_out=5), "need 15 words; .* give 12."),
    ],
)
def test_a_split_that_cannot_be_made_is_a_config_problem(tokenizer, config, problem):
    with pytest.raises(ConfigError, match=problem):
        config.check()
    with pytest.raises(ConfigError, match=problem):
        load(config, tokenizer)


@pytest.mark.parametrize("alphabet", ["", "aba"])
def test_an_alphabet_without_letters_or_with_one_twice_is_refused(alphabet):
    with pytest.raises(ConfigError, match="at least one letter, and none twice"):
        ReverseWordConfig(alphabet=alphabet)


def test_generated_prompts_are_checked_like_those_of_a_file(tokenizer):
    config = AdditionConfig(max_number=1, held_out=0, template="{a}+{b}")
    assert len(load(config, tokenizer, context=12, data_sources=frozenset({"addition"}))) == 4
    with pytest.raises(DatasetError, match=r"AdditionConfig:1: .* exceeds the model's context of 11") as caught:
        load(config, tokenizer, context=11)
    assert len(caught.value.problems) == 4
    with pytest.raises(DatasetError, match="data_source 'addition' has no judger branch"):
        load(config, tokenizer, data_sources=frozenset({"additions"}))


FEW_SUMS: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.fixture(scope="module")
def few_sums() -> dict[str, list[Prompt]]:
    """Both splits of a gym task that has fewer questions than are asked for."""
    fields: dict[str, Any] = {"name": "chain_sum", "size": 200, "held_out": 50, "params": FEW_SUMS}
    return {split: list(ReasoningGymConfig(**fields, split=split).prompts()) for split in ("train", "eval")}


def test_reasoning_gym_entries_carry_what_their_scorer_needs(few_sums):
    import reasoning_gym

    prompt = few_sums["train"][0]
    assert prompt.data_source == prompt.extra_info["gym"] == "chain_sum"
    assert prompt.extra_info["params"] == FEW_SUMS
    entry = prompt.extra_info["entry"]
    assert (entry["question"], entry["answer"]) == (prompt.messages[0]["content"], prompt.ground_truth)
    score = reasoning_gym.get_score_answer_fn("chain_sum")
    assert score(prompt.ground_truth, entry) == 1.0
    assert score("no", entry) < 1.0


def test_the_splits_of_a_gym_task_never_share_a_question(few_sums):
    train, held = ([prompt.messages[0]["content"] for prompt in few_sums[split]] for split in ("train", "eval"))
    assert 0 < len(train) < 200
    assert 0 < len(held) < 50
    assert len({*train, *held}) == len(train) + len(held)


def test_an_unknown_gym_task_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"name is 'chain_sums'; .* Did you mean 'chain_sum'\?"):
        ReasoningGymConfig(name="chain_sums").check()


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"max_termz": 3}, "reasoning-gym refuses it for 'chain_sum': .*max_termz"),
        ({"min_terms": 9, "max_terms": 3}, "reasoning-gym refuses it for 'chain_sum'"),
        ({"seed": 3, "size": 4}, "params has seed and size; set the field of that name instead"),
    ],
)
def test_gym_settings_that_cannot_work_are_a_config_problem(params, problem):
    with pytest.raises(ConfigError, match=problem):
        ReasoningGymConfig(name="chain_sum", params=params).check()


def test_a_gym_task_whose_scorer_breaks_on_stored_entries_is_refused(tokenizer):
    with pytest.raises(DatasetError, match=r"'arc_agi' cannot be used: .*scorer gives 0\.05 instead of 1\.0"):
        load(ReasoningGymConfig(name="arc_agi", size=3, held_out=1), tokenizer)


@pytest.mark.long_tier
@pytest.mark.parametrize("name", ["list_functions", "ransom_note"])
def test_a_gym_task_is_a_function_of_its_seed(tokenizer, name):
    # The one draws from the global generator, the other in the order of a set.
    config = ReasoningGymConfig(name=name, size=30, held_out=5)
    state = random.getstate()
    prompts = load(config, tokenizer)
    assert random.getstate() == state
    assert list(load(config, tokenizer).prompts) == list(prompts.prompts)
    assert len(prompts) == 30


def test_a_gym_task_that_takes_too_long_is_refused(tokenizer):
    with pytest.raises(DatasetError, match=r"'chain_sum' cannot be used: .* within timeout_s 0\.01"):
        load(ReasoningGymConfig(name="chain_sum", timeout_s=0.01), tokenizer)


def test_a_missing_gym_names_the_extra_to_install(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[gym\]'"):
        load(ReasoningGymConfig(name="chain_sum"), tokenizer)
