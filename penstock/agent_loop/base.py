"""AgentLoop: plays a group of prompts against the engine and has it judged.

A user writes one class with `generate_sample`; everything else is here. What a loop does is recorded call by call in
`rollout.turns`: when a pause interrupts it, the loop later runs again from its beginning, calls that are on record are
answered from it, and the interrupted one continues from its tokens. So a loop needs no code for partial rollouts.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pydantic

from penstock.config import Config, import_name
from penstock.errors import DataFailure, InfrastructureFailure, Interrupted, RolloutFailure, RunError
from penstock.ports import Completion, Description, Engine, GenerateRequest, Judger, Local, Placement, Tokenizer
from penstock.rollout import (
    Failure,
    FailureReason,
    FinishReason,
    Group,
    RolloutState,
    SampleParams,
    Status,
    Turn,
    Unjudged,
    Verdict,
    reset_rollout_response,
    unpack_ids,
)

GiB = 1 << 30


class Answer(msgspec.Struct, frozen=True):
    """What one `generate` call made: the new tokens as text, and why it ended."""

    text: str
    finish_reason: FinishReason


class AgentLoop:
    """Subclass it and write `generate_sample`. Retries, concurrency, deadlines and continuation come from here."""

    def __init__(
        self,
        *,
        engine: Engine,
        tokenizer: Tokenizer,
        judger: Judger | None,
        sample_params: SampleParams,
        run_seed: int = 0,
        request_timeout_s: float = 600.0,
        judge_timeout_s: float = 700.0,
        rollout_timeout_s: float = 800.0,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.judger = judger
        self.sample_params = sample_params
        self._run_seed = run_seed
        self._request_timeout_s = request_timeout_s
        self._judge_timeout_s = judge_timeout_s
        self._rollout_timeout_s = rollout_timeout_s
        self._next_turn: dict[str, int] = {}
        """Per rollout being played, which recorded turn answers the next call."""
        self._stages: dict[str, str] = {}
        self._requests: set[str] = set()

    request_prefix = ""
    """Before the ids of this loop's requests, where another loop shares the engine: evaluation beside training."""

    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        """Play one rollout: call `generate` and `call_tool` as often as needed. What users write."""
        raise TypeError(f"{type(self).__name__} must define generate_sample")

    async def judge_sample(self, rollout: RolloutState) -> None:
        """Set the reward, or fail the rollout as unjudged. May be overridden."""
        if self.judger is not None:
            self._take_verdict(rollout, await self.judger.judge(rollout))

    async def judge_group(self, group: Group) -> None:
        """Like `judge_sample`, for judgers whose scores depend on the siblings."""
        assert self.judger is not None
        for rollout, verdict in zip(group, await self.judger.judge_group(group), strict=True):
            self._take_verdict(rollout, verdict)

    async def generate_group(self, group: Group, *, enable_partial_rollout: bool) -> Group:
        """Every rollout comes back COMPLETED, ABORTED or FAILED; those already COMPLETED are left alone."""
        playing = [rollout for rollout in group if rollout.status is not Status.COMPLETED]
        for rollout in playing:
            if not enable_partial_rollout and rollout.finish_reason is None:
                reset_rollout_response(rollout)
        try:
            async with asyncio.TaskGroup() as players:
                for rollout in playing:
                    players.create_task(self._play(rollout), name=f"rollout {rollout.rollout_id}")
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if self._judges_groups:
            await self._judge_together(group)
        return group

    async def generate(self, rollout: RolloutState, *, params: SampleParams | None = None) -> Answer:
        """Let the model write: appends ids, logprobs, mask and versions to the rollout.

        Raises Interrupted when a pause comes, with the tokens so far kept on the rollout; RolloutFailure when the
        engine fails or does not answer in time.
        """
        index = self._next_turn[rollout.rollout_id]
        recorded = rollout.turns[index] if index < len(rollout.turns) else None
        if recorded is not None and recorded.finish_reason is not FinishReason.ABORT:
            self._next_turn[rollout.rollout_id] = index + 1
            return Answer(recorded.text, recorded.finish_reason or FinishReason.STOP)
        begun = recorded.num_tokens if recorded is not None else 0
        params = self._checked_params(params)
        completion = await self._ask_engine(rollout, params, begun)
        rollout.response = rollout.response.append(completion.ids, completion.logprobs, steps=completion.steps)
        num_tokens = begun + len(completion.ids) // 4
        text = ""
        if completion.finish_reason is not FinishReason.ABORT:
            ids = unpack_ids(rollout.response.ids)[-num_tokens:].tolist()
            text = _before_stop_string(self.tokenizer.decode(ids), params.stop)
        turn = Turn("generate", num_tokens, completion.finish_reason, text)
        rollout.turns = (*rollout.turns[:index], turn)
        if completion.finish_reason is FinishReason.ABORT:
            raise Interrupted(f"rollout {rollout.rollout_id} was interrupted after {len(rollout.response)} tokens")
        self._next_turn[rollout.rollout_id] = index + 1
        return Answer(text, completion.finish_reason)

    async def call_tool(self, rollout: RolloutState, tool: Callable[[], Awaitable[str]], *, timeout_s: float) -> str:
        """A tool's answer, recorded as text the model did not write: mask 0, no logprob.

        Raises DataFailure when the tool does not answer in time; what the tool raises passes.
        """
        index = self._next_turn[rollout.rollout_id]
        if index < len(rollout.turns):
            self._next_turn[rollout.rollout_id] = index + 1
            return rollout.turns[index].text
        self._stages[rollout.rollout_id] = "tool"
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                text = await tool()
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DataFailure(
                f"tool did not answer within {timeout_s:g} s", reason=FailureReason.TOOL_DEADLINE
            ) from None
        ids = self.tokenizer.encode(text)
        last_step = rollout.response.steps[-1][0] if rollout.response.steps else -1
        rollout.response = rollout.response.append(ids, trained=False, model_step=last_step)
        rollout.turns = (*rollout.turns, Turn("tool", len(ids), text=text))
        self._next_turn[rollout.rollout_id] = index + 1
        return text

    async def pause(self) -> None:
        """Abort this loop's own requests."""
        await self.engine.abort(sorted(self._requests))

    def stage(self, rollout_id: str) -> str:
        """What a rollout being played waits for: engine, tool, judger or the loop itself; empty when it is not."""
        return self._stages.get(rollout_id, "")

    async def close(self) -> None:
        pass

    # Inside.

    @property
    def _judges_groups(self) -> bool:
        return self.judger is not None and self.judger.relative

    async def _play(self, rollout: RolloutState) -> None:
        """The boundary where whatever happens to one rollout becomes its record."""
        self._next_turn[rollout.rollout_id] = 0
        self._stages[rollout.rollout_id] = "agent loop"
        try:
            if rollout.finish_reason is None:
                await self._bounded_playing(rollout)
                self._finish(rollout)
            if self._judges_groups:
                # Whole, but without a verdict until its siblings are whole too.
                rollout.status = Status.ABORTED
            else:
                await self._bounded_judging([rollout], lambda: self.judge_sample(rollout))
        except Interrupted:
            rollout.status = Status.ABORTED
        except RunError:
            # The run cannot go on; that is not this rollout's failure.
            raise
        except RolloutFailure as failure:
            rollout.fail(failure.as_failure())
        except Exception as error:
            message = f"{type(self).__name__} raised {type(error).__name__}: {error}"
            rollout.fail(Failure(reason=FailureReason.AGENT_LOOP_ERROR, message=message))
        finally:
            del self._next_turn[rollout.rollout_id], self._stages[rollout.rollout_id]

    async def _bounded_playing(self, rollout: RolloutState) -> None:
        deadline = asyncio.timeout(self._rollout_timeout_s)
        try:
            async with deadline:
                await self.generate_sample(rollout)
        except TimeoutError:
            if not deadline.expired():
                raise
            stage = self.stage(rollout.rollout_id)
            message = f"{rollout.rollout_id} was not played within {self._rollout_timeout_s:g} s; it was in: {stage}"
            raise InfrastructureFailure(message, reason=FailureReason.ROLLOUT_DEADLINE) from None

    async def _judge_together(self, group: Group) -> None:
        """When every answer is whole; also those judged before, because a score depends on the siblings."""
        if any(rollout.status is Status.FAILED or rollout.finish_reason is None for rollout in group):
            return
        try:
            await self._bounded_judging(group, lambda: self.judge_group(group))
        except RolloutFailure as failure:
            for rollout in group:
                rollout.fail(failure.as_failure())

    def _finish(self, rollout: RolloutState) -> None:
        last = rollout.turns[-1] if rollout.turns else None
        rollout.finish_reason = (last.finish_reason if last is not None else None) or FinishReason.STOP
        if not len(rollout.response):
            raise DataFailure(f"{type(self).__name__} made no token", reason=FailureReason.EMPTY_ANSWER)
        rollout.response_text = "".join(turn.text for turn in rollout.turns)

    async def _bounded_judging(self, rollouts: Group, judge: Callable[[], Awaitable[None]]) -> None:
        """COMPLETED only with a verdict: one that is cancelled here must not look judged."""
        for rollout in rollouts:
            self._stages[rollout.rollout_id] = "judger"
        deadline = asyncio.timeout(self._judge_timeout_s)
        try:
            async with deadline:
                await judge()
            for rollout in rollouts:
                self._require_score(rollout)
                if rollout.status is not Status.FAILED:
                    rollout.status = Status.COMPLETED
        except (RunError, RolloutFailure, Interrupted):
            raise
        except Exception as error:
            late = isinstance(error, TimeoutError) and deadline.expired()
            raised = f"judging raised {type(error).__name__}: {error}"
            reason = f"judging took longer than {self._judge_timeout_s:g} s" if late else raised
            for rollout in rollouts:
                self._take_verdict(rollout, Unjudged(reason))
        finally:
            if self._judges_groups:
                for rollout in rollouts:
                    self._stages.pop(rollout.rollout_id, None)

    def _require_score(self, rollout: RolloutState) -> None:
        """A completed rollout has a finite score when there is a judger, whoever judged it."""
        if rollout.status is Status.FAILED or (self.judger is None and rollout.reward is None):
            return
        if rollout.reward is None:
            self._take_verdict(rollout, Unjudged("judging set no reward"))
        else:
            self._take_verdict(rollout, rollout.reward)

    def _take_verdict(self, rollout: RolloutState, verdict: Verdict | Unjudged) -> None:
        if isinstance(verdict, Verdict) and np.isfinite(verdict.score):
            rollout.reward = verdict
            return
        unjudged = verdict if isinstance(verdict, Unjudged) else Unjudged(f"score is {verdict.score}")
        rollout.fail(Failure(reason=FailureReason.UNJUDGED, message=unjudged.reason, detail=unjudged.detail))

    async def _ask_engine(self, rollout: RolloutState, params: SampleParams, begun: int) -> Completion:
        total = len(rollout.response)
        split = 4 * (total - begun)
        request = GenerateRequest(
            request_id=self.request_prefix + rollout.rollout_id,
            prompt_ids=rollout.prompt.ids + rollout.response.ids[:split],
            response_ids=rollout.response.ids[split:],
            params=params,
            seed=rollout_seed(self._run_seed, rollout),
            first_uniform=total,
            group_id=self.request_prefix + rollout.group_id,
        )
        self._stages[rollout.rollout_id] = "engine"
        self._requests.add(request.request_id)
        try:
            async with asyncio.timeout(self._request_timeout_s):
                completion = await self.engine.generate(request)
        except TimeoutError:
            raise InfrastructureFailure(
                f"engine did not answer rollout {rollout.rollout_id} within {self._request_timeout_s:g} s",
                reason=FailureReason.ENGINE_DEADLINE,
            ) from None
        finally:
            self._requests.discard(request.request_id)
            self._stages[rollout.rollout_id] = "agent loop"
        check_completion(completion, rollout.rollout_id)
        return completion

    def _checked_params(self, params: SampleParams | None) -> SampleParams:
        """A loop may change budgets and stops, not the distribution: the trainer computes logprobs of one."""
        own = self.sample_params
        if params is None:
            return own
        if (params.temperature, params.top_p, params.top_k, params.min_p) != (
            *(own.temperature, own.top_p, own.top_k, own.min_p),
        ):
            raise DataFailure(
                f"generate was called with another distribution ({params}) than the task's sample_params ({own}); "
                "only max_tokens, min_tokens and stops may differ",
                reason=FailureReason.SAMPLING_PARAMS,
            )
        return params


