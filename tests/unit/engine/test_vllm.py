"""What of the vLLM engine needs no vLLM: its configuration, and what its answers become."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_contract import CharacterTokenizer

from penstock.cli import main
from penstock.engine import VllmEngineConfig
from penstock.engine.vllm_answers import Answer, StraddlingStop, seed_of, step_of
from penstock.errors import ConfigError, InfrastructureFailure
from penstock.rollout import FinishReason, unpack_ids


def piece(ids: list[int], *, finish: str | None = None, versions: list[tuple[str, int, int]] | None = None) -> Any:
    return SimpleNamespace(
        token_ids=ids,
        logprobs=[{token: SimpleNamespace(logprob=-0.5)} for token in ids],
        finish_reason=finish,
        weight_versions=[SimpleNamespace(version=v, start=start, end=end) for v, start, end in versions or ()],
    )


def test_a_vllm_recipe_without_vllm_exits_2_and_names_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "quickstart-vllm", "--set", "engines.engine.python=nowhere/bin/python"]) == 2
    assert "there is no nowhere/bin/python; `make setup-vllm` installs it in .venv-vllm" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_where_there_is_no_makefile_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when Penstock was installed with pip."""
    monkeypatch.setattr("penstock.engine.config.PROJECT", tmp_path)
    with pytest.raises(ConfigError, match=r"name its interpreter: --set engines\.engine\.python=") as refused:
        VllmEngineConfig(python="nowhere/bin/python").check()
    assert "make " not in str(refused.value)


def test_vllm_in_this_environment_is_asked_for_by_name() -> None:
    with pytest.raises(ConfigError, match="make setup-vllm"):
        VllmEngineConfig(python=None).check()


def test_the_interpreter_is_found_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").touch()
    monkeypatch.chdir(tmp_path)
    VllmEngineConfig(python="python").check()


def test_an_answer_is_the_pieces_in_order_with_the_versions_that_vllm_named() -> None:
    answer = Answer("a", "abort")
    answer.take(piece([1, 2]), 0)
    answer.take(piece([3], finish="stop", versions=[("default", 0, 2), ("7", 2, 3)]), 0)
    completion = answer.completion()
    assert unpack_ids(completion.ids).tolist() == [1, 2, 3]
    assert completion.finish_reason is FinishReason.STOP
    assert completion.steps == ((0, 2), (7, 1))


def test_what_arrived_after_a_stop_string_is_not_part_of_the_answer() -> None:
    answer = Answer("a", "abort")
    answer.take(piece([1, 2, 3, 4]), 0)
    answer.cut = 3
    answer.take(piece([5], finish="abort", versions=[("4", 0, 2), ("5", 2, 5)]), 0)
    completion = answer.completion()
    assert unpack_ids(completion.ids).tolist() == [1, 2, 3]
    assert len(completion.logprobs) == 12
    assert completion.finish_reason is FinishReason.STOP
    assert completion.steps == ((4, 2), (5, 1))


@pytest.mark.parametrize("ending", [None, "error", "repetition"])
def test_an_ending_that_is_none_of_ours_is_a_failure(ending: str | None) -> None:
    answer = Answer("a", "abort")
    answer.take(piece([1], finish=ending), 0)
    with pytest.raises(InfrastructureFailure, match=f"request a: vLLM ended it with {ending!r}"):
        answer.completion()


def test_a_stop_string_is_found_over_the_border_of_a_continuation_and_only_there() -> None:
    tokenizer = CharacterTokenizer()
    given, new = tokenizer.encode("so far EN"), tokenizer.encode("D. And more END")
    assert StraddlingStop(tokenizer, ("END", "absent"), given).find(new[:1]) == 1
    late = StraddlingStop(tokenizer, ("END.",), given)
    assert late.find(new[:1]) is None
    assert late.find(new[:5]) == 2
    # Inside the new text vLLM finds it itself; without anything given all text is new.
    assert StraddlingStop(tokenizer, ("more",), given).find(new) is None
    assert StraddlingStop(tokenizer, ("D.",), []).find(new) is None
    assert StraddlingStop(tokenizer, (), given).find(new) is None


def test_siblings_and_continuations_have_seeds_of_their_own_in_vllms_range() -> None:
    seeds = [seed_of(seed, first) for seed in (0, 1, 2**64 - 1) for first in (0, 1, 50)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert (step_of("default"), step_of("12")) == (0, 12)
