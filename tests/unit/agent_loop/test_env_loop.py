from __future__ import annotations

import asyncio
from typing import Any

import env_classes
import pytest
from chat_families import tokenizer_of

from penstock.agent_loop import EnvAgentLoop, EnvAgentLoopConfig
from penstock.agent_loop.env import EnvLimits
from penstock.agent_loop.openenv import OpenEnv
from penstock.errors import ConfigError
from penstock.ports import GenerateRequest
from penstock.rollout import (
    FailureReason,
    FinishReason,
    Prompt,
    RolloutState,
    SampleParams,
    Status,
    Verdict,
    pack_ids,
    unpack_ids,
)
from penstock.testing import CharTokenizer, EngineScript, JudgerScript, ScriptedEngine, ScriptedJudger, run_virtual
from penstock.testing.tokenizer import END, TURN


class NoWeights:
    def tensors(self) -> Any:
        yield from ()


def rollout_of(name: str = "t:0:0", **extra_info: Any) -> RolloutState:
    messages = ({"role": "user", "content": "?"},)
    prompt = Prompt(messages=messages, ids=pack_ids(CharTokenizer().render(messages)), extra_info=extra_info)
    return RolloutState(prompt=prompt, task_name="t", group_id="t:0", rollout_id=name)


def saying(*texts: str) -> ScriptedEngine:
    """The n-th answer is the n-th text."""

    def answers(request: GenerateRequest) -> list[int]:
        turn = unpack_ids(request.prompt_ids).tolist().count(END)
        return [*map(ord, texts[turn % len(texts)]), END]

    return ScriptedEngine(EngineScript(tokens_per_s=10.0, answers=answers))


def build(env: Any, engine: ScriptedEngine | None = None, **options: Any) -> EnvAgentLoop:
    return EnvAgentLoop(
        engine=engine or saying("a", "b", "c"),
        tokenizer=options.pop("tokenizer", CharTokenizer()),
        judger=options.pop("judger", None),
        sample_params=options.pop("sample_params", SampleParams(max_tokens=1000)),
        env=env,
        **options,
    )


def play(loop: EnvAgentLoop, *rollouts: RolloutState, run: Any = run_virtual) -> list[RolloutState]:
    async def main() -> list[RolloutState]:
        try:
            return await loop.generate_group(list(rollouts or [rollout_of()]), enable_partial_rollout=True)
        finally:
            await loop.close()

    found: list[RolloutState] = run(main())
    return found


def text(rollout: RolloutState) -> str:
    return "".join({TURN: "<", END: ">"}.get(i, chr(i)) for i in rollout.response_ids.tolist())


def test_the_model_and_an_environment_take_turns_and_the_rewards_add_up() -> None:
    [rollout] = play(build(env_classes.CountsAsync))
    assert rollout.status is Status.COMPLETED, rollout.error
    assert text(rollout) == "a><1:ab><2:bc>"
    assert rollout.response_mask.tolist() == [1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1]
    assert rollout.reward is not None
    assert rollout.reward.score == pytest.approx(0.6)
    assert rollout.reward.parts == {"steps": 3.0}


def test_a_plain_environment_is_played_in_a_worker_process() -> None:
    loop = build("env_classes.Counts", env_arguments={"steps": 2}, limits=EnvLimits(num_workers=1))
    group = play(loop, *(rollout_of(f"t:0:{i}") for i in range(3)), run=asyncio.run)
    assert [text(rollout) for rollout in group] == ["a><1:ab>"] * 3
    assert {rollout.status for rollout in group} == {Status.COMPLETED}


def test_an_environment_may_begin_with_messages_of_its_own() -> None:
    begins = [{"role": "user", "content": "?!"}]
    [rollout] = play(build(env_classes.CountsAsync, env_arguments={"steps": 1}), rollout_of(begins=begins))
    assert rollout.context_ids(0) == rollout.prompt.ids  # `?` is common to both
    assert text(rollout) == "!a>"
    assert rollout.response_mask.tolist() == [0, 1, 1]
    [other] = play(build(env_classes.CountsAsync, env_arguments={"steps": 1}), rollout_of(begins="x"))
    assert (other.segments[0].start, text(other)) == (1, "xa>")


