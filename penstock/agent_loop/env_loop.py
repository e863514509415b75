"""EnvAgentLoop: the model and an environment take turns until the environment says that it is over.

What the environment said to each answer is on record with its reward, so a rollout that is played again asks it only
for what is new, and its score survives a crash. The score is the sum of the rewards, unless the task has a judger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import pydantic

from penstock.agent_loop.base import AgentLoop
from penstock.agent_loop.config import AgentLoopConfig
from penstock.agent_loop.env import EnvLimits, Envs, Playing, Step
from penstock.agent_loop.rendering import (
    TemplateProblem,
    equal_at_first,
    ids_after,
    render_conversation,
    template_problems,
)
from penstock.agent_loop.transcript import Calling, ToolAnswer, Transcript
from penstock.errors import ConfigError
from penstock.judger.handler import Handler
from penstock.ports import Tokenizer
from penstock.rollout import FinishReason, RolloutState, SampleParams, Verdict, pack_ids, unpack_ids

RESET, STEP = "reset", "step"
KNOWN_ENVS = {"reasoning_gym": "penstock.agent_loop.gym_env.ReasoningGymEnv"}


class EnvAgentLoop(AgentLoop):
    """Ends when the environment is done, at the turn cap, or when the token budget is used up."""

    sets_reward = True

    def __init__(
        self,
        *,
        env: Handler,
        env_arguments: Mapping[str, Any] | None = None,
        limits: EnvLimits = EnvLimits(),  # noqa: B008 - frozen
        max_turns: int = 16,
        max_tokens_per_turn: int | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(**rest)
        self.envs = Envs(env, env_arguments or {}, limits)
        self._max_turns = max_turns
        self._max_tokens_per_turn = max_tokens_per_turn

    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        playing = self.envs.begin(rollout)
        try:
            await self._play_with(playing, self.transcript(rollout))
        finally:
            await playing.forget()
        return rollout

    async def judge_sample(self, rollout: RolloutState) -> None:
        if self.judger is not None:
            await super().judge_sample(rollout)
            return
        steps = [Step.of_text(turn.text) for turn in rollout.turns if turn.name == STEP]
        rollout.reward = Verdict(sum(step.reward for step in steps), {"steps": float(len(steps))})

    async def close(self) -> None:
        await super().close()
        await self.envs.close()

    async def _play_with(self, playing: Playing, transcript: Transcript) -> None:
        history = await self._begin(playing, transcript)
        answers: list[str] = []
        steps: list[Step] = []
        begun = transcript.record.position(0)
        for turn in range(1, self._max_turns + 1):
            answer = await transcript.generate(self._params(transcript.record.position(0) - begun))
            answers.append(answer.text)
            # Also of an answer that was cut: what it is worth only the environment knows.
            step = await self._ask(transcript, STEP, lambda: playing.step(answers, steps))
            if step.done or turn == self._max_turns:
                return
            if answer.finish_reason is not FinishReason.STOP:
                transcript.rollout.finish_reason = answer.finish_reason
                return
            history.append({"role": "assistant", "content": answer.text})
            tools, last_id = transcript.rollout.prompt.tools, transcript.record.last_id(0)
            ids = ids_after(self.tokenizer, history, step.messages, tools, last_id=last_id)
            if transcript.record.position(0) - begun + len(ids) >= self.sample_params.max_tokens:
                transcript.rollout.finish_reason = FinishReason.LENGTH
                return
            await transcript.append(ids)
            history += step.messages
            steps.append(step)

    async def _begin(self, playing: Playing, transcript: Transcript) -> list[dict[str, Any]]:
        """The messages with which the environment begins; they are written where they differ from the row's prompt."""
        first = await self._ask(transcript, RESET, playing.reset)
        prompt = transcript.rollout.prompt
        if first.own_prompt or list(first.messages) == list(prompt.messages):
            return [*prompt.messages]
        ids = render_conversation(self.tokenizer, first.messages, prompt.tools)
        same = equal_at_first(unpack_ids(prompt.ids), np.asarray(ids, dtype=np.int32))
        transcript.begin(same)
        await transcript.append(pack_ids(ids[same:]))
        return [*first.messages]

    async def _ask(self, transcript: Transcript, name: str, ask: Callable[[], Any]) -> Step:
        async def call() -> ToolAnswer:
            step: Step = await ask()
            return ToolAnswer(step.as_text())

        [said] = await transcript.call_tools([Calling(name, call)], at_once=1)
        return Step.of_text(said.text)

    def _params(self, used: int) -> SampleParams:
        left = self.sample_params.max_tokens - used
        return msgspec.structs.replace(self.sample_params, max_tokens=min(left, self._max_tokens_per_turn or left))


class EnvAgentLoopConfig(AgentLoopConfig):
    """Several turns with an environment. `sample_params.max_tokens` is the budget of the whole conversation after its
    beginning: of all answers, and of all that the environment says."""

    loop: type[AgentLoop] | str = EnvAgentLoop
    env: Callable[..., Any] | str
    """A class with `reset` and `step`, its name (`package.module.name`, `file.py:name`), or `reasoning_gym`."""
    env_arguments: dict[str, Any] = {}
    """Keyword arguments of the class."""
    max_turns: int = pydantic.Field(default=16, ge=1)
    """Answers of the model."""
    max_tokens_per_turn: int | None = pydantic.Field(default=None, ge=1)
    """Of one answer. None: what is left of the rollout's budget."""
    env_timeout_s: float = pydantic.Field(default=60.0, gt=0, allow_inf_nan=False)
    """Of one reset or step, from when it begins."""
    num_env_workers: int = pydantic.Field(default=2, ge=1, le=1000)
    """Processes in which environments that are not async are played."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        try:
            Envs(self._env, self.env_arguments, self._limits())
        except ConfigError as error:
            yield from (f"env: {problem}" for problem in error.problems)

    def template_problems(self, tokenizer: Tokenizer) -> list[TemplateProblem]:
        return template_problems(tokenizer, ("user",))

    def loop_arguments(self) -> dict[str, Any]:
        return {
            "env": self._env,
            "env_arguments": self.env_arguments,
            "limits": self._limits(),
            "max_turns": self.max_turns,
            "max_tokens_per_turn": self.max_tokens_per_turn,
            **self.arguments,
        }

    @property
    def _env(self) -> Handler:
        return KNOWN_ENVS.get(self.env, self.env) if isinstance(self.env, str) else self.env

    def _limits(self) -> EnvLimits:
        return EnvLimits(timeout_s=self.env_timeout_s, num_workers=self.num_env_workers)
