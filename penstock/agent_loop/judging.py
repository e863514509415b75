"""Judging: what becomes of an answer that is whole. COMPLETED only with a finite score; no score is ever made up."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable

from penstock.agent_loop.deadline import Clock
from penstock.errors import Interrupted, RolloutFailure, RunError
from penstock.played import JUDGED, with_span
from penstock.rollout import Failure, FailureReason, Group, RolloutState, Status, Unjudged, Verdict


def take_verdict(rollout: RolloutState, verdict: Verdict | Unjudged) -> None:
    """Set the reward, or fail the rollout as unjudged."""
    if isinstance(verdict, Verdict) and math.isfinite(verdict.score):
        rollout.reward = verdict
        return
    unjudged = verdict if isinstance(verdict, Unjudged) else Unjudged(f"score is {verdict.score}")
    rollout.fail(Failure(reason=FailureReason.UNJUDGED, message=unjudged.reason, detail=unjudged.detail))


async def judge_within(
    rollouts: Group, judge: Callable[[], Awaitable[None]], clock: Clock, timeout_s: float, *, needs_score: bool
) -> None:
    """Judge these by `judge`, whoever wrote it. One that is cancelled meanwhile must not look judged.

    Raises RunError, RolloutFailure and Interrupted as they come; anything else leaves the rollouts unjudged.
    """
    now = asyncio.get_running_loop().time
    began = now()
    clock.start(timeout_s)
    try:
        await judge()
    except (RunError, RolloutFailure, Interrupted):
        raise
    except Exception as error:
        if not clock.expired:
            fail_unjudged(rollouts, f"judging raised {type(error).__name__}: {error}")
            return
    except BaseException:
        # The clock's own cancellation; any other passes.
        if not clock.expired:
            raise
    finally:
        clock.stop()
    if clock.expired:
        fail_unjudged(rollouts, f"judging took longer than {timeout_s:g} s")
        return
    seconds = now() - began
    for rollout in rollouts:
        rollout.played = with_span(rollout.played, JUDGED, seconds)
        _require_score(rollout, needs_score)
        if rollout.status is not Status.FAILED:
            rollout.status = Status.COMPLETED


def fail_unjudged(rollouts: Iterable[RolloutState], reason: str) -> None:
    for rollout in rollouts:
        take_verdict(rollout, Unjudged(reason))


def _require_score(rollout: RolloutState, needs_score: bool) -> None:
    """A completed rollout has a finite score when there is a judger, whoever judged it."""
    if rollout.status is Status.FAILED or (rollout.reward is None and not needs_score):
        return
    take_verdict(rollout, rollout.reward or Unjudged("judging set no reward"))
