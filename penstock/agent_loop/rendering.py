"""What is appended to recorded ids when a conversation goes on: the difference of two renders under the same prefix.

What is on record is never tokenised again. The model's last answer is replaced by a mark, the conversation is rendered
up to that answer and with the new messages after it, and only what follows the mark is looked at:

    ... <mark><|im_end|>\\n                                                      `closing`
    ... <mark><|im_end|>\\n<|im_start|>tool\\n4<|im_end|>\\n<|im_start|>assistant\\n    `going_on`

The answer on record ends with its end-of-turn token, so what is appended begins right after it: with the newline that
no model writes itself. An answer that was cut lacks that token, and gets it.

What stands before the mark does not matter. So nothing depends on whether a template would now write the answer as the
model did: it may sort the arguments of a call, strip white space, or drop the reasoning of earlier turns.
`template_problems` says so of a template, because keeping recorded tokens keeps what the template would drop.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import DataFailure
from penstock.ports import Tokenizer
from penstock.rollout import FailureReason, IntArray

Message = Mapping[str, Any]

_MARK = "zqanswerzq"
"""Letters only: no template strips, escapes or splits it."""

_WORDS = frozenset({"role", "content"})
"""The fields of an answer without calls."""

APPENDS = ("tool", "user", "system")
"""What a conversation may go on with."""


def render_conversation(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
    """All of a conversation, ready for the assistant's answer. Raises DataFailure when the template refuses it."""
    for form in _FORMS:
        written = [form(message) for message in messages]
        try:
            return tokenizer.render(written, tools)
        except Exception as error:  # a template may raise anything; another form may suit it
            refusal = error
    raise _refused(refusal)


def ids_after(
    tokenizer: Tokenizer,
    history: Sequence[Message],
    new: Sequence[Message],
    tools: Sequence[Message] = (),
    *,
    last_id: int | None = None,
) -> list[int]:
    """The ids to append to a recorded conversation, so that the assistant can answer `new`.

    `history` is what is on record, the model's last answer included as its last message; `last_id` is the last recorded
    id, which tells whether that answer has its end-of-turn token. Raises DataFailure when the template cannot go on
    from there.
    """
    closing, going_on = _after_the_answer(tokenizer, history, new, tools)
    return _appended(tokenizer, _closed(tokenizer, closing), going_on, ended=last_id in tokenizer.stop_ids)


class _Closing(NamedTuple):
    """What the template writes after an answer that nothing follows."""

    text: str
    num_ends: int
    """Tokens of it that end a turn."""


def _closed(tokenizer: Tokenizer, text: str) -> _Closing:
    return _Closing(text, sum(token in tokenizer.stop_ids for token in tokenizer.encode(text)))


def _appended(tokenizer: Tokenizer, closing: _Closing, going_on: str, *, ended: bool) -> list[int]:
    """The ids after the recorded ones; `ended`: those have the end of the turn."""
    if not going_on.startswith(closing.text):
        raise _refused(f"it ends an answer with {closing.text!r}, and with {going_on[:40]!r} when something follows")
    stops = tokenizer.stop_ids
    if closing.num_ends == 0:
        # No end of turn: the next message's first token is it, and the model may have written that.
        ids = tokenizer.encode(going_on[len(closing.text) :])
        return ids[1:] if ended and ids and ids[0] in stops else ids
    ids = tokenizer.encode(going_on)
    end = [place for place, token in enumerate(ids) if token in stops][closing.num_ends - 1]
    return ids[end + 1 :] if ended else ids[end:]


