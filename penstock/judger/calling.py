"""How a reward function is called: in Penstock's order, or as the framework it was written for calls it.

InOrder     (response, label, extra_info), for one answer
GroupOrder  (responses, label, extra_info), for all answers of a group; returns a list
ByName      verl's: data_source, solution_str, ground_truth, extra_info, by name, for one answer
Columns     TRL's: prompts, completions, completion_ids and the columns of the dataset, as lists; returns a list
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from penstock.judger.worker import Arguments
from penstock.rollout import RolloutState, unpack_ids

VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
"""The names by which verl gives a reward function what it may ask for."""
TRL_HOOKS = ("log_extra", "log_metric")
"""Functions that TRL offers for logging; what is told them is dropped here."""

_OURS = "(response, label, extra_info)"
_FOREIGN = {
    "completions": "TRL's: wrap it, judger_config=trl_reward(f)",
    "solution_strs": (
        f"that of verl's batch manager, which gets lists of a whole batch; it is called as {_OURS}, once per answer: "
        "write a function of that form which calls it"
    ),
    "queries": (
        f"OpenRLHF's, which gets lists of a whole batch; it is called as {_OURS}, once per answer: write a function of "
        "that form which calls it"
    ),
}
"""Parameters by which a reward function of another framework is known that cannot be called for one answer."""


class Calling(abc.ABC):
    """The way one function is called."""

    per_group = False
    """Whether it is called for a whole group and returns a list."""
    hooks: tuple[str, ...] = ()
    """Parameters for which the worker gives a function that does nothing."""
    described = ""
    """For people, where it was not asked for by name."""

    @abc.abstractmethod
    def arguments(self, rollouts: Sequence[RolloutState]) -> Arguments:
        """In order, or by name."""

    @abc.abstractmethod
    def problems(self, function: Callable[..., Any]) -> Iterator[str]:
        """Why this function cannot be called so, as the end of a sentence about it."""


class InOrder(Calling):
    def arguments(self, rollouts: Sequence[RolloutState]) -> Arguments:
        (rollout,) = rollouts
        return [rollout.response_text, rollout.ground_truth, told(rollout)]

    def problems(self, function: Callable[..., Any]) -> Iterator[str]:
        parameters = parameters_of(function)
        for name, whose in _FOREIGN.items():
            if name in parameters:
                yield f"has the parameter {name!r}, so its signature is {whose}"
                return
        if next(iter(parameters), None) == "data_source":
            yield (
                f"has the first parameter 'data_source', but it is called as {_OURS}; name the parameters as verl does "
                f"({', '.join(VERL_NAMES)}), or write a function of that form which calls it"
            )
            return
        yield from _bind_problems(function, ["response", "label", {}], f"called as {_OURS}")


class GroupOrder(Calling):
    per_group = True

    def arguments(self, rollouts: Sequence[RolloutState]) -> Arguments:
        first = rollouts[0]
        return [[rollout.response_text for rollout in rollouts], first.ground_truth, dict(first.extra_info)]

    def problems(self, function: Callable[..., Any]) -> Iterator[str]:
        called = "called as (responses, label, extra_info), because per_group is set"
        yield from _bind_problems(function, [["response"], "label", {}], called)


class ByName(Calling):
    """`names` are those that the function asks for."""

    def __init__(self, names: Sequence[str], settings: Mapping[str, Any]) -> None:
        self._names = tuple(names)
        self._settings = dict(settings)
        self.described = f"the signature of verl's reward functions; it is called by name: {', '.join(names)}"

    def arguments(self, rollouts: Sequence[RolloutState]) -> Arguments:
        (rollout,) = rollouts
        offered = (rollout.data_source, rollout.response_text, rollout.ground_truth, told(rollout))
        by_name = dict(zip(VERL_NAMES, offered, strict=True))
        return {name: by_name[name] for name in self._names} | self._settings

    def problems(self, function: Callable[..., Any]) -> Iterator[str]:
        names = (*self._names, *self._settings)
        shown = f"called as ({', '.join(f'{name}=...' for name in names)}), as verl does"
        yield from _bind_problems(function, dict.fromkeys(names), shown)


class Columns(Calling):
    per_group = True

    def __init__(self, function: Callable[..., Any], *, conversational: bool, label: str) -> None:
        parameters = parameters_of(function)
        takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        self._names = None if takes_all else frozenset(parameters)
        """What it may be given; None: anything."""
        self.hooks = tuple(name for name in TRL_HOOKS if name in parameters)
        self._conversational = conversational
        self._label = label

    def arguments(self, rollouts: Sequence[RolloutState]) -> Arguments:
        columns = self._columns(rollouts)
        return columns if self._names is None else {name: columns[name] for name in columns if name in self._names}

    def _columns(self, rollouts: Sequence[RolloutState]) -> dict[str, Any]:
        ids = [[int(i) for s in rollout.segments for i in unpack_ids(s.tokens.ids)] for rollout in rollouts]
        names = dict.fromkeys(name for rollout in rollouts for name in rollout.extra_info)
        columns: dict[str, Any] = {name: [rollout.extra_info.get(name) for rollout in rollouts] for name in names}
        return columns | {
            "data_source": [rollout.data_source for rollout in rollouts],
            self._label: [rollout.ground_truth for rollout in rollouts],
            "prompts": [self._prompt(rollout) for rollout in rollouts],
            "completions": [self._completion(rollout) for rollout in rollouts],
            "completion_ids": ids,
            "completions_ids": ids,  # as some versions spell it
        }

    def _prompt(self, rollout: RolloutState) -> Any:
        if self._conversational:
            return [dict(message) for message in rollout.messages]
        return "\n".join(str(message.get("content") or "") for message in rollout.messages)

    def _completion(self, rollout: RolloutState) -> Any:
        text = rollout.response_text
        return [{"role": "assistant", "content": text}] if self._conversational else text

    def problems(self, function: Callable[..., Any]) -> Iterator[str]:
        """Columns are known only with the rows: a function may ask for any."""
        for name, parameter in parameters_of(function).items():
            if name == "trainer_state" and parameter.default is inspect.Parameter.empty:
                yield "asks for trainer_state, which only TRL's trainer has"
            elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                yield f"has the parameter {name!r} by position only; TRL calls by name"


class Merging:
    """How a merge function is called: (verdicts), or (verdicts, weights)."""

    def __init__(self, *, weighted: bool) -> None:
        self._weighted = weighted

    def problems(self, function: Callable[..., Any]) -> Iterator[str]:
        if self._weighted:
            yield from _bind_problems(function, [{}, {}], "called as (verdicts, weights), because weights are given")
        else:
            yield from _bind_problems(function, [{}], "called as (verdicts), because no weights are given")


def told(rollout: RolloutState) -> dict[str, Any]:
    """The row's extra information; of a rollout with several turns also who said what."""
    extra_info = dict(rollout.extra_info)
    if len(rollout.turns) > 1:
        extra_info.setdefault("turns", _said(rollout))
    return extra_info


def _said(rollout: RolloutState) -> list[dict[str, Any]]:
    """Turn by turn: what the model wrote and what tools said, apart."""
    roles = {"generate": "assistant", "message": "other"}
    return [
        {"role": roles.get(turn.kind, turn.kind), "name": turn.name, "content": turn.text, "outcome": turn.outcome}
        for turn in rollout.turns
        if turn.text
    ]


def verl_calling(function: Callable[..., Any], settings: Mapping[str, Any]) -> ByName | None:
    """For a function with verl's parameters, whose order is not ours: its first may be the data source, and its third
    a setting. None when it has not."""
    parameters = parameters_of(function)
    if "solution_str" not in parameters:
        return None
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return ByName(VERL_NAMES, settings)
    return ByName([name for name in VERL_NAMES if name in parameters], settings)


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function without a readable signature
        return {}


def _bind_problems(function: Callable[..., Any], arguments: Arguments, called: str) -> Iterator[str]:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # a function without a readable signature
    except TypeError as error:
        yield f"cannot be called: {error}"
        return
    try:
        if isinstance(arguments, dict):
            signature.bind(**arguments)
        else:
            signature.bind(*arguments)
    except TypeError as error:
        yield f"is {called}: {error}"
