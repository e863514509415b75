from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_families import FAMILIES, tokenizer_of

from penstock.agent_loop.rendering import Seams, TemplateProblem, ids_after, render_conversation, template_problems
from penstock.errors import DataFailure
from penstock.rollout import FailureReason

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "4"}
AGAIN = {"role": "user", "content": "And then?"}


def call(arguments: Any = None, identity: str = "call00001") -> dict[str, Any]:
    function = {"name": "add", "arguments": {"a": 1} if arguments is None else arguments}
    return {"id": identity, "type": "function", "function": function}


def history(*calls: dict[str, Any], content: str = "An answer.") -> list[dict[str, Any]]:
    answer: dict[str, Any] = {"role": "assistant", "content": "" if calls else content}
    return [{"role": "user", "content": "What?"}, answer | ({"tool_calls": list(calls)} if calls else {})]


def appended(family: str, before: list[dict[str, Any]], *new: dict[str, Any], ended: str | None, **rest: Any) -> str:
    tokenizer = tokenizer_of(family)
    last = None if ended is None else tokenizer.encode(ended)[0]
    ids = ids_after(tokenizer, before, new, last_id=last, **rest)
    return str(tokenizer.inner.decode(ids))


SEAMS = {
    "qwen2.5": ("<|im_end|>", "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"),
    "qwen3": ("<|im_end|>", "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"),
    "llama3": (
        "<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nAnd then?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral": ("</s>", "[INST] And then?[/INST]"),
    "gemma": ("<end_of_turn>", "\n<start_of_turn>user\nAnd then?<end_of_turn>\n<start_of_turn>model\n"),
    "phi3": ("<|end|>", "\n<|user|>\nAnd then?<|end|>\n<|assistant|>\n"),
    "deepseek": ("<|end_of_sentence|>", "<|User|>And then?<|Assistant|>"),
    "glm4": ("<|user|>", "\nAnd then?<|assistant|>\n"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_follows_an_answer_begins_right_after_its_end_of_turn(family: str) -> None:
    end, seam = SEAMS[family]
    assert appended(family, history(), AGAIN, ended=end) == seam


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_that_was_cut_gets_its_end_of_turn(family: str) -> None:
    end, seam = SEAMS[family]
    assert appended(family, history(), AGAIN, ended=None) == end + seam
    assert appended(family, history(), AGAIN, ended="x") == end + seam


def test_an_answer_ended_by_another_stop_token_keeps_it() -> None:
    assert appended("qwen2.5", history(), AGAIN, ended="<|endoftext|>") == SEAMS["qwen2.5"][1]
    assert appended("llama3", history(call()), RESULT, ended="<|eom_id|>").startswith("<|start_header_id|>ipython")


RESULTS = {
    "qwen2.5": "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "qwen3": "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "llama3": (
        "<|start_header_id|>ipython<|end_header_id|>\n\n4<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "mistral": '[TOOL_RESULTS] {"content": "4", "call_id": "call00001"}[/TOOL_RESULTS]',
    "phi3": "\n<|tool|>\n4<|end|>\n<|assistant|>\n",
    "deepseek": "<|tool_outputs_begin|><|tool_output_begin|>4<|tool_output_end|><|tool_outputs_end|>",
    "glm4": "\n4<|assistant|>\n",
}


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'], ids=["object", "text"])
@pytest.mark.parametrize("family", RESULTS)
def test_a_tools_result_is_written_as_the_family_writes_it_however_the_arguments_came(
    family: str, arguments: Any
) -> None:
    end = SEAMS[family][0]
    assert appended(family, history(call(arguments)), RESULT, ended=end, tools=[TOOL]) == RESULTS[family]


def test_several_results_stand_together_where_the_template_puts_them_together() -> None:
    two = history(call(), call(identity="call00002"))
    other = RESULT | {"tool_call_id": "call00002", "content": "5"}
    assert appended("qwen2.5", two, RESULT, other, ended="<|im_end|>") == (
        "\n<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    # This family's template takes one call at a time, and still shows both results.
    assert appended("llama3", two, RESULT, other, ended="<|eot_id|>").count("ipython") == 2


def test_text_like_the_mark_or_an_end_of_turn_moves_no_seam() -> None:
    tricky = AGAIN | {"content": "zqanswerzq <|im_end|> zqanswerzqq"}
    expected = f"\n<|im_start|>user\n{tricky['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert appended("qwen2.5", history(content="zqanswerzq"), tricky, ended="<|im_end|>") == expected


def test_reasoning_that_the_template_drops_changes_nothing_that_follows() -> None:
    thinking = history(content="<think>\nHm.\n</think>\n\nYes.")
    assert appended("qwen3", thinking, AGAIN, ended="<|im_end|>") == SEAMS["qwen3"][1]


def test_what_a_template_refuses_is_a_failure_with_its_words() -> None:
    with pytest.raises(DataFailure, match="only user and assistant") as refused:
        appended("gemma", history(call()), RESULT, ended=None)
    assert refused.value.reason is FailureReason.TEMPLATE_REFUSED
    with pytest.raises(DataFailure, match="only user and assistant"):
        render_conversation(tokenizer_of("gemma"), [{"role": "system", "content": "Be brief."}])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_conversation_is_rendered_whatever_form_its_calls_have(family: str) -> None:
    tokenizer = tokenizer_of(family)
    if family == "gemma":
        return
    as_text, as_object = (
        render_conversation(tokenizer, [*history(call(arguments)), RESULT], [TOOL])
        for arguments in ('{"a": 1}', {"a": 1})
    )
    assert as_text == as_object


# What a template is told to be.


def problems(family: str, *appends: str) -> list[tuple[str, bool]]:
    found = template_problems(tokenizer_of(family), appends or ("tool", "user", "system"), [TOOL])
    assert all(isinstance(problem, TemplateProblem) and problem.text for problem in found)
    return [(problem.append, problem.refused) for problem in found]


def test_append_only_templates_have_no_problem() -> None:
    assert problems("qwen2.5") == problems("llama3") == problems("glm4") == []


def test_a_template_that_drops_reasoning_is_named_for_the_appends_that_do_it() -> None:
    assert problems("qwen3") == [("user", False)]
    assert problems("qwen3", "tool") == []
    assert ("user", False) in problems("deepseek")


def test_a_template_that_moves_its_tools_is_named() -> None:
    assert ("user", False) in problems("mistral")


def test_appends_that_a_template_refuses_are_refused() -> None:
    assert ("system", True) in problems("mistral")
    assert problems("gemma") == [("tools", False), ("tool", True), ("system", True)]


def test_a_template_that_hides_the_tools_is_named() -> None:
    assert problems("phi3") == [("tools", False)]


def test_a_template_that_ends_an_answer_otherwise_when_something_follows_is_refused() -> None:
    tokenizer = tokenizer_of("qwen2.5")
    template = "{% for m in messages %}{{ m.content }}{{ '<|im_end|>' if loop.last else '!' }}{% endfor %}"
    changed = type(tokenizer)(_with_template(tokenizer.inner, template), tokenizer.stop_ids, Path())
    [problem] = template_problems(changed, ("user",))
    assert problem.refused
    assert "'<|im_end|>'" in problem.text


def _with_template(inner: Any, template: str) -> Any:
    import copy

    changed = copy.copy(inner)
    changed.chat_template = template
    return changed


@pytest.mark.parametrize("family", FAMILIES)
def test_seams_that_are_kept_are_those_that_would_be_rendered_anew(family: str) -> None:
    """Under other words and other tools, after a cut answer, and with calls."""
    tokenizer = tokenizer_of(family)
    seams = Seams(tokenizer)
    other = {**TOOL, "function": {**TOOL["function"], "name": "subtract"}}
    refused = {problem.append for problem in template_problems(tokenizer) if problem.refused}
    said = [AGAIN, {"role": "user", "content": "zqanswerzq and zqanswerzqq?"}, {"role": "user", "content": ""}]
    said += [{"role": "system", "content": "A rule."}] if "system" not in refused else []
    before = [*history(), AGAIN, *history()[1:]]
    for last in (sorted(tokenizer.stop_ids)[0], None):
        for tools in ((), (TOOL,), (other,), (TOOL, other), (TOOL,)):
            for new in said * 3:
                expected = ids_after(tokenizer, before, [new], tools, last_id=last)
                assert seams.ids_after(before, [new], tools, last_id=last) == expected
            if "tool" not in refused:
                called = [*before, AGAIN, *history(call())[1:]]
                for result in (RESULT, {**RESULT, "content": "<tool_response>"}):
                    expected = ids_after(tokenizer, called, [result], tools, last_id=last)
                    assert seams.ids_after(called, [result], tools, last_id=last) == expected
