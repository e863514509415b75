"""Who belongs to a fleet: engines are supervised, may join while the others serve, and may leave.

add     a new engine starts, is given the published weights, and serves; or it is closed again
drain   it is given nothing more; its requests are aborted there and go on elsewhere, with the tokens they have;
        what it does not give back in time is taken away; then it is closed
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from penstock.engine.config import engine_name
from penstock.engine.health import Fleet, Member
from penstock.engine.lifecycle import IN_SERVICE, LEAVING, EngineState
from penstock.engine.recovery import supervise
from penstock.engine.routing import Router
from penstock.errors import InfrastructureFailure, PenstockError, RunError
from penstock.ports import Engine, EngineMember
from penstock.rollout import FailureReason

NewEngine = Callable[[str], Awaitable[Engine]]
"""Makes one more engine, of the given name. It may start with its first call."""
JOINED = frozenset({*IN_SERVICE, EngineState.AWAITING})
ABORT_AGAIN_S = 1.0
"""A request may reach a leaving engine after the abort did."""


class Membership:
    """Owns the engines of the fleet, and a supervisor for each."""

    def __init__(self, fleet: Fleet, router: Router, new_engine: NewEngine | None) -> None:
        self._fleet = fleet
        self._router = router
        self._new_engine = new_engine
        self._supervisors: dict[Member, asyncio.Task[None]] = {}
        self._started = False
        self._added = 0

    def start(self) -> None:
        """From the first call on, in the event loop of that call."""
        if not self._started:
            self._started = True
            self._fleet.start()
            for member in self._fleet.members:
                self._supervise(member)

    def members(self) -> list[EngineMember]:
        return [
            EngineMember(
                name=member.name,
                state=self._fleet.state(member).word,
                requests=len(self._router.seated(member)),
                failure=self._fleet.life.failure(member.name),
            )
            for member in self._fleet.members
        ]

    def named(self, name: str, what: str) -> Member:
        for member in self._fleet.members:
            if member.name == name:
                return member
        known = ", ".join(member.name for member in self._fleet.members)
        raise RunError(f"there is no engine {name!r} to {what}; the engines are {known}")

    async def add(self) -> str:
        """See `Engines.add_engine`. One that waits for a sync, because nobody kept the weights, has joined too."""
        if self._new_engine is None:
            raise RunError("no engine can be added: engines of this run are not processes of their own")
        name = self._free_name()
        member = self._fleet.join(name, await self._new_engine(name))
        self._supervise(member)
        timeout_s = self._fleet.config.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while not self._has_joined(member):
                    await self._fleet.changed.wait()
        except TimeoutError:
            if not self._has_joined(member):
                failure = self._fleet.life.failure(name) or "it did not start"
                message = f"engine {name} did not join within {timeout_s:g} s: {failure}"
                raise InfrastructureFailure(message, reason=FailureReason.ENGINE_START_DEADLINE) from None
        finally:
            if self._fleet.state(member) not in JOINED:
                await self._remove(member, "it could not join")
        return name

    async def drain(self, name: str) -> None:
        """See `Engines.drain_engine`."""
        member = self.named(name, "drain")
        if not self._fleet.life.may_leave(name):
            raise RunError(f"engine {name} cannot leave: no other engine serves; add one first")
        self._fleet.drain(member)
        try:
            async with asyncio.timeout(self._fleet.config.control_timeout_s):
                await self._hand_back(member)
        except (TimeoutError, PenstockError):
            pass  # what it still has is taken away from it
        finally:
            await self._remove(member, "drained")

    async def restart(self, name: str) -> None:
        """See `RolloutController.restart`."""
        member = self.named(name, "restart")
        self._fleet.fence(member, "a restart was asked for")
        config, life = self._fleet.config, self._fleet.life
        timeout_s = config.start_timeout_s + config.recovery_retry_s
        try:
            async with asyncio.timeout(timeout_s):
                while (state := self._fleet.state(member)) is not EngineState.ACTIVE:
                    if state in (EngineState.GONE, *LEAVING):
                        message = f"engine {name} was given up: {life.failure(name)}"
                        raise InfrastructureFailure(message, reason=FailureReason.ENGINE_GONE)
                    await self._fleet.changed.wait()
        except TimeoutError:
            message = f"engine {name} did not come back within {timeout_s:g} s: {life.failure(name)}"
            raise InfrastructureFailure(message, reason=FailureReason.ENGINE_START_DEADLINE) from None

    async def close(self) -> None:
        """An engine that does not close in time is its process's end to see to; the others are closed all the same."""
        supervisors, self._supervisors = self._supervisors, {}
        for supervisor in supervisors.values():
            supervisor.cancel()
        await asyncio.gather(*supervisors.values(), return_exceptions=True)
        await asyncio.gather(*map(self._close, self._fleet.members))

    async def _hand_back(self, member: Member) -> None:
        while seated := self._router.seated(member):
            member.emptied.clear()
            # A score has no name by which it could be aborted; it ends by itself.
            await member.engine.abort([ticket.request_id for ticket in seated if ticket.request_id])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABORT_AGAIN_S):
                    await member.emptied.wait()

    async def _remove(self, member: Member, reason: str) -> None:
        supervisor = self._supervisors.pop(member, None)
        if supervisor is None:  # the whole fleet was closed meanwhile
            return
        self._fleet.drain(member)
        supervisor.cancel()
        await asyncio.gather(supervisor, return_exceptions=True)
        self._fleet.leave(member, reason)
        await self._close(member)

    async def _close(self, member: Member) -> None:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(self._fleet.config.control_timeout_s):
                await member.engine.close()

    def _supervise(self, member: Member) -> None:
        self._supervisors[member] = asyncio.create_task(
            supervise(member, self._fleet), name=f"supervise engine {member.name}"
        )

    def _has_joined(self, member: Member) -> bool:
        state = self._fleet.state(member)
        if state in (EngineState.GONE, EngineState.CLOSED, *LEAVING):
            failure = self._fleet.life.failure(member.name)
            message = f"engine {member.name} cannot join: {failure}"
            raise InfrastructureFailure(message, reason=FailureReason.ENGINE_GONE)
        return state in JOINED

    def _free_name(self) -> str:
        """Never one that was used before: its story would be another's."""
        while self._fleet.life.knows(name := engine_name(self._added)):
            self._added += 1
        self._added += 1
        return name
