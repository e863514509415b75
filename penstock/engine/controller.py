"""RolloutController: the one door to the engines, behind the `Engine` port of one.

    generate ---> routing: the group's engine, or the least loaded ---> engine ---> answer checked ---> caller
                     ^                                                     |
                     +------- another engine, at most twice <-- failed, late, fenced, nonsense

A request waits in line until an engine has a place for it; its clock begins with the place and stands still while it is
frozen. Control calls (pause, continue, abort, sleep, wake) go to all engines in service at once, past every waiting
request; an engine that does not obey in time is fenced. How weights are published is in `publishing.py`, how engines
join and leave in `membership.py`: what a leaving engine hands back goes on elsewhere, and its caller sees one answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence

import msgspec

from penstock.engine.config import REQUEST_TRIES, RolloutControllerConfig
from penstock.engine.health import Fleet, Member, RequestClock, Standing
from penstock.engine.lifecycle import LEAVING, EngineState
from penstock.engine.membership import Membership, NewEngine
from penstock.engine.publishing import publish
from penstock.engine.requests import ABORTED, check_scores
from penstock.engine.routing import Router, Ticket
from penstock.errors import ConfigError, InfrastructureFailure, PenstockError, RunError, WeightSyncError
from penstock.events import Observer
from penstock.ports import (
    Completion,
    Engine,
    EngineMember,
    EngineStats,
    GenerateRequest,
    LoadedWeights,
    WeightSource,
    check_completion,
    joined,
)
from penstock.rollout import FailureReason, FinishReason

JUDGES_SHARE = 4
"""One place of so many is kept for judges, where judges ask the engines."""


class RolloutController:
    """Belongs to the event loop of its first call; the engines are supervised from then on."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        config: RolloutControllerConfig,
        *,
        standing: Standing,
        max_running: int,
        observer: Observer,
        new_engine: NewEngine | None = None,
    ) -> None:
        if not engines:
            raise ConfigError("RolloutController needs at least one engine")
        self._config = config
        self._fleet = Fleet(engines, config, standing, observer)
        places = config.max_requests_per_engine or max_running
        kept = config.judge_places if config.judge_places is not None else max(1, places // JUDGES_SHARE)
        self._router = Router(self._fleet, places, kept)
        self._fleet.on_change = self._router.assign
        self._membership = Membership(self._fleet, self._router, new_engine)
        self._live: Counter[str] = Counter()
        self._aborted: set[str] = set()
        """Ids of live requests that were aborted; they are not given to another engine."""
        self._syncing = asyncio.Lock()
        self._closed = False

    @property
    def engines(self) -> dict[str, Engine]:
        """By name, to be looked at; whoever wants an answer asks the controller."""
        return {member.name: member.engine for member in self._fleet.members}

    # Requests.

    async def generate(self, request: GenerateRequest) -> Completion:
        """Raises InfrastructureFailure when three engines failed, EngineUnavailable when none is there to ask."""
        made: list[Completion] = []
        with self._open(request) as ticket:
            while (member := await self._place(ticket)) is not None:
                asked = _go_on(request, made)
                try:
                    async with self._asking(member, ticket) as oldest:
                        async with self._router.clock(member, ticket):
                            completion = await member.engine.generate(asked)
                        check_completion(completion, asked)
                        await self._check_steps(completion, asked, member, oldest)
                    made.append(completion)
                    if not self._is_handed_back(completion, member, ticket):
                        return joined(made, waited_s=ticket.waited_s)
                except InfrastructureFailure as failure:
                    self._note_failed(ticket, member, failure)
                finally:
                    self._router.leave(member, ticket)
            return joined([*made, ABORTED], waited_s=ticket.waited_s)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
        """Goes on with another engine where one failed: what was handed out stays."""
        sent: list[Completion] = []
        with self._open(request) as ticket:
            while (member := await self._place(ticket)) is not None:
                handed_back = False
                try:
                    async with (
                        self._asking(member, ticket) as oldest,
                        contextlib.aclosing(self._pieces(member, ticket, _go_on(request, sent), oldest)) as pieces,
                    ):
                        async for piece in pieces:
                            handed_back = self._is_handed_back(piece, member, ticket)
                            if handed_back:
                                piece = msgspec.structs.replace(piece, finish_reason=None)
                            elif piece.finish_reason is not None:
                                piece = msgspec.structs.replace(piece, waited_s=ticket.waited_s)
                            sent.append(piece)
                            if piece.ids or not handed_back:
                                yield piece
                    if not handed_back:
                        return
                except InfrastructureFailure as failure:
                    self._note_failed(ticket, member, failure)
                finally:
                    self._router.leave(member, ticket)
            yield ABORTED

    async def _pieces(
        self, member: Member, ticket: Ticket, request: GenerateRequest, oldest: int
    ) -> AsyncGenerator[Completion, None]:
        """One engine's stream, each piece checked before it is handed on."""
        clock = self._router.clock(member, ticket)
        begun = False
        async with contextlib.aclosing(member.engine.stream(request)) as pieces:
            while True:
                async with clock:
                    piece = await anext(pieces, None)
                if piece is None:
                    raise InfrastructureFailure(
                        f"engine {member.name} ended {request.request_id} without a finish reason",
                        reason=FailureReason.ENGINE_NONSENSE,
                    )
                if piece.finish_reason is None or (begun and not piece.ids):
                    # What an abort would hand back: a piece that ends nothing, or nothing more after what came.
                    check_completion(msgspec.structs.replace(piece, finish_reason=FinishReason.ABORT), request)
                else:
                    check_completion(piece, request)
                begun = begun or bool(piece.ids)
                await self._check_steps(piece, request, member, oldest)
                yield piece
                if piece.finish_reason is not None:
                    return

    async def score(self, ids: bytes) -> bytes:
        """By any engine; like a request that a pause does not touch."""
        self._start()
        ticket = Ticket("", "", "serve")
        try:
            while True:
                member = await self._router.take_place(ticket)
                assert member is not None, "nobody aborts it"
                try:
                    async with self._asking(member, ticket):
                        async with self._router.clock(member, ticket):
                            scores = await member.engine.score(ids)
                        check_scores(scores, ids)
                        return scores
                except InfrastructureFailure as failure:
                    self._note_failed(ticket, member, failure)
                finally:
                    self._router.leave(member, ticket)
        finally:
            ticket.ended.set()

    @contextlib.contextmanager
    def _open(self, request: GenerateRequest) -> Iterator[Ticket]:
        self._start()
        self._live[request.request_id] += 1
        ticket = Ticket(request.request_id, request.group_id, request.on_pause, request.judging)
        try:
            yield ticket
        finally:
            ticket.ended.set()
            self._live[request.request_id] -= 1
            if not self._live[request.request_id]:
                del self._live[request.request_id]
                self._aborted.discard(request.request_id)

    async def _place(self, ticket: Ticket) -> Member | None:
        """None: it is aborted."""
        if self._is_aborted(ticket):
            return None
        now = asyncio.get_running_loop().time
        began = now()
        try:
            return await self._router.take_place(ticket)
        finally:
            ticket.waited_s += now() - began

    @contextlib.asynccontextmanager
    async def _asking(self, member: Member, ticket: Ticket) -> AsyncGenerator[int, None]:
        """Whatever goes wrong inside counts against the engine, as an InfrastructureFailure.

        Gives the place in the history of what was published when the request began.
        """
        life, name = self._fleet.life, member.name
        times_fenced = life.times_fenced(name)
        try:
            yield len(life.history) - 1
        except TimeoutError:
            if self._closed:
                raise _closed() from None
            if life.times_fenced(name) == times_fenced:
                failure = InfrastructureFailure(
                    f"engine {name} did not answer {ticket.request_id} within {self._config.request_timeout_s:g} s",
                    reason=FailureReason.ENGINE_DEADLINE,
                )
                self._fleet.request_failed(member, failure)
            else:
                failure = InfrastructureFailure(
                    f"engine {name} was fenced: {life.failure(name)}", reason=FailureReason.ENGINE_FENCED
                )
            raise failure from None
        except InfrastructureFailure as failed:
            self._fleet.request_failed(member, failed)
            raise
        life.request_answered(name)

    def _is_handed_back(self, completion: Completion, member: Member, ticket: Ticket) -> bool:
        """Whether it ends only because the engine leaves."""
        return (
            completion.finish_reason is FinishReason.ABORT
            and self._fleet.state(member) in LEAVING
            and not self._is_aborted(ticket)
        )

    def _is_aborted(self, ticket: Ticket) -> bool:
        return (self._fleet.paused and ticket.on_pause == "abort") or ticket.request_id in self._aborted

    def _note_failed(self, ticket: Ticket, member: Member, failure: InfrastructureFailure) -> None:
        """Another engine is asked, or the failure is the answer."""
        ticket.avoid.append(member.name)
        if self._closed or len(ticket.avoid) >= REQUEST_TRIES:
            raise failure

    async def _check_steps(self, completion: Completion, request: GenerateRequest, member: Member, oldest: int) -> None:
        """`oldest` is the place in the history of what was published when the request began."""
        life = self._fleet.life
        steps = {step for step, _ in completion.steps}
        if life.loading_step in steps:
            # Made by weights that this engine has and the sync may still lose.
            await self._fleet.load_ended.wait()
        wrong = sorted(steps.difference(life.history[oldest:]))
        if wrong:
            failure = f"answered {request.request_id} with model step {wrong[0]}; published is {life.published}"
            self._fleet.fence(member, failure)
            raise InfrastructureFailure(f"engine {member.name} {failure}", reason=FailureReason.ENGINE_NONSENSE)

    # Control.

    async def pause_generation(self) -> None:
        self._start()
        self._fleet.paused = True
        self._router.abort(lambda ticket: ticket.on_pause == "abort")
        for clock in self._kept_clocks():
            clock.stop()
        await self._tell_all("pause", lambda engine: engine.pause_generation())
        self._router.assign()

    async def continue_generation(self) -> None:
        self._start()
        # First, so that an engine that comes back meanwhile is not left paused.
        self._fleet.paused = self._fleet.asleep = False
        await self._tell_all("continue", lambda engine: engine.continue_generation())
        for clock in self._kept_clocks():
            clock.start()
        self._router.assign()

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._start()
        self._aborted.update(name for name in request_ids if self._live[name])
        ids = frozenset(request_ids)
        self._router.abort(lambda ticket: ticket.request_id in ids)
        await self._tell_all("abort", lambda engine: engine.abort(request_ids))

    async def sleep(self) -> None:
        """Kept and served requests that are here finish first, each within its own deadline."""
        self._start()
        if not self._fleet.paused:
            raise RunError("the engines cannot sleep: they are not paused; pause them first")
        try:
            await self._finish_what_is_here()
            self._fleet.asleep = True
            await self._tell_all("sleep", lambda engine: engine.sleep())
        except BaseException:
            self._fleet.asleep = False
            raise

    async def _finish_what_is_here(self) -> None:
        """The engines go on for it, while the door is closed to what comes."""
        last = [ticket for ticket in self._router.everyone if ticket.on_pause != "abort"]
        if not last:
            return
        self._router.last, self._fleet.draining = frozenset(last), True
        try:
            await self._tell_all("continue", lambda engine: engine.continue_generation())
            for clock in self._kept_clocks():
                clock.start()
            self._router.assign()
            for ticket in last:
                await ticket.ended.wait()
            # While the door is closed still: one that comes now would be given to an engine that falls asleep.
            self._fleet.asleep = True
        finally:
            self._router.last, self._fleet.draining = frozenset(), False
            for clock in self._kept_clocks():
                clock.stop()
            await self._tell_all("pause", lambda engine: engine.pause_generation())

    async def wake(self) -> None:
        self._start()
        self._fleet.asleep = False
        await self._tell_all("wake", lambda engine: engine.wake())
        self._router.assign()

    def _kept_clocks(self) -> list[RequestClock]:
        """Not those of fenced engines, which have rung."""
        return [clock for member in self._fleet.obedient for clock in member.clocks if clock.on_pause == "keep"]

    async def _tell_all(self, what: str, call: Callable[[Engine], Awaitable[None]]) -> None:
        """All engines at once. One that fails or is late is fenced; what it refuses, it refuses for all."""
        limit = self._config.control_timeout_s

        async def tell(member: Member) -> None:
            try:
                async with asyncio.timeout(limit):
                    await call(member.engine)
            except TimeoutError:
                self._fleet.fence(member, f"did not {what} within {limit:g} s")
            except InfrastructureFailure as failure:
                self._fleet.fence(member, f"did not {what}: {failure}")

        outcomes = await asyncio.gather(*map(tell, self._fleet.obedient), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    # Weights.

    async def load_weights(self, source: WeightSource, model_step: int) -> LoadedWeights:
        """All engines at once. Those that do not confirm are fenced. Returns what the others say they received.

        Raises WeightSyncError when none confirms; `model_step()` is then what it was.
        """
        self._start()
        async with self._syncing:
            await self._until_one_can_load()
            try:
                return await publish(self._fleet, source, model_step)
            except WeightSyncError:
                if self._fleet.in_service:
                    raise
                # All of them died; whichever comes back is given these weights.
                await self._until_one_can_load()
                return await publish(self._fleet, source, model_step)

    async def model_step(self) -> int:
        """What was published: engines with other weights serve nothing."""
        return self._fleet.published

    # State.

    async def check_health(self) -> None:
        """Returns if an active engine says that it is well. Waits for the first to start."""
        self._start()
        fleet = self._fleet
        if not fleet.in_service and any(fleet.life.failure(member.name) for member in fleet.members):
            raise InfrastructureFailure(f"no engine is active: {fleet.describe()}", reason=FailureReason.NO_ENGINE)
        try:
            await self._until(lambda: bool(fleet.in_service))
        except PenstockError as error:
            raise InfrastructureFailure(str(error), reason=FailureReason.NO_ENGINE) from error
        if not any(await asyncio.gather(*map(self._is_well, fleet.in_service))):
            raise InfrastructureFailure(f"no engine is well: {fleet.describe()}", reason=FailureReason.NO_ENGINE)

    async def _is_well(self, member: Member) -> bool:
        try:
            async with asyncio.timeout(self._config.probe_timeout_s):
                await member.engine.check_health()
        except (TimeoutError, PenstockError):
            member.attention.set()
            return False
        return True

    async def stats(self) -> EngineStats:
        """Of all engines together. An engine that does not answer in time counts as it was last seen."""
        self._start()
        members, in_service = list(self._fleet.members), self._fleet.in_service
        for member, stats in zip(members, await asyncio.gather(*map(self._stats_of, members)), strict=True):
            member.stats = stats
        shares = [member.stats.cache_use for member in in_service]
        return EngineStats(
            engines=len(in_service),
            running=sum(member.stats.running for member in members),
            waiting=sum(member.stats.waiting for member in members) + self._router.waiting,
            generated_tokens=self._fleet.tokens_of_left
            + sum(member.tokens_before + member.stats.generated_tokens for member in members),
            busy_seconds=self._fleet.busy_of_left
            + sum(member.busy_before + member.stats.busy_seconds for member in members),
            cache_use=sum(shares) / len(shares) if shares else 0.0,
        )

    async def _stats_of(self, member: Member) -> EngineStats:
        if member in self._fleet.in_service:
            try:
                async with asyncio.timeout(self._config.control_timeout_s):
                    return await member.engine.stats()
            except (TimeoutError, PenstockError):
                pass
        return member.stats

    async def restart(self, name: str) -> None:
        """Restart one engine; returns when it is active with the current weights. One that is restarting is waited for.

        Raises InfrastructureFailure when it is not within the deadline, or was given up.
        """
        self._start()
        await self._membership.restart(name)

    # Who belongs to the fleet.

    async def members(self) -> list[EngineMember]:
        self._start()
        return self._membership.members()

    async def add_engine(self) -> str:
        self._start()
        return await self._membership.add()

    async def drain_engine(self, name: str) -> None:
        self._start()
        # Not in the middle of a sync, which counts on those that take part.
        async with self._syncing:
            await self._membership.drain(name)

    async def close(self) -> None:
        """End the supervision and close every engine. What is open fails. Idempotent."""
        self._closed = True
        self._router.fail(lambda ticket: True, _closed())
        self._fleet.stop()
        await self._membership.close()

    def _start(self) -> None:
        if self._closed:
            raise _closed()
        self._membership.start()

    async def _until_one_can_load(self) -> None:
        self._fleet.sync_waits = True
        try:
            await self._until(self._can_load)
        finally:
            self._fleet.sync_waits = False

    def _can_load(self) -> bool:
        states = map(self._fleet.state, self._fleet.members)
        return any(state in (EngineState.ACTIVE, EngineState.AWAITING) for state in states)

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            unavailable = self._fleet.unavailable
            if unavailable is not None:
                raise unavailable
            await self._fleet.changed.wait()


def _go_on(request: GenerateRequest, sent: list[Completion]) -> GenerateRequest:
    """The request for the rest of an answer of which these pieces were handed out."""
    if not sent:
        return request
    made = joined(sent).ids
    return msgspec.structs.replace(
        request,
        response_ids=request.response_ids + made,
        first_uniform=request.first_uniform + len(made) // 4,
    )


def _closed() -> InfrastructureFailure:
    return InfrastructureFailure("the rollout controller was closed", reason=FailureReason.ENGINE_CLOSED)
