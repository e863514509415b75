"""What every engine must do, as plain async functions over a `Subject`: the engine to make and what it may be asked.

A test module for one engine builds a `Subject` and runs every function of `CONTRACT`:

    @pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
    def test_the_contract(check, subject):
        asyncio.run(check(subject))

The checks are in `engine_answers` and `engine_changes`; what they ask with is in `engine_subject`. All that such a
module needs of the three is found here.
"""

from __future__ import annotations

from engine_answers import (
    ANSWERS,
    a_stop_string_ends_the_answer_with_the_token_that_completes_it,
    an_answer_does_not_stop_before_min_tokens,
    assert_logprobs,
    greedy_answers_take_the_likeliest_token_and_its_logprob_at_temperature_1,
    logprobs_are_those_of_the_trainers_own_forward,
    requests_that_cannot_be_served_are_data_failures,
    scores_are_those_of_the_trainers_own_forward,
    top_k_1_is_greedy_and_cut_distributions_stay_inside_the_cut,
)
from engine_changes import (
    CHANGES,
    closing_fails_what_is_pending_and_all_that_comes_later,
    loaded_weights_make_the_next_answers_and_are_named_by_them,
    wrong_weights_are_refused_and_the_old_ones_kept,
)
from engine_subject import (
    LONG,
    PROMPTS,
    AsNew,
    CharacterTokenizer,
    Check,
    Subject,
    Tensors,
    ask,
    has_made,
    has_requests,
    ids_of,
    logprobs_of,
    running,
)

__all__ = [
    "ABOUT_THE_MODEL",
    "CONTRACT",
    "LONG",
    "PROMPTS",
    "AsNew",
    "CharacterTokenizer",
    "Subject",
    "Tensors",
    "ask",
    "assert_logprobs",
    "closing_fails_what_is_pending_and_all_that_comes_later",
    "has_made",
    "has_requests",
    "ids_of",
    "logprobs_are_those_of_the_trainers_own_forward",
    "logprobs_of",
    "running",
]

CONTRACT: tuple[Check, ...] = (*ANSWERS, *CHANGES)

ABOUT_THE_MODEL = (
    logprobs_are_those_of_the_trainers_own_forward,
    scores_are_those_of_the_trainers_own_forward,
    greedy_answers_take_the_likeliest_token_and_its_logprob_at_temperature_1,
    a_stop_string_ends_the_answer_with_the_token_that_completes_it,
    an_answer_does_not_stop_before_min_tokens,
    top_k_1_is_greedy_and_cut_distributions_stay_inside_the_cut,
    loaded_weights_make_the_next_answers_and_are_named_by_them,
    wrong_weights_are_refused_and_the_old_ones_kept,
    requests_that_cannot_be_served_are_data_failures,
)
"""What an engine without a model, a tokenizer and weights cannot be asked."""