def check_completion(completion: Completion, rollout_id: str) -> None:
    """Raises InfrastructureFailure when an engine's answer cannot be true; nothing of it is used then."""
    n = len(completion.ids) // 4
    versions = sum(count for _, count in completion.steps)
    if len(completion.ids) % 4 or len(completion.logprobs) != 4 * n or versions != n:
        problem = f"{n} ids, {len(completion.logprobs) // 4} logprobs, {versions} model steps"
    elif not np.isfinite(np.frombuffer(completion.logprobs, dtype=np.float32)).all():
        problem = "logprobs that are not finite"
    elif n == 0 and completion.finish_reason is not FinishReason.ABORT:
        problem = f"no token and finish reason {completion.finish_reason}"
    else:
        return
    raise InfrastructureFailure(
        f"engine answered rollout {rollout_id} with {problem}", reason=FailureReason.ENGINE_NONSENSE
    )


def rollout_seed(run_seed: int, rollout: RolloutState) -> int:
    """A function of the run's seed, the rollout's id and how often it was started; siblings never share one."""
    text = f"{run_seed}/{rollout.rollout_id}/{rollout.num_tries}/{rollout.data_failures}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _before_stop_string(text: str, stop: tuple[str, ...]) -> str:
    found = [position for position in (text.find(s) for s in stop if s) if position >= 0]
    return text[: min(found)] if found else text


