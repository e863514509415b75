"""One weight sync over a fleet: all engines at once, published when at least one confirms, the others fenced.

A confirmation is an engine's own: the model step it serves and the checksum it computed from the bytes it received.
What the source, or most of the others, do not agree with is no confirmation.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

from penstock.engine.health import Fleet, Member
from penstock.errors import PenstockError, WeightSyncError
from penstock.ports import KeptWeights, LoadedWeights, WeightSource
from penstock.weights.confirm import load_confirmed


async def publish(fleet: Fleet, source: WeightSource, model_step: int) -> LoadedWeights:
    """Returns what the confirming engines received. Raises WeightSyncError when none confirmed."""
    members = fleet.sync_began(model_step)
    try:
        received, failures = await _load_into(fleet, members, source, model_step)
        kept_old = [] if received else await _still_serving(fleet, members)
    except BaseException:
        broken = f"the sync of weights {model_step} was cancelled; it may have either"
        fleet.sync_ended(source, (), {member.name: broken for member in members}, ())
        raise
    fleet.sync_ended(source, received, failures, kept_old)
    if not received:
        story = "; ".join(f"{name}: {failure}" for name, failure in failures.items())
        raise WeightSyncError(f"weights {model_step}: no engine confirmed them. {story}")
    # The engines' own words, not the source's: the sender compares it with what it sent.
    checksums = set(received.values()) - {None}
    return LoadedWeights(model_step=model_step, checksum=next(iter(checksums), None))


async def _load_into(
    fleet: Fleet, members: list[Member], source: WeightSource, model_step: int
) -> tuple[dict[str, str | None], dict[str, str]]:
    """The checksum of each engine that confirmed; the others, and why."""
    timeout_s = fleet.config.load_timeout_s

    async def load(member: Member) -> LoadedWeights | str:
        try:
            async with asyncio.timeout(timeout_s):
                return await load_confirmed(member.engine, source, model_step)
        except TimeoutError:
            return f"did not load the weights within {timeout_s:g} s"
        except PenstockError as error:
            return str(error)

    outcomes = await asyncio.gather(*map(load, members))
    received: dict[str, str | None] = {}
    failures: dict[str, str] = {}
    expected = _expected(source, (outcome.checksum for outcome in outcomes if isinstance(outcome, LoadedWeights)))
    for member, outcome in zip(members, outcomes, strict=True):
        if isinstance(outcome, str):
            failures[member.name] = outcome
        elif outcome.checksum not in (None, expected):
            failures[member.name] = f"weights {model_step}: received {outcome.checksum}, not {expected}"
        else:
            received[member.name] = outcome.checksum
    return received, failures


def _expected(source: WeightSource, received: Iterable[str | None]) -> str | None:
    """The checksum of what was sent if the source knows it, else what most received.

    None is no disagreement: an engine in this process reads the weights where they are and sums up nothing.
    """
    if isinstance(source, KeptWeights):
        return source.checksum
    sums = Counter(checksum for checksum in received if checksum is not None)
    return sums.most_common(1)[0][0] if sums else None


async def _still_serving(fleet: Fleet, members: list[Member]) -> list[str]:
    """Nothing was published, so engines that kept the old weights may go on."""

    async def serves(member: Member) -> bool:
        try:
            async with asyncio.timeout(fleet.config.control_timeout_s):
                return await member.engine.model_step() == fleet.published
        except (TimeoutError, PenstockError):
            return False

    kept = await asyncio.gather(*map(serves, members))
    return [member.name for member, still in zip(members, kept, strict=True) if still]
