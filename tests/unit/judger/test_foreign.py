"""Functions written for TRL and verl give the scores that those frameworks' documents say they give."""

import asyncio

import pytest

from penstock.errors import ConfigError, UserFunctionError
from penstock.judger import NativeJudgerConfig, as_judger_config, trl_reward, verl_reward
from penstock.rollout import Tokens, Unjudged, Verdict, new_rollout

from . import foreign_functions as foreign

FILE = foreign.__file__


def rollout(prompt, text, *, ids=(), label=None, source="", **columns):
    made = new_rollout(prompt, ground_truth=label, data_source=source, extra_info=columns)
    made.response_text = text
    made.response = Tokens().append(list(ids), [0.0] * len(ids), model_step=0) if ids else Tokens()
    return made


def judged(config, group):
    config.check()

    async def run():
        judger = config.build()
        try:
            return await judger.judge_group(group), judger.relative
        finally:
            await judger.close()

    return asyncio.run(run())


def scores(config, group):
    answers, relative = judged(config, group)
    assert relative
    return [answer.score for answer in answers]


SKY = [
    rollout("The sky is", " blue.", ids=[6303, 13]),
    rollout("The sun is", " in the sky.", ids=[304, 279, 12884, 13]),
]


def test_example_1_of_trl_rewards_tokens():
    assert scores(trl_reward(foreign.by_tokens), SKY) == [2.0, 4.0]
    assert scores(trl_reward(foreign.by_tokens_as_spelt_elsewhere), SKY) == [2.0, 4.0]


def test_example_1_1_of_trl_rewards_characters():
    assert scores(trl_reward(foreign.by_characters), SKY) == [6.0, 12.0]
    assert scores(trl_reward(f"{FILE}:by_characters"), SKY) == [6.0, 12.0]


def test_example_2_of_trl_rewards_a_form_of_messages():
    group = [
        rollout(
            "What is the result of (1 + 2) * 4?",
            "<think>The sum of 1 and 2 is 3, which we multiply by 4.</think><answer>(1 + 2) * 4 = 12</answer>",
        ),
        rollout("What is the result of (3 + 1) * 2?", "The sum of 3 and 1 is 4. So (3 + 1) * 2 = 8."),
    ]
    assert scores(trl_reward(foreign.thinks_then_answers, conversational=True), group) == [1.0, 0.0]


def test_example_3_of_trl_compares_with_a_column():
    group = [
        rollout("Solve $2x + 3 = 7$.", r" The solution is \boxed{2}.", label="2"),
        rollout("Solve $3x - 5 = 10$.", r" The solution is \boxed{6}.", label="5"),
    ]
    assert scores(trl_reward(foreign.boxed), group) == [1.0, 0.0]


def test_example_4_of_trl_abstains_from_tasks_of_others():
    group = [rollout("2 + 2", "4", task="math"), rollout("Write it.", "def f", task="code")]
    group.append(rollout("3 + 4", "8", task="math"))
    answers, _ = judged(trl_reward(foreign.only_math), group)
    assert answers == [Verdict(1.0), Unjudged("returned None"), Verdict(-1.0)]


def test_example_5_of_trl_is_async():
    assert scores(trl_reward(foreign.after_a_wait), [rollout("a", "b"), rollout("a", "")]) == [1.0, 0.0]


def test_a_function_is_given_what_it_asks_for():
    group = [rollout("a", "aab", label="aab"), rollout("a", "b", label="c")]
    assert scores(trl_reward(foreign.without_kwargs), group) == [2.0, 1.0]
    assert scores(trl_reward(foreign.with_a_log), group) == [1.0, 1.0]
    assert scores(trl_reward(foreign.by_solution, label="solution"), group) == [1.0, 0.0]


def test_what_only_the_trainer_of_trl_has_is_refused():
    with pytest.raises(ConfigError, match="asks for trainer_state, which only TRL's trainer has"):
        trl_reward(foreign.in_a_curriculum).check()
    with pytest.raises(ConfigError, match="lambda"):
        trl_reward(lambda completions, **columns: [1.0]).check()


def test_a_column_that_the_rows_do_not_have_is_a_bug_of_the_run():
    config = trl_reward(foreign.by_solution, max_retries=0, num_workers=1)

    async def run():
        judger = config.build()
        try:
            for _ in range(20):
                answers = await judger.judge_group([rollout("a", "b"), rollout("a", "c")])
                assert "missing 1 required positional argument: 'solution'" in answers[0].reason
        finally:
            await judger.close()

    with pytest.raises(UserFunctionError, match="solution"):
        asyncio.run(run())


def test_only_scores_count():
    group = [rollout("a", text) for text in "abcd"]
    answers, _ = judged(trl_reward(foreign.one_of_each, max_retries=0), group)
    assert answers[0] == Verdict(0.5)
    assert [answer.reason for answer in answers[1:]] == [
        "returned None",
        "returned nan; a score must be finite",
        "returned 'good' (str); a score must be a number",
    ]
    for function, reason in ((foreign.too_few, "returned 1 scores for 4 answers"), (foreign.all_strings, "'good'")):
        answers, _ = judged(trl_reward(function, max_retries=0), group)
        assert all(isinstance(answer, Unjudged) and reason in answer.reason for answer in answers)


def test_a_group_function_of_our_own():
    config = NativeJudgerConfig(reward_handler=foreign.ranks, per_group=True)
    assert scores(config, [rollout("a", text) for text in ("aaa", "a", "aa")]) == [1.0, 0.0, 0.5]
    with pytest.raises(ConfigError, match="because per_group is set"):
        NativeJudgerConfig(reward_handler=foreign.without_kwargs, per_group=True).check()


@pytest.mark.parametrize(
    ("config", "text", "label", "wanted"),
    [
        (verl_reward(foreign.my_reward_fn), "twenty characters ok", "", Verdict(0.2)),
        (verl_reward(FILE), "72", "72", Verdict(1.0, {"acc": 1.0})),
        (verl_reward(f"{FILE}:compute_score"), "72", "71", Verdict(0.0, {"acc": 0.0})),
        (verl_reward(f"{FILE}:gsm8k_score"), "So it is\n#### 1,072", "1072", Verdict(1.0)),
        (verl_reward(f"{FILE}:gsm8k_score"), "So it is\n#### 72", "71", Verdict(0.1)),
        (verl_reward(f"{FILE}:gsm8k_score"), "So it is 72", "72", Verdict(0.0)),
        (verl_reward(f"{FILE}:gsm8k_score", reward_kwargs={"method": "flexible"}), "it is 72", "72", Verdict(1.0)),
        (verl_reward(f"{FILE}:gsm8k_score", reward_kwargs={"format_score": 0.3}), "#### 3", "4", Verdict(0.3)),
        (verl_reward(foreign.async_score), "a", "b", Verdict(1.0)),
        (as_judger_config(foreign.compute_score), "72", "72", Verdict(1.0, {"acc": 1.0})),
    ],
)
def test_functions_of_verl_are_called_as_verl_calls_them(config, text, label, wanted):
    assert judged(config, [rollout("a", text, label=label, source="sums")])[0] == [wanted]


def test_a_setting_that_a_function_of_verl_does_not_take_is_refused():
    with pytest.raises(ConfigError, match="unexpected keyword argument 'metod'"):
        verl_reward(foreign.gsm8k_score, reward_kwargs={"metod": "flexible"}).check()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        verl_reward("/no/such/file.py").check()