class AgentLoopConfig(Config):
    """Which loop plays a task, and with what sampling. `loop` is a class or its dotted path."""

    loop: type[AgentLoop] | str
    sample_params: SampleParams = SampleParams()
    arguments: dict[str, Any] = {}
    """Extra keyword arguments of the loop's constructor."""
    request_timeout_s: float = pydantic.Field(default=600.0, gt=0)
    judge_timeout_s: float = pydantic.Field(default=700.0, gt=0)
    """For all of judging one rollout or group, the judger's own queue and retries included."""
    rollout_timeout_s: float = pydantic.Field(default=800.0, gt=0)
    """For all of `generate_sample`. Below the manager's `stall_timeout_s`: a loop that hangs costs a rollout, not the
    run."""
    num_ray_actors: int = pydantic.Field(default=0, ge=0)
    """0 plays in this process, 1 in an actor, n behind a router."""
    num_cpus_per_actor: float = pydantic.Field(default=1.0, gt=0)
    cpu_memory_per_actor: int = pydantic.Field(default=GiB, gt=0)

    def build(
        self,
        *,
        engine: Engine,
        tokenizer: Tokenizer,
        judger: Judger | None,
        run_seed: int = 0,
        placement: Placement | None = None,
    ) -> AgentLoop:
        loop = import_name(self.loop) if isinstance(self.loop, str) else self.loop
        description = Description(
            name=f"agent loop {loop.__name__}",
            build=loop,
            arguments={
                "sample_params": self.sample_params,
                "run_seed": run_seed,
                "request_timeout_s": self.request_timeout_s,
                "judge_timeout_s": self.judge_timeout_s,
                "rollout_timeout_s": self.rollout_timeout_s,
                **self.arguments,
            },
            ports=("engine", "tokenizer", "judger"),
            num_actors=self.num_ray_actors,
            num_cpus=self.num_cpus_per_actor,
            memory=self.cpu_memory_per_actor,
        )
        ports = {"engine": engine, "tokenizer": tokenizer, "judger": judger}
        placed: AgentLoop = (placement or Local()).place(description, ports)
        return placed