def test_the_tasks_judger_judges_where_there_is_one() -> None:
    judger = ScriptedJudger(JudgerScript(score=lambda _: 0.25))  # type: ignore[arg-type, call-arg]
    [rollout] = play(build(env_classes.CountsAsync, judger=judger))
    assert rollout.reward == Verdict(0.25) or rollout.reward is not None
    assert "steps" not in (rollout.reward or Verdict(0.0)).parts


def test_the_turn_cap_and_the_budget_end_the_conversation() -> None:
    [capped] = play(build(env_classes.CountsAsync, max_turns=2))
    assert text(capped) == "a><1:ab>"
    assert capped.reward is not None and capped.reward.score == pytest.approx(0.3)
    [short] = play(build(env_classes.CountsAsync, sample_params=SampleParams(max_tokens=7)))
    assert (text(short), short.finish_reason) == ("a><1:ab", FinishReason.LENGTH)
    [cut] = play(build(env_classes.CountsAsync, saying("abc"), max_tokens_per_turn=2))
    assert (text(cut), cut.finish_reason) == ("ab", FinishReason.LENGTH)
    assert cut.reward is not None and cut.reward.score == pytest.approx(0.1)


def test_what_is_said_is_written_by_the_models_own_template() -> None:
    tokenizer = tokenizer_of("qwen2.5")
    messages = [{"role": "user", "content": "?"}]
    rollout = RolloutState(
        prompt=Prompt(messages=tuple(messages), ids=pack_ids(tokenizer.render(messages))), rollout_id="t:0:0"
    )
    answer = [*tokenizer.encode("a"), min(tokenizer.stop_ids)]
    engine = ScriptedEngine(EngineScript(answers=lambda _: answer))
    [played] = play(build(env_classes.CountsAsync, engine, tokenizer=tokenizer), rollout)
    written = tokenizer.inner.decode(played.response_ids.tolist())
    assert written == (
        "a<|im_end|>\n<|im_start|>user\n1:a<|im_end|>\n<|im_start|>assistant\n"
        "a<|im_end|>\n<|im_start|>user\n2:a<|im_end|>\n<|im_start|>assistant\na<|im_end|>"
    )


# What goes wrong.


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("higher", "(messages, reward, done)"),
        (["higher", 1.0], "(messages, reward, done)"),
        (["higher", "1", False], "finite number"),
        (["higher", float("nan"), False], "finite number"),
        (["higher", True, False], "finite number"),
        (["higher", 1.0, 0], "true or false"),
        ([7, 1.0, False], "role and content"),
        ([[{"role": "user"}], 1.0, False], "a text as its content"),
        ([None, 1.0, False], "said nothing"),
    ],
)
def test_an_environment_that_says_what_cannot_be_fails_the_rollout(said: Any, told: str) -> None:
    [rollout] = play(build(env_classes.Says, env_arguments={"step": said}))
    assert rollout.status is Status.FAILED
    assert rollout.error is not None and told in rollout.error.message
    assert rollout.reward is None


def test_an_environment_that_raises_or_dies_fails_its_rollout() -> None:
    [raised] = play(build(env_classes.Breaks, limits=EnvLimits(num_workers=1)), run=asyncio.run)
    assert raised.error is not None
    assert "Breaks.step raised RuntimeError: no more" in raised.error.message
    assert not raised.error.infrastructure
    [died] = play(build(env_classes.Dies, limits=EnvLimits(num_workers=1)), run=asyncio.run)
    assert died.error is not None and died.error.infrastructure
    assert "exit status 3" in died.error.message


def test_an_environment_that_hangs_costs_its_deadline_and_its_neighbours_are_made_again() -> None:
    async def main() -> list[RolloutState]:
        loop = build(
            env_classes.Hangs, saying("a", "b", "c"), limits=EnvLimits(num_workers=1, timeout_s=2.0), max_turns=3
        )
        hanging = build(env_classes.Hangs, saying("a", "hang"), max_turns=3)
        hanging.envs = loop.envs
        groups = await asyncio.gather(
            hanging.generate_group([rollout_of("t:1:0")], enable_partial_rollout=True),
            *(loop.generate_group([rollout_of(f"t:0:{i}")], enable_partial_rollout=True) for i in range(3)),
        )
        await loop.close()
        return [rollout for group in groups for rollout in group]

    hung, *others = asyncio.run(main())
    assert hung.error is not None and hung.error.infrastructure
    assert hung.error.reason is FailureReason.TOOL_DEADLINE
    assert [text(rollout) for rollout in others] == ["a><1:ab><2:bc>"] * 3
    assert {rollout.status for rollout in others} == {Status.COMPLETED}