def equal_at_first(a: IntArray, b: IntArray) -> int:
    """How many ids two sequences begin with alike."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


class Seams:
    """`ids_after` at a cost that does not grow with the conversation.

    What stands before the last answer does not matter, unless a template says otherwise: so a question stands for all
    of it. That is tried once for each kind of seam, and kept to only where both give the same ids. What closes an
    answer without calls is then the same every time, and rendered once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._short: dict[tuple[object, ...], bool] = {}
        """By kind of seam, whether the short history gave the ids of the whole one."""
        self._closings: dict[tuple[object, ...], tuple[Sequence[Message], _Closing]] = {}
        """By kind of seam, what closes an answer of words under these tools."""

    def ids_after(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Message] = (),
        *,
        last_id: int | None = None,
    ) -> list[int]:
        """As the function of this name."""
        calls = len(history[-1].get("tool_calls") or ())
        ended = last_id in self._tokenizer.stop_ids
        kind = (calls, bool(tools), ended, *(message["role"] for message in new))
        stands_for_all = [{"role": "user", "content": "A question."}, history[-1]]
        if self._short.get(kind):
            if history[-1].keys() == _WORDS and not any(message.get("tool_calls") for message in new):
                return self._after_words(kind, stands_for_all, new, tools, ended=ended)
            return ids_after(self._tokenizer, stands_for_all, new, tools, last_id=last_id)
        ids = ids_after(self._tokenizer, history, new, tools, last_id=last_id)
        if kind not in self._short and len(history) > len(stands_for_all):
            try:
                short = ids_after(self._tokenizer, stands_for_all, new, tools, last_id=last_id)
            except DataFailure:
                short = []
            self._short[kind] = short == ids
        return ids

    def _after_words(
        self,
        kind: tuple[object, ...],
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Message],
        *,
        ended: bool,
    ) -> list[int]:
        known = self._closings.get(kind)
        if known is not None and known[0] == tools:
            mark = _mark_beside(new)
            marked = map(_as_objects, [*history[:-1], *_stand_ins(history[-1], mark), *new])
            try:
                written = self._tokenizer.render_text([*marked], tools)
            except Exception as error:  # a template may raise anything
                raise _refused(error) from None
            if mark in written:
                return _appended(self._tokenizer, known[1], written.rpartition(mark)[2], ended=ended)
        text, going_on = _after_the_answer(self._tokenizer, history, new, tools)
        closing = _closed(self._tokenizer, text)
        self._closings[kind] = (tools, closing)
        return _appended(self._tokenizer, closing, going_on, ended=ended)


class TemplateProblem(NamedTuple):
    append: str
    """What the conversation goes on with: one of `APPENDS`; `tools` for the tools themselves."""
    refused: bool
    """It cannot go on so. Otherwise it can, and differs from what the template would write."""
    text: str


def template_problems(
    tokenizer: Tokenizer, appends: Sequence[str] = APPENDS, tools: Sequence[Message] = ()
) -> list[TemplateProblem]:
    """Why conversations cannot just grow under this chat template, or what it means that they do; needs no model."""
    found = []
    if tools and not _shows_tools(tokenizer, tools):
        text = "the chat template does not tell the model of its tools; describe them in a message"
        found.append(TemplateProblem("tools", False, text))
    for append in appends:
        found += _append_problems(tokenizer, append, tools)
    return found


def _append_problems(tokenizer: Tokenizer, append: str, tools: Sequence[Message]) -> Iterator[TemplateProblem]:
    new = [_EXAMPLES[append]]
    for thought in ("", "<think>\nA thought.\n</think>\n\n"):
        answer = _answer(thought, calls=append == "tool")
        history = [{"role": "user", "content": "A question."}, answer]
        try:
            ids_after(tokenizer, history, new, tools)
            kept = _keeps(tokenizer, history, new, tools)
        except DataFailure as failure:
            yield TemplateProblem(append, True, f"a {append} message cannot follow an answer: {failure}")
            return
        if not kept:
            what = "an answer with reasoning" if thought else "an answer"
            text = (
                f"the chat template is not append-only: when a {append} message follows, it writes {what} otherwise "
                "than before. Recorded tokens are kept, so the model goes on seeing what the template would change or "
                "drop, old reasoning above all; training is exact for what it saw"
            )
            yield TemplateProblem(append, False, text)
            return


def _keeps(tokenizer: Tokenizer, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Message]) -> bool:
    """Whether what is written so far is the beginning of what the template writes later."""
    if history[-1].get("tool_calls"):
        # How the model writes a call is its own affair; so what is compared has all of it in both.
        before, after = _rendered(tokenizer, [*history, *new], [history[-1], *new], tools)
    else:
        before, after = _rendered(tokenizer, history[:-1], [], tools)[1], _rendered(tokenizer, history, new, tools)[1]
        before += str(history[-1]["content"])
    return after.startswith(before)


