"""RolloutController: the one door to several engines, behind the `Engine` port of one.

    generate ---> routing: the group's engine, or the least loaded ---> engine ---> answer checked ---> caller
                     ^                                                     |
                     +------- another engine, at most twice <-- failed, late, fenced, nonsense

Control calls (pause, continue, abort, sleep, wake) go to all active engines at once, past every waiting request; an
engine that does not obey in time is fenced. New weights are published when at least one engine confirms them; those
that do not are fenced, and come back only with them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from penstock.agent_loop import check_completion
from penstock.engine.config import RolloutControllerConfig
from penstock.engine.health import DEAD, EngineState, Fleet, Member
from penstock.engine.recovery import supervise
from penstock.engine.requests import ABORTED
from penstock.engine.routing import Router
from penstock.errors import ConfigError, InfrastructureFailure, PenstockError, WeightSyncError
from penstock.events import Observer
from penstock.ports import (
    Completion,
    Engine,
    EngineStats,
    GenerateRequest,
    KeptWeights,
    LoadedWeights,
    PauseMode,
    WeightSource,
)
from penstock.rollout import FailureReason
from penstock.weights.confirm import load_confirmed

MAX_REROUTES = 2


class RolloutController:
    """Belongs to the event loop of its first call; the engines are supervised from then on."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        config: RolloutControllerConfig,
        *,
        model_step: int,
        max_running: int,
        observer: Observer,
    ) -> None:
        if not engines:
            raise ConfigError("RolloutController needs at least one engine")
        self._config = config
        self._fleet = Fleet(engines, self._config, model_step)
        self._observer = observer
        self._router = Router(self._fleet, config.max_requests_per_engine or max_running)
        self._fleet.on_change = self._router.assign
        self._supervisors: list[asyncio.Task[None]] = []
        self._live: Counter[str] = Counter()
        self._aborted: set[str] = set()
        """Ids of live requests that were aborted; they are not given to another engine."""
        self._syncing = asyncio.Lock()
        self._closed = False

    # Requests.

    async def generate(self, request: GenerateRequest) -> Completion:
        """Raises InfrastructureFailure when three engines failed, EngineUnavailable when none is there to ask."""
        self._start()
        self._live[request.request_id] += 1
        try:
            return await self._generate(request)
        finally:
            self._live[request.request_id] -= 1
            if not self._live[request.request_id]:
                del self._live[request.request_id]
                self._aborted.discard(request.request_id)

    async def _generate(self, request: GenerateRequest) -> Completion:
        failed: list[str] = []
        while True:
            if self._fleet.pause == "abort" or request.request_id in self._aborted:
                return ABORTED
            member = await self._router.take_place(request, failed)
            if member is None:
                return ABORTED
            try:
                return await self._ask(member, request)
            except InfrastructureFailure:
                failed.append(member.name)
                if self._closed or len(failed) > MAX_REROUTES:
                    raise
            finally:
                self._router.leave(member)

    async def _ask(self, member: Member, request: GenerateRequest) -> Completion:
        """One engine's answer, checked. Whatever is wrong with it counts against that engine."""
        oldest, times_fenced = len(self._fleet.history) - 1, member.times_fenced
        timeout_s = self._config.request_timeout_s
        try:
            async with asyncio.timeout(None if self._fleet.pause == "keep" else timeout_s) as scope:
                member.enter(scope)
                try:
                    completion = await member.engine.generate(request)
                finally:
                    member.leave(scope)
            await self._check(completion, request, member, oldest)
        except TimeoutError:
            if member.times_fenced == times_fenced:
                failure = InfrastructureFailure(
                    f"engine {member.name} did not answer {request.request_id} within {timeout_s:g} s",
                    reason=FailureReason.ENGINE_DEADLINE,
                )
                self._count_failure(member, failure)
            else:
                failure = InfrastructureFailure(
                    f"engine {member.name} was fenced: {member.last_failure}", reason=FailureReason.ENGINE_FENCED
                )
            raise failure from None
        except InfrastructureFailure as failed:
            self._count_failure(member, failed)
            raise
        member.request_failures = 0
        return completion

    async def _check(self, completion: Completion, request: GenerateRequest, member: Member, oldest: int) -> None:
        """`oldest` is the place in the history of what was published when the request began."""
        if completion.ids or len(request.response_ids) < 4 * request.params.max_tokens:
            check_completion(completion, request.request_id)
        fleet = self._fleet
        steps = {step for step, _ in completion.steps}
        if fleet.loading_step in steps:
            # Made by weights that this engine has and the sync may still lose.
            await fleet.load_ended.wait()
        wrong = sorted(steps.difference(fleet.history[oldest:]))
        if wrong:
            failure = f"answered {request.request_id} with model step {wrong[0]}; published is {fleet.published}"
            fleet.fence(member, failure)
            raise InfrastructureFailure(f"engine {member.name} {failure}", reason=FailureReason.ENGINE_NONSENSE)

    def _count_failure(self, member: Member, failure: InfrastructureFailure) -> None:
        if member.state is not EngineState.ACTIVE:
            return
        member.request_failures += 1
        member.last_failure = str(failure)
        member.attention.set()
        if member.request_failures >= self._config.failures_to_fence or failure.reason in DEAD:
            self._fleet.fence(member, str(failure))

    # Control.

    async def pause_generation(self, mode: PauseMode = "abort") -> None:
        self._start()
        self._fleet.pause = mode
        if mode == "abort":
            self._router.abort()
        for member in self._fleet.active:
            member.set_deadlines(None)
        await self._tell_all("pause", lambda engine: engine.pause_generation(mode))

    async def continue_generation(self) -> None:
        self._start()
        # First, so that an engine that comes back meanwhile is not left paused.
        self._fleet.pause = None
        await self._tell_all("continue", lambda engine: engine.continue_generation())
        for member in self._fleet.active:
            member.set_deadlines(asyncio.get_running_loop().time() + self._config.request_timeout_s)
        self._router.assign()

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._start()
        self._aborted.update(name for name in request_ids if self._live[name])
        self._router.abort(frozenset(request_ids))
        await self._tell_all("abort", lambda engine: engine.abort(request_ids))

    async def sleep(self) -> None:
        self._start()
        self._fleet.asleep = True
        try:
            await self._tell_all("sleep", lambda engine: engine.sleep())
        except BaseException:
            self._fleet.asleep = False
            raise

    async def wake(self) -> None:
        self._start()
        self._fleet.asleep = False
        await self._tell_all("wake", lambda engine: engine.wake())

    async def _tell_all(self, what: str, call: Callable[[Engine], Awaitable[None]]) -> None:
        """All active engines at once. One that fails or is late is fenced; what it refuses, it refuses for all."""

        async def tell(member: Member) -> None:
            try:
                async with asyncio.timeout(self._config.control_timeout_s):
                    await call(member.engine)
            except TimeoutError:
                self._fleet.fence(member, f"did not {what} within {self._config.control_timeout_s:g} s")
            except InfrastructureFailure as failure:
                self._fleet.fence(member, f"did not {what}: {failure}")

        outcomes = await asyncio.gather(*(tell(member) for member in self._fleet.active), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    # Weights.

    async def load_weights(self, source: WeightSource, model_step: int) -> LoadedWeights:
        """All active engines at once. Those that do not confirm are fenced.

        Raises WeightSyncError when none confirms; `model_step()` is then what it was.
        """
        self._start()
        async with self._syncing:
            await self._until(lambda: self._can_load)
            try:
                return await self._sync_once(source, model_step)
            except WeightSyncError:
                if self._fleet.active:
                    raise
                # All of them died; whichever comes back is given these weights.
                await self._until(lambda: self._can_load)
                return await self._sync_once(source, model_step)

    async def _sync_once(self, source: WeightSource, model_step: int) -> LoadedWeights:
        fleet, members = self._fleet, self._can_load
        fleet.begin_sync(members, model_step)
        try:
            received, failures = await self._load_into(members, source, model_step)
            if len(failures) == len(members):
                story = "; ".join(f"{member.name}: {failure}" for member, failure in failures.items())
                raise WeightSyncError(f"weights {model_step}: no engine confirmed them. {story}")
            fleet.publish(model_step, source)
            for member in members:
                member.doubtful = member in failures
            for member, failure in failures.items():
                fleet.fence(member, failure)
        except asyncio.CancelledError:
            for member in members:
                fleet.fence(member, f"the sync of weights {model_step} was cancelled; it may have either")
            raise
        finally:
            fleet.end_sync(members)
        return LoadedWeights(model_step=model_step, checksum=received)

    async def _load_into(
        self, members: list[Member], source: WeightSource, model_step: int
    ) -> tuple[str | None, dict[Member, str]]:
        """The checksum that those who confirmed computed from what they received; the other members, and why."""

        async def load(member: Member) -> LoadedWeights | str:
            try:
                async with asyncio.timeout(self._config.load_timeout_s):
                    return await load_confirmed(member.engine, source, model_step)
            except TimeoutError:
                return f"did not load the weights within {self._config.load_timeout_s:g} s"
            except PenstockError as error:
                return str(error)

        outcomes = dict(zip(members, await asyncio.gather(*map(load, members)), strict=True))
        failures = {member: outcome for member, outcome in outcomes.items() if isinstance(outcome, str)}
        received = {member: loaded.checksum for member, loaded in outcomes.items() if isinstance(loaded, LoadedWeights)}
        expected = _expected(source, received.values())
        for member, checksum in received.items():
            if checksum not in (None, expected):
                failures[member] = f"weights {model_step}: received {checksum}, not {expected}"
        if len(failures) == len(members):
            # Nothing was published, so an engine that kept the old weights may go on.
            kept = await asyncio.gather(*(self._serves(member, self._fleet.published) for member in members))
            for member, serves in zip(members, kept, strict=True):
                if not serves:
                    self._fleet.fence(member, failures[member])
        # Of the engines' own words, not the source's: the sender compares it with what it sent.
        confirmed = {checksum for member, checksum in received.items() if member not in failures} - {None}
        return next(iter(confirmed), None), failures

    async def _serves(self, member: Member, model_step: int) -> bool:
        try:
            async with asyncio.timeout(self._config.control_timeout_s):
                return await member.engine.model_step() == model_step
        except (TimeoutError, PenstockError):
            return False

    async def model_step(self) -> int:
        """What was published: engines with other weights serve nothing."""
        return self._fleet.published

    # State.

    def states(self) -> dict[str, EngineState]:
        return {member.name: member.state for member in self._fleet.members}

    async def check_health(self) -> None:
        """Returns if an active engine says that it is well. Waits for the first to start."""
        self._start()
        if not self._fleet.active and any(member.last_failure for member in self._fleet.members):
            raise InfrastructureFailure(
                f"no engine is active: {self._fleet.describe()}", reason=FailureReason.NO_ENGINE
            )
        try:
            await self._until(lambda: self._fleet.active)
        except PenstockError as error:
            raise InfrastructureFailure(str(error), reason=FailureReason.NO_ENGINE) from error
        if not any(await asyncio.gather(*map(self._is_well, self._fleet.active))):
            raise InfrastructureFailure(f"no engine is well: {self._fleet.describe()}", reason=FailureReason.NO_ENGINE)

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
        members = self._fleet.members
        for member, stats in zip(members, await asyncio.gather(*map(self._stats_of, members)), strict=True):
            member.stats = stats
        shares = [member.stats.cache_use for member in self._fleet.active]
        return EngineStats(
            engines=len(self._fleet.active),
            running=sum(member.stats.running for member in members),
            waiting=sum(member.stats.waiting for member in members) + self._router.waiting,
            generated_tokens=sum(member.tokens_before + member.stats.generated_tokens for member in members),
            busy_seconds=sum(member.stats.busy_seconds for member in members),
            cache_use=sum(shares) / len(shares) if shares else 0.0,
        )

    async def _stats_of(self, member: Member) -> EngineStats:
        if member.state is EngineState.ACTIVE:
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
        member = next(member for member in self._fleet.members if member.name == name)
        self._fleet.fence(member, "a restart was asked for")
        timeout_s = self._config.start_timeout_s + self._config.recovery_retry_s
        try:
            async with asyncio.timeout(timeout_s):
                while member.state is not EngineState.ACTIVE:
                    if member.gone:
                        message = f"engine {name} was given up: {member.last_failure}"
                        raise InfrastructureFailure(message, reason=FailureReason.ENGINE_GONE)
                    await self._fleet.changed.wait()
        except TimeoutError:
            message = f"engine {name} did not come back within {timeout_s:g} s: {member.last_failure}"
            raise InfrastructureFailure(message, reason=FailureReason.ENGINE_START_DEADLINE) from None

    async def close(self) -> None:
        """End the supervision and close every engine. What is open fails. Idempotent."""
        self._closed = True
        self._fleet.stop()
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        self._router.fail_all(_closed())

        async def close(member: Member) -> None:
            async with asyncio.timeout(self._config.control_timeout_s):
                await member.engine.close()

        outcomes = await asyncio.gather(*map(close, self._fleet.members), return_exceptions=True)
        for member, outcome in zip(self._fleet.members, outcomes, strict=True):
            member.state = EngineState.FENCED
            member.last_failure = "closed" if outcome is None else f"closing failed: {outcome!r}"
            member.set_deadlines(asyncio.get_running_loop().time())

    def _start(self) -> None:
        if self._closed:
            raise _closed()
        if not self._supervisors:
            self._fleet.start()
            self._supervisors = [
                asyncio.create_task(supervise(member, self._fleet), name=f"supervise engine {member.name}")
                for member in self._fleet.members
            ]

    @property
    def _can_load(self) -> list[Member]:
        return [member for member in self._fleet.members if self._fleet.is_active(member) or member.awaits_weights]

    async def _until(self, found: Callable[[], list[Member]]) -> None:
        while not found():
            if self._fleet.unavailable is not None:
                raise self._fleet.unavailable
            await self._fleet.changed.wait()


def _expected(source: WeightSource, received: Iterable[str | None]) -> str | None:
    """The checksum of what was sent if the source knows it, else what most received.

    None is no disagreement: an engine in this process reads the weights where they are and sums up nothing.
    """
    if isinstance(source, KeptWeights):
        return source.checksum
    sums = Counter(checksum for checksum in received if checksum is not None)
    return sums.most_common(1)[0][0] if sums else None


def _closed() -> InfrastructureFailure:
    return InfrastructureFailure("the rollout controller was closed", reason=FailureReason.ENGINE_CLOSED)