# Going on.


async def interrupted(env: Any, after_s: float) -> RolloutState:
    """A pause comes, the weights change, and it goes on in a loop of another process, as it were."""
    engine, rollout = saying("a", "b", "c"), rollout_of()
    playing = asyncio.create_task(build(env, engine).generate_group([rollout], enable_partial_rollout=True))
    await asyncio.sleep(after_s)
    await engine.pause_generation()
    [rollout] = await playing
    await engine.load_weights(NoWeights(), 1)
    await engine.continue_generation()
    if rollout.status is not Status.COMPLETED:
        rollout.status = Status.INIT
        [rollout] = await build(env, engine).generate_group([rollout], enable_partial_rollout=True)
    return rollout


@pytest.mark.parametrize("tenths", range(0, 20, 1))
def test_a_rollout_goes_on_where_a_pause_came_and_its_environment_is_played_again(tenths: int) -> None:
    rollout = run_virtual(interrupted(env_classes.CountsAsync, tenths / 10))
    assert rollout.status is Status.COMPLETED, rollout.error
    assert text(rollout) == "a><1:ab><2:bc>"
    assert rollout.reward is not None and rollout.reward.score == pytest.approx(0.6)


def test_an_environment_that_is_played_again_and_says_something_else_starts_the_rollout_again() -> None:
    rollout = run_virtual(interrupted(env_classes.Forgets, 0.9))
    assert rollout.status is Status.FAILED
    assert rollout.error is not None and rollout.error.reason is FailureReason.RECORD_MISMATCH


# Known ones.


@pytest.mark.long_tier
def test_reasoning_gym_tasks_are_played_with_several_tries() -> None:
    pytest.importorskip("reasoning_gym")
    from penstock.data import ReasoningGymConfig

    config = ReasoningGymConfig(name="letter_counting", size=2, held_out=0)
    prompt = next(config.prompts())
    rollout = rollout_of()
    rollout.prompt = Prompt(
        messages=prompt.messages,
        ids=pack_ids(CharTokenizer().render(prompt.messages)),
        ground_truth=prompt.ground_truth,
        extra_info=prompt.extra_info,
    )
    settings = EnvAgentLoopConfig(env="reasoning_gym", env_arguments={"tries": 3}, num_env_workers=1)
    settings.check()
    engine = saying("999", str(prompt.ground_truth))
    loop = settings.build(engine=engine, tokenizer=CharTokenizer(), judger=None)
    assert isinstance(loop, EnvAgentLoop)
    [played] = play(loop, rollout, run=asyncio.run)
    assert played.reward == Verdict(1.0, {"steps": 2.0}), played.error
    assert "That is not right. Try again." in text(played)


def test_clients_of_openenv_are_environments() -> None:
    before = env_classes.EchoClient.closed
    arguments = {"client": "env_classes:EchoClient", "base_url": "http://x", "say": "env_classes:asked"}
    [rollout] = play(build(OpenEnv, env_arguments=arguments), rollout_of(reset={"seed": 1}))
    assert rollout.status is Status.COMPLETED, rollout.error
    assert rollout.context_ids(0) == pack_ids([TURN])
    assert text(rollout) == "Say something to http://xa><a!b>"
    assert rollout.reward == Verdict(1.0, {"steps": 2.0})
    assert env_classes.EchoClient.closed == before + 1


def test_clients_of_openenv_that_block_run_in_a_thread() -> None:
    arguments = {"client": "env_classes:PlainEchoClient", "base_url": "", "action": "env_classes:shouted"}
    [rollout] = play(build(OpenEnv, env_arguments=arguments), run=asyncio.run)
    assert rollout.reward == Verdict(1.0, {"steps": 1.0}), rollout.error


@pytest.mark.parametrize(
    ("env", "told"),
    [
        (env_classes.NoStep, "has no step"),
        (env_classes.Mixed, "reset and step must be alike"),
        (env_classes.asked, "is no class"),
        ("env_classes.Nothing", "cannot be loaded"),
    ],
)
def test_what_is_no_environment_is_refused_by_the_configuration(env: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        EnvAgentLoopConfig(env=env).check()
