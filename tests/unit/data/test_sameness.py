"""A run that is resumed has the prompts it began with, or is refused with what differs."""

from __future__ import annotations

import pytest

from penstock.data import DatasetConfig, check_same_prompts, remember_prompts
from penstock.errors import CheckpointError


@pytest.fixture
def load(tokenizer, jsonl, good_row):
    def loaded(*questions, tokenizer=tokenizer, **changes):
        path = jsonl(*[good_row(prompt=f"What is {question}?", **changes) for question in questions])
        return DatasetConfig(path=path).load(tokenizer, context=None, max_tokens=8, data_sources=None)

    return loaded


def refusal(tmp_path, **prompts) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        check_same_prompts(tmp_path, prompts)
    return [problem.replace(str(tmp_path / "rows.jsonl"), "F") for problem in caught.value.problems]


def test_the_same_prompts_pass(load, tmp_path):
    remember_prompts(tmp_path, {"sums": load(*range(20)), "words": load("this")})
    check_same_prompts(tmp_path, {"sums": load(*range(20)), "words": load("this")})
    check_same_prompts(tmp_path, {"sums": load(*range(20)), "new": load("else")})


@pytest.mark.parametrize(
    ("rows", "difference"),
    [
        (
            [*range(16), *range(17, 20)],
            "and has 19 now; what stood before F:17 is gone",
        ),
        ([*range(16), 99, *range(16, 20)], "it had 20 prompts when the run began and has 21 now; F:17 is new"),
        ([*range(20), 99], "it had 20 prompts when the run began and has 21 now; those from F:21 on are new"),
        ([*range(18)], "it had 20 prompts when the run began and has 18 now; those after F:18 are gone"),
        ([*range(16), 99, *range(17, 20)], "and has 20 now; the first that differs is F:17"),
        ([*range(16), 17, 16, 18, 19], "the same ones in another order; the first that differs is F:17"),
        ([99, *range(18)], "and has 19 now; the first that differs is F:1"),
    ],
)
def test_changed_rows_are_refused_with_what_differs(load, tmp_path, rows, difference):
    remember_prompts(tmp_path, {"sums": load(*range(20)), "words": load("this")})
    (problem,) = refusal(tmp_path, words=load("this"), sums=load(*rows))
    assert problem.startswith("task 'sums': it had 20 prompts when the run began and has ")
    assert difference in problem
    assert problem.endswith("put them back, or begin a new run")


@pytest.mark.parametrize(
    "changes",
    [{"data_source": "other"}, {"reward_model": {"ground_truth": "3"}}, {"extra_info": {"index": 1}}],
)
def test_what_the_judge_is_given_counts_too(load, tmp_path, changes):
    remember_prompts(tmp_path, {"sums": load(1, 2)})
    assert "every one differs" in refusal(tmp_path, sums=load(1, 2, **changes))[0]


def test_the_order_of_keys_does_not_count(load, tmp_path):
    remember_prompts(tmp_path, {"sums": load(1, extra_info={"a": 1, "b": {"c": 1, "d": 2}})})
    check_same_prompts(tmp_path, {"sums": load(1, extra_info={"b": {"d": 2, "c": 1}, "a": 1})})


def test_another_chat_template_is_refused(load, tokenizer, tmp_path):
    class OtherTemplate(type(tokenizer)):
        def render(self, messages, tools=()):
            return [7, *super().render(messages, tools)]

    remember_prompts(tmp_path, {"sums": load(1, 2, 3)})
    (problem,) = refusal(tmp_path, sums=load(1, 2, 3, tokenizer=OtherTemplate()))
    assert "its 3 prompts are rendered otherwise; the model's chat template or tokenizer changed" in problem


def test_rows_are_named_by_their_line_also_behind_rows_that_were_left_out(tokenizer, jsonl, good_row):
    path = jsonl(good_row(), b"{", good_row())
    prompts = DatasetConfig(path=path, quarantine=1).load(tokenizer, context=None, max_tokens=8, data_sources=None)
    assert [prompts.place(0), prompts.place(1)] == [f"{path}:1", f"{path}:3"]


def test_a_run_that_wrote_nothing_down_is_not_compared_and_a_damaged_file_is_refused(load, tmp_path):
    check_same_prompts(tmp_path, {"sums": load(1)})
    remember_prompts(tmp_path, {"sums": load(1)})
    (tmp_path / "prompts.msgpack").write_bytes(b"\x81\xa6hash")
    assert "cannot be read" in refusal(tmp_path, sums=load(1))[0]
