"""VerlAgentLoop: an agent-loop class that was written for verl, run as it is on Penstock's engine.

What it asks of its `server_manager` is recorded here: each call goes on from the deepest recorded tokens that its
`prompt_ids` begin with, and what is new in them has mask 0. A call that goes on from nowhere else than an earlier place
begins another segment. What `run` returns decides which of the recorded tokens are trained: those that an output has,
with its mask. Ids that were not generated here are never trained, whatever an output says of them.

A rollout that is played again runs the class from its beginning; answers come from the record, its own tools run again.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.agent_loop.base import AgentLoop
from penstock.agent_loop.config import AgentLoopConfig
from penstock.agent_loop.judging import take_verdict
from penstock.agent_loop.rendering import equal_at_first
from penstock.agent_loop.transcript import Transcript
from penstock.agent_loop.verl_names import Settings, TokenOutput, Wrapped, stand_in
from penstock.agent_loop.verl_tools import verl_objects
from penstock.config import dotted_name, import_name
from penstock.errors import ConfigError, DataFailure
from penstock.rollout import (
    ROOT,
    WHOLE,
    FailureReason,
    FinishReason,
    IntArray,
    RolloutState,
    SampleParams,
    Unjudged,
    Verdict,
    unpack_ids,
)

logger = logging.getLogger(__name__)


class VerlAgentLoop(AgentLoop):
    """`path` is the class: `package.module.Name`."""

    sets_reward = True

    def __init__(
        self,
        *,
        path: str,
        loop_keys: Mapping[str, Any] | None = None,
        trainer_config: Mapping[str, Any] | None = None,
        tool_config_path: str | None = None,
        function_tool_path: str | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(**rest)
        self._class = load_class(path)
        self._keys = dict(loop_keys or {})
        self._settings = _settings(self.sample_params, self.context, trainer_config or {})
        self._tools = _ToolList(verl_objects(tool_config_path, function_tool_path))

    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        server = _Server(self.transcript(rollout), self.sample_params)
        outputs = await self._made(server).run(_sampling(self.sample_params), **_row(rollout))
        found = [_Output.of(output) for output in (outputs if isinstance(outputs, list) else [outputs])]
        if not found:
            raise DataFailure(f"{dotted_name(self._class)}.run returned no output")
        self._settle(server, rollout, found)
        return rollout

    async def judge_sample(self, rollout: RolloutState) -> None:
        if rollout.reward is not None:  # the loop's own
            return
        if self.judger is None:
            take_verdict(rollout, Unjudged("the last output has no reward_score, and the task has no judger"))
        await super().judge_sample(rollout)

    def _made(self, server: _Server) -> Any:
        offered = {
            "trainer_config": Wrapped(self._settings),
            "server_manager": server,
            "tokenizer": getattr(self.tokenizer, "inner", self.tokenizer),
            "processor": None,
            "dataset_cls": None,
            "data_config": Wrapped(self._settings.data),
            "hf_model_type": None,
            "tools": self._tools,
        }
        taken = _taken(self._class)
        ours = {name: value for name, value in offered.items() if taken is None or name in taken}
        return self._class(**ours, **self._keys)

    def _settle(self, server: _Server, rollout: RolloutState, outputs: Sequence[_Output]) -> None:
        """Train what the outputs have of what was generated here, and nothing else."""
        wanted = [np.zeros(len(segment.tokens), dtype=bool) for segment in rollout.segments]
        marked = [server.mark(output, wanted) for output in outputs]
        strange = sum(int((output.mask == 1).sum()) - trained for output, trained in zip(outputs, marked, strict=True))
        if not any(marked):
            raise DataFailure(f"no id that {dotted_name(self._class)}.run returned with mask 1 was generated here")
        if strange:
            logger.warning(
                "%s: %d ids with mask 1 were not generated here (written or tokenised anew); they are not trained",
                rollout.rollout_id, strange,
            )  # fmt: skip
        server.leave_out(wanted)
        last = outputs[-1]
        rollout.response_text = self.tokenizer.decode(last.response_ids[last.mask == 1].tolist())
        if last.reward_score is not None:
            rollout.reward = Verdict(last.reward_score, last.parts)


class VerlAgentLoopConfig(AgentLoopConfig):
    """An agent loop written for verl. `sample_params.max_tokens` is the budget after the prompt."""

    loop: type[AgentLoop] | str = VerlAgentLoop
    path: str
    """Of the class: `package.module.Name`."""
    loop_keys: dict[str, Any] = {}
    """Keyword arguments of its constructor, beside those that verl gives every loop."""
    trainer_config: dict[str, Any] = {}
    """Settings that it reads from verl's configuration, as a tree:
    `{"actor_rollout_ref": {"rollout": {"multi_turn": {"max_assistant_turns": 4}}}}`."""
    tool_config_path: str | None = None
    """A file of tools as verl has them: `tools: [{class_name, config, tool_schema}]`."""
    function_tool_path: str | None = None
    """A Python file of functions that verl's decorator made tools."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        try:
            load_class(self.path)
        except ConfigError as error:
            yield from (f"path: {problem}" for problem in error.problems)
        try:
            verl_objects(self.tool_config_path, self.function_tool_path)
        except ConfigError as error:
            yield from error.problems

    def loop_arguments(self) -> dict[str, Any]:
        names = ("path", "loop_keys", "trainer_config", "tool_config_path", "function_tool_path")
        return {name: getattr(self, name) for name in names} | self.arguments


