from __future__ import annotations

import pytest

from penstock.agent_loop import AgentLoop, SingleTurnAgentLoop
from penstock.agent_loop.stops import resolve_stops
from penstock.errors import ConfigError
from penstock.models import load_tokenizer, resolve_model
from penstock.rollout import FailureReason, Prompt, RolloutState, SampleParams, Status, pack_ids
from penstock.testing import EngineScript, JudgerScript, ScriptedEngine, ScriptedJudger, run_virtual
from penstock.testing.tokenizer import TURN, CharTokenizer


def test_a_special_token_among_the_stop_strings_stops_by_its_id() -> None:
    asked = SampleParams(stop=("</answer>", chr(TURN), "\n"), stop_token_ids=(77,))
    resolved = resolve_stops(asked, CharTokenizer())
    assert resolved == SampleParams(stop=("</answer>", "\n"), stop_token_ids=(77, TURN))


def test_stop_strings_that_an_answers_text_can_have_stay() -> None:
    asked = SampleParams(stop=("</answer>", " ", "é"))
    assert resolve_stops(asked, CharTokenizer()) is asked


def test_a_special_token_with_text_around_it_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"sample_params\.stop has '\\x01a'.*stop_token_ids"):
        resolve_stops(SampleParams(stop=(chr(TURN) + "a",)), CharTokenizer())


def test_tokenizers_of_transformers_know_their_special_tokens() -> None:
    tokenizer = load_tokenizer(resolve_model("tiny"))
    [end] = tokenizer.stop_ids
    resolved = resolve_stops(SampleParams(stop=("<end>", "ab")), tokenizer)
    assert (resolved.stop, resolved.stop_token_ids) == (("ab",), (end,))
    with pytest.raises(ConfigError, match="no answer's text can have"):
        resolve_stops(SampleParams(stop=("é",)), tokenizer)


def play(loop: type[AgentLoop], params: SampleParams, script: EngineScript | None = None) -> RolloutState:
    playing = loop(
        engine=ScriptedEngine(script),
        tokenizer=CharTokenizer(),
        judger=ScriptedJudger(JudgerScript()),
        sample_params=params,
    )
    rollout = RolloutState(prompt=Prompt(ids=pack_ids([1, 63])), task_name="t", group_id="t:0", rollout_id="t:0:0")
    run_virtual(playing.generate_group([rollout], enable_partial_rollout=False))
    return rollout


@pytest.mark.parametrize("stop", [chr(TURN), "c"])
def test_an_agent_loop_stops_at_special_tokens_too(stop: str) -> None:
    script = EngineScript(answers=lambda request: [*map(ord, "ab"), ord(stop), *map(ord, "de"), 0])
    assert play(SingleTurnAgentLoop, SampleParams(stop=(stop,)), script).response_text == "ab"


class Urges(AgentLoop):
    """Asks for longer answers than its task does."""

    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        await self.generate(rollout, params=SampleParams(min_tokens=3))
        return rollout


def test_a_loop_may_not_forbid_the_end_of_an_answer_when_its_task_does_not() -> None:
    assert play(Urges, SampleParams(min_tokens=3)).status is Status.COMPLETED
    rollout = play(Urges, SampleParams())
    assert rollout.error is not None
    assert rollout.error.reason is FailureReason.SAMPLING_PARAMS
