"""AgentLoop: plays a group of prompts against the engine and has it judged.

A user writes one class with `generate_sample`; everything else is here. What a loop does is recorded call by call in
the rollout's `Transcript`: when a pause interrupts it, the loop later runs again from its beginning, calls that are on
record are answered from it, and the interrupted one continues from its tokens. So a loop needs no code for partial
rollouts.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable

from penstock.agent_loop.asking import Asked
from penstock.agent_loop.deadline import Clock, Plays
from penstock.agent_loop.judging import fail_unjudged, judge_within, take_verdict
from penstock.agent_loop.stops import resolve_stops
from penstock.agent_loop.transcript import REFUSAL_S, Answer, Transcript
from penstock.errors import DataFailure, InfrastructureFailure, Interrupted, RolloutFailure, RunError
from penstock.ports import Engine, Judger, OnPause, Tokenizer, TurnLog
from penstock.rollout import (
    Failure,
    FailureReason,
    FinishReason,
    Group,
    RolloutState,
    SampleParams,
    Status,
    reset_rollout_response,
)

logger = logging.getLogger(__name__)


class AgentLoop:
    """Subclass it and write `generate_sample`. Retries, concurrency, deadlines and continuation come from here."""

    durable_turns = True
    """Whether finished turns are kept while the rollout is still played, so that a crash costs the unfinished one.

    Only in a task with partial rollout: in another an interrupted rollout starts again.
    """
    sets_reward = False
    """Whether it may set the reward itself, so that a task needs no judger."""
    replayable = True
    """Whether a rollout can be cut off at any call and played again from its record later.

    That of an agent outside cannot: its requests are kept over a pause, the manager leaves it at work, and its record
    is kept in any task.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        tokenizer: Tokenizer,
        judger: Judger | None,
        sample_params: SampleParams,
        run_seed: int = 0,
        judge_timeout_s: float = 700.0,
        rollout_timeout_s: float = 800.0,
        namespace: str = "",
        on_pause: OnPause = "abort",
        turn_log: TurnLog | None = None,
        context: int = 0,
    ) -> None:
        """`namespace` tells this loop's requests from another's on the same engine: evaluation beside training.

        `context` is the model's limit for a conversation with its answer; 0 where it is not known.
        """
        self.engine = engine
        self.tokenizer = tokenizer
        self.judger = judger
        self.sample_params = resolve_stops(sample_params, tokenizer)
        self.context = context
        self.num_abandoned = 0
        """Rollouts whose code did not end when it was told to."""
        self._asked = Asked(
            engine=engine,
            tokenizer=tokenizer,
            sample_params=self.sample_params,
            run_seed=run_seed,
            namespace=namespace,
            on_pause=on_pause,
            turn_log=turn_log if self.durable_turns else None,
        )
        self._judge_timeout_s = judge_timeout_s
        self._rollout_timeout_s = rollout_timeout_s
        self._transcripts: dict[str, Transcript] = {}
        self._abandoned: set[asyncio.Task[None]] = set()

    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        """Play one rollout: call `generate`, `say` and `call_tool` as often as needed. What users write."""
        raise TypeError(f"{type(self).__name__} must define generate_sample")

    async def judge_sample(self, rollout: RolloutState) -> None:
        """Set the reward, or fail the rollout as unjudged. May be overridden."""
        if self.judger is not None:
            take_verdict(rollout, await self.judger.judge(rollout))

    async def judge_group(self, group: Group) -> None:
        """Like `judge_sample`, for judgers whose scores depend on the siblings."""
        assert self.judger is not None
        for rollout, verdict in zip(group, await self.judger.judge_group(group), strict=True):
            take_verdict(rollout, verdict)

    async def generate_group(self, group: Group, *, enable_partial_rollout: bool) -> Group:
        """Every rollout comes back COMPLETED, ABORTED or FAILED; those already COMPLETED are left alone.

        One whose code does not end at its deadline comes back as a copy, out of that code's reach.
        """
        playing = [rollout for rollout in group if rollout.status is not Status.COMPLETED]
        for rollout in playing:
            if not enable_partial_rollout and rollout.finish_reason is None:
                reset_rollout_response(rollout)
        transcripts = [Transcript(rollout, self._asked) for rollout in playing]
        plays = Plays(self._leave_behind)
        for transcript in transcripts:
            rollout_id = transcript.rollout.rollout_id
            self._transcripts[rollout_id] = transcript
            plays.start(self._play(transcript), transcript.clock, name=f"rollout {rollout_id}")
        try:
            await plays.wait()
            group = self._without_abandoned(group, transcripts)
            if self._judges_groups:
                group = await self._judge_together(group, transcripts)
        finally:
            for transcript in transcripts:
                transcript.doing = ""
                self._transcripts.pop(transcript.rollout.rollout_id, None)
        return group

    async def generate(
        self, rollout: RolloutState, *, params: SampleParams | None = None, segment: int | None = None
    ) -> Answer:
        """Let the model write: appends ids, logprobs, mask and versions to the rollout.

        Raises Interrupted when a pause comes, with the tokens so far kept on the rollout; RolloutFailure when the
        engine fails.
        """
        return await (await self._played(rollout)).generate(params, segment=segment)

    async def call_tool(
        self,
        rollout: RolloutState,
        tool: Callable[[], Awaitable[str]],
        *,
        timeout_s: float,
        name: str = "",
        segment: int | None = None,
    ) -> str:
        """A tool's answer, recorded as text the model did not write: mask 0, no logprob.

        Raises DataFailure when the tool does not answer in time; what the tool raises passes.
        """
        transcript = await self._played(rollout)
        return await transcript.call_tool(tool, timeout_s=timeout_s, name=name, segment=segment)

    async def say(self, rollout: RolloutState, text: str, *, role: str = "user", segment: int | None = None) -> None:
        """The user says this now, after the model's answer: as the chat template writes it; mask 0, no logprob.

        Raises DataFailure when the template cannot go on so, ValueError when the model has not answered yet.
        """
        await (await self._played(rollout)).say(text, role=role, segment=segment)

    def transcript(self, rollout: RolloutState) -> Transcript:
        """The record of a rollout that is being played. Raises Interrupted when it is not, or not any more."""
        transcript = self._transcripts.get(rollout.rollout_id)
        if transcript is None or transcript.rollout is not rollout:
            raise Interrupted(f"rollout {rollout.rollout_id} is not being played")
        return transcript

    async def pause(self) -> None:
        """Abort this loop's own requests."""
        await self.engine.abort(sorted(name for t in self._transcripts.values() for name in t.requests))

    async def stages(self) -> dict[str, str]:
        """What each rollout being played waits for: engine, tool, judger, its siblings or the loop itself."""
        return {rollout_id: transcript.stage for rollout_id, transcript in self._transcripts.items()}

    async def close(self) -> None:
        """End what was left behind, if it listens now."""
        for task in self._abandoned:
            task.cancel()

    # Inside.

    async def _played(self, rollout: RolloutState) -> Transcript:
        """As `transcript`, which a loop that was left behind may ask for again and again."""
        try:
            return self.transcript(rollout)
        except Interrupted:
            await asyncio.sleep(REFUSAL_S)
            raise

    @property
    def _judges_groups(self) -> bool:
        return self.judger is not None and self.judger.relative

    async def _play(self, transcript: Transcript) -> None:
        """The boundary where whatever happens to one rollout becomes its record."""
        rollout = transcript.rollout
        try:
            if rollout.finish_reason is None:
                await self._generate_within(transcript)
            if self._judges_groups:
                # Whole, but without a verdict until its siblings are whole too.
                rollout.status = Status.ABORTED
            else:
                transcript.doing = "judger"
                await judge_within(
                    [rollout],
                    lambda: self.judge_sample(rollout),
                    transcript.clock,
                    self._judge_timeout_s,
                    needs_score=self.judger is not None,
                )
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
            transcript.doing = "siblings"

    async def _generate_within(self, transcript: Transcript) -> None:
        """Have the user's code play, while the clock runs; then the answer is whole."""
        clock, rollout = transcript.clock, transcript.rollout
        clock.start(self._rollout_timeout_s)
        try:
            await self.generate_sample(rollout)
        except BaseException as error:
            # What the code makes of its cancellation or its interruption, the clock or the pause was first.
            own = not isinstance(error, Exception) or isinstance(error, RolloutFailure | RunError)
            if not clock.expired and (own or not transcript.interrupted):
                raise
        finally:
            clock.stop()
        if clock.expired:
            raise self._too_late(transcript)
        if transcript.interrupted:
            raise Interrupted(f"rollout {rollout.rollout_id} was interrupted")
        if not rollout.num_tokens:
            # Before the finish reason: with one, it would be taken for an answer that only lacks its verdict.
            raise DataFailure(f"{type(self).__name__} made no token", reason=FailureReason.EMPTY_ANSWER)
        if rollout.finish_reason is None:  # unless the loop knows better
            last = rollout.turns[-1] if rollout.turns else None
            rollout.finish_reason = (last.finish_reason if last is not None else None) or FinishReason.STOP
        if not rollout.response_text:
            rollout.response_text = "".join([turn.text for turn in rollout.turns if turn.kind == "generate"])

    def _too_late(self, transcript: Transcript) -> InfrastructureFailure:
        clock = transcript.clock
        return InfrastructureFailure(
            f"{transcript.rollout.rollout_id} was not played within {clock.seconds:g} s; it was in: {clock.expired_in}",
            reason=FailureReason.ROLLOUT_DEADLINE,
        )

    async def _judge_together(self, group: Group, transcripts: list[Transcript]) -> Group:
        """When every answer is whole; also those judged before, because a score depends on the siblings."""
        if any(rollout.status is Status.FAILED or rollout.finish_reason is None for rollout in group):
            return group
        for transcript in transcripts:
            transcript.doing = "judger"
        clock = Clock(lambda: "judger")
        plays = Plays(self._leave_behind)
        plays.start(self._judge(group, clock), clock, name=f"judging of {group[0].group_id}")
        await plays.wait()
        if clock.left_behind:
            group = [copy.copy(rollout) for rollout in group]
            fail_unjudged(group, f"judging did not end after {clock.seconds:g} s")
        return group

    async def _judge(self, group: Group, clock: Clock) -> None:
        try:
            await judge_within(group, lambda: self.judge_group(group), clock, self._judge_timeout_s, needs_score=True)
        except RolloutFailure as failure:
            for rollout in group:
                rollout.fail(failure.as_failure())

    def _without_abandoned(self, group: Group, transcripts: list[Transcript]) -> Group:
        """Copies in place of rollouts whose code still runs, failed."""
        left = {id(t.rollout): t for t in transcripts if t.clock.left_behind}
        if not left:
            return group
        copies = []
        for rollout in group:
            transcript = left.get(id(rollout))
            if transcript is not None:
                rollout = copy.copy(rollout)
                if transcript.clock.expired_in == "judger":
                    fail_unjudged([rollout], f"judging did not end after {transcript.clock.seconds:g} s")
                else:
                    rollout.fail(self._too_late(transcript).as_failure())
            copies.append(rollout)
        return copies

    def _leave_behind(self, task: asyncio.Task[None]) -> None:
        self.num_abandoned += 1
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)
        logger.warning(
            "%s does not end: %s swallows its cancellation (`except BaseException`, a bare except?) and is left "
            "behind; %d so far", task.get_name(), type(self).__name__, self.num_abandoned,
        )  # fmt: skip