class _Output(msgspec.Struct, frozen=True):
    """What `run` returned, checked."""

    prompt_ids: Any
    response_ids: Any
    mask: Any
    reward_score: float | None
    parts: dict[str, float]

    @staticmethod
    def of(output: Any) -> _Output:
        def get(name: str, default: Any = None) -> Any:
            return output.get(name, default) if isinstance(output, Mapping) else getattr(output, name, default)

        try:
            prompt, response = (np.asarray(get(name), dtype=np.int32) for name in ("prompt_ids", "response_ids"))
            mask = np.asarray(get("response_mask"), dtype=np.int32)
        except (TypeError, ValueError) as error:
            raise DataFailure(f"run returned an output whose ids or mask are no numbers: {error}") from error
        if mask.shape != response.shape or response.ndim != 1 or prompt.ndim != 1:
            raise DataFailure(f"run returned {len(response)} response_ids with {mask.size} of response_mask")
        score = get("reward_score")
        if score is not None and not math.isfinite(score):
            raise DataFailure(f"run returned reward_score {score}", reason=FailureReason.UNJUDGED)
        extra = get("extra_fields") or {}
        info = extra.get("reward_extra_info") if isinstance(extra, Mapping) else None
        parts = {
            str(name): float(value)
            for name, value in (info or {}).items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        return _Output(prompt, response, mask, None if score is None else float(score), parts)


class _Server:
    """The `server_manager` of a loop: one rollout's."""

    def __init__(self, transcript: Transcript, params: SampleParams) -> None:
        self._transcript = transcript
        self._params = params
        self._busy: set[int] = set()
        self._segments = 1
        """Segments of this playing."""

    async def generate(
        self, request_id: str = "", *, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], **_media: Any
    ) -> TokenOutput:
        """As verl's: the model goes on after `prompt_ids`."""
        asked = np.asarray(prompt_ids, dtype=np.int32)
        used = len(asked) - len(self._transcript.rollout.prompt.ids) // 4
        params = _params(self._params, sampling_params, used)
        if params is None:
            return TokenOutput(token_ids=[], log_probs=[], stop_reason="length")
        segment, written = self._attach(asked)
        self._busy.add(segment)
        try:
            if written < len(asked):
                await self._transcript.append(asked[written:].tobytes(), segment=segment)
            begin = self._transcript.record.position(segment)
            answer = await self._transcript.generate(params, segment=segment)
        finally:
            self._busy.discard(segment)
        tokens = self._transcript.rollout.segments[segment].tokens
        end = self._transcript.record.position(segment)
        return TokenOutput(
            token_ids=unpack_ids(tokens.ids)[begin:end].tolist(),
            log_probs=np.frombuffer(tokens.logprobs, dtype=np.float32)[begin:end].tolist(),
            stop_reason="completed" if answer.finish_reason is FinishReason.STOP else "length",
        )

    def _attach(self, asked: IntArray) -> tuple[int, int]:
        """The segment that goes on, begun if need be, and how many of the ids are written already."""
        best, written, whole = ROOT, equal_at_first(self._path(ROOT), asked), False
        for segment in range(self._segments):
            path = self._path(segment)
            same = equal_at_first(path, asked)
            goes_on = same == len(path) and segment not in self._busy
            if (same, goes_on) > (written, whole):
                best, written, whole = segment, same, goes_on
        return (best if whole else self._branch(best, written)), written

    def _branch(self, best: int, written: int) -> int:
        """After the first tokens of a path."""
        transcript = self._transcript
        if self._segments == 1 and not transcript.record.position(0) and 0 not in self._busy:
            transcript.begin(written)
            return 0
        segment, start = best, written
        while segment != ROOT:
            before = len(transcript.rollout.context_ids(segment)) // 4
            if written > before:
                start = written - before
                break
            segment = transcript.rollout.segments[segment].parent
        if segment == ROOT:
            start = WHOLE if written == len(transcript.rollout.prompt.ids) // 4 else written
        self._segments += 1
        return transcript.branch(segment, start)

    def _path(self, segment: int) -> IntArray:
        """All that was read and written up to where a segment is in this playing."""
        rollout = self._transcript.rollout
        if segment == ROOT or not rollout.segments:
            return unpack_ids(rollout.prompt.ids)
        own = rollout.segments[segment].tokens.ids[: 4 * self._transcript.record.position(segment)]
        return unpack_ids(rollout.context_ids(segment) + own)

    def mark(self, output: _Output, wanted: list[Any]) -> int:
        """Note the recorded tokens that an output trains. Returns how many there are."""
        rollout = self._transcript.rollout
        whole = np.concatenate([output.prompt_ids, output.response_ids])
        trained = np.concatenate([np.zeros(len(output.prompt_ids), dtype=bool), output.mask == 1])
        same = [equal_at_first(self._path(segment), whole) for segment in range(len(rollout.segments))]
        segment = int(np.argmax(same))
        end, generated = same[segment], 0
        while segment != ROOT:
            begin = len(rollout.context_ids(segment)) // 4
            if end > begin:
                here = trained[begin:end]
                wanted[segment][: end - begin] |= here
                own = np.frombuffer(rollout.segments[segment].tokens.mask, dtype=np.uint8)[: end - begin] == 1
                generated += int((here & own).sum())
            end = min(end, begin)
            segment = rollout.segments[segment].parent
        return generated

    def leave_out(self, wanted: list[Any]) -> None:
        for segment, mask in enumerate(wanted):
            edges = np.flatnonzero(np.diff(np.concatenate([[1], mask.astype(np.int8), [1]])))
            for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
                self._transcript.record.leave_out(segment, begin, end)