def _shows_tools(tokenizer: Tokenizer, tools: Sequence[Message]) -> bool:
    asked = [{"role": "user", "content": "A question."}]
    return _rendered(tokenizer, asked, [], tools) != _rendered(tokenizer, asked, [], ())


_EXAMPLES: dict[str, Message] = {
    "tool": {"role": "tool", "name": "look_up", "tool_call_id": "call00000", "content": "A result."},
    "user": {"role": "user", "content": "Another question."},
    "system": {"role": "system", "content": "A rule."},
}


def _answer(thought: str, *, calls: bool) -> dict[str, Any]:
    if not calls:
        return {"role": "assistant", "content": f"{thought}An answer."}
    call = {"id": "call00000", "type": "function", "function": {"name": "look_up", "arguments": {"key": "a"}}}
    return {"role": "assistant", "content": thought, "tool_calls": [call]}


def _after_the_answer(
    tokenizer: Tokenizer, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Message]
) -> tuple[str, str]:
    """What the template writes after the last answer when nothing follows, and when `new` does."""
    *earlier, answer = history
    mark = _mark_beside(new)
    for stand_in in _stand_ins(answer, mark):
        before, after = _rendered(tokenizer, [*earlier, stand_in], new, tools)
        if mark in before and mark in after:
            return before.rpartition(mark)[2], after.rpartition(mark)[2]
    raise _refused("it does not write the assistant's answers")


def _mark_beside(new: Sequence[Message]) -> str:
    """One that the new messages do not contain."""
    mark, said = _MARK, repr(new)
    while mark in said:
        mark += "q"
    return mark


def _stand_ins(answer: Message, mark: str) -> Iterator[dict[str, Any]]:
    """The answer with a mark where it ends: in its last call, or in its text where a template writes no calls."""
    plain = {name: value for name, value in answer.items() if name not in ("reasoning_content", "tool_calls")}
    if calls := answer.get("tool_calls"):
        function = {**calls[-1]["function"], "arguments": {"mark": mark}}
        yield plain | {"tool_calls": [*calls[:-1], {**calls[-1], "function": function}]}
    yield plain | {"content": mark}


def _rendered(
    tokenizer: Tokenizer, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Message]
) -> tuple[str, str]:
    """As it is, and with `new` and the beginning of an answer; both in the first form that the template takes."""
    for form in _FORMS:
        written = [form(message) for message in history]
        try:
            after = tokenizer.render_text([*written, *map(form, new)], tools)
            return tokenizer.render_text(written, tools, generation_prompt=False), after
        except Exception as error:  # a template may raise anything; another form may suit it
            refusal = error
    raise _refused(refusal)


def _as_objects(message: Message) -> dict[str, Any]:
    """Arguments as objects: what most templates expect, and clients send as text."""
    return _with_calls(message, lambda calls: [_with_arguments(call, _parsed) for call in calls])


def _as_texts(message: Message) -> dict[str, Any]:
    return _with_calls(message, lambda calls: [_with_arguments(call, _unparsed) for call in calls])


def _one_call(message: Message) -> dict[str, Any]:
    """For templates that take no more than one call at a time."""
    return _with_calls(message, lambda calls: [_with_arguments(call, _parsed) for call in calls[-1:]])


_FORMS = (_as_objects, _as_texts, _one_call)


def _with_calls(message: Message, change: Callable[[Sequence[Message]], list[dict[str, Any]]]) -> dict[str, Any]:
    written = {**message, "content": "" if message.get("content") is None else message["content"]}
    return written | {"tool_calls": change(calls)} if (calls := message.get("tool_calls")) else written


def _with_arguments(call: Message, change: Callable[[Any], Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": change(function.get("arguments", {}))}}


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments)
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments


def _unparsed(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _refused(why: object) -> DataFailure:
    return DataFailure(f"the chat template refuses the conversation: {why}", reason=FailureReason.TEMPLATE_REFUSED)