class _ToolList(list[Any]):
    """A list, and the box in which verl hands one over."""

    @property
    def tools(self) -> list[Any]:
        return self


def load_class(path: str) -> type:
    """Raises ConfigError when there is no class with an async `run` there."""
    stand_in()
    found = import_name(path)
    if not isinstance(found, type) or not inspect.iscoroutinefunction(getattr(found, "run", None)):
        raise ConfigError(f"{path} is no agent loop of verl's: a class with `async def run(sampling_params, **row)`")
    return found


def _taken(cls: type) -> set[str] | None:
    """The keyword arguments of a constructor; None: any."""
    parameters = inspect.signature(cls).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


def _settings(params: SampleParams, context: int, given: Mapping[str, Any]) -> Settings:
    """What loops read of verl's configuration, and what was given on top."""
    own = {
        "actor_rollout_ref": {
            "model": {"path": ""},
            "rollout": {
                "name": "penstock",
                "prompt_length": max(1, context - params.max_tokens) if context else 1_000_000_000,
                "response_length": params.max_tokens,
                "max_model_len": context or None,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k or -1,
                "calculate_log_probs": True,
                "multi_turn": {
                    "enable": True,
                    "max_user_turns": None,
                    "max_assistant_turns": None,
                    "max_parallel_calls": 1,
                    "max_tool_response_length": 256,
                    "tool_response_truncate_side": "middle",
                    "tool_config_path": None,
                    "function_tool_path": None,
                    "interaction_config_path": None,
                    "format": "hermes",
                },
            },
        },
        "data": {"apply_chat_template_kwargs": {}},
        "trainer": {},
        "algorithm": {},
    }
    return Settings(_merged(own, given))


def _merged(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    both = {**own, **given}
    for name in own.keys() & given.keys():
        if isinstance(own[name], Mapping) and isinstance(given[name], Mapping):
            both[name] = _merged(own[name], given[name])
    return both


def _sampling(params: SampleParams) -> dict[str, Any]:
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "repetition_penalty": 1.0,
        "logprobs": True,
    }


def _params(own: SampleParams, asked: Mapping[str, Any], used: int) -> SampleParams | None:
    """The task's sampling with what a call changes; None when nothing is left of the budget."""
    if asked.get("repetition_penalty", 1.0) != 1.0:
        raise DataFailure("repetition_penalty must be 1: the trainer computes logprobs of the model's distribution")
    wanted = asked.get("max_tokens", asked.get("max_new_tokens"))
    left = own.max_tokens - used
    if left <= 0:
        return None
    stop = asked.get("stop") or own.stop
    return msgspec.structs.replace(
        own,
        temperature=asked.get("temperature", own.temperature),
        top_p=asked.get("top_p", own.top_p),
        top_k=max(0, asked.get("top_k", own.top_k)),
        max_tokens=min(left, wanted) if wanted else left,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(asked.get("stop_token_ids") or own.stop_token_ids),
    )


def _row(rollout: RolloutState) -> dict[str, Any]:
    """The fields of a row, as verl's dataset gives them to `run`."""
    extra = dict(rollout.extra_info)
    return {
        "raw_prompt": [dict(message) for message in rollout.messages],
        "data_source": rollout.data_source,
        "reward_model": {"ground_truth": rollout.ground_truth},
        "extra_info": extra,
        "tools_kwargs": extra.get("tools_kwargs", {}),
        "index": extra.get("index", rollout.draw),
        "uid": rollout.group_id,
        "agent_name": "",
    }
