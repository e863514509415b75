"""Train ranks that live and die together, and where each of them lives.

A call is made by all of them. It ends with an answer or a refusal of each; when one of them is lost, or does not end it
in time, the others are in the middle of an exchange that never ends: the group is broken, and only ending all of them
and starting anew helps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from penstock.errors import InfrastructureFailure, PenstockError
from penstock.learn.config import RanksConfig
from penstock.learn.rank import RankSetup, StatePart

SETTLE_S = 5.0
"""How long the others may take to end a call, once one of them has failed it."""


class Kept(Protocol):
    """The state of a rank, outside of it."""

    def close(self) -> None: ...


class RankHost(Protocol):
    """Where one rank lives. It makes its calls one after the other, but for `stop`."""

    @property
    def node(self) -> str:
        """Its machine; equal for ranks that are lost together when it is."""
        ...

    @property
    def address(self) -> str:
        """Where other machines reach it."""
        ...

    @property
    def death(self) -> str | None:
        """How it ended; None while it lives, as far as is known."""
        ...

    async def gone(self) -> None:
        """Waits until it has died."""
        ...

    async def node_lives(self) -> bool:
        """Whether its machine does, as far as is known."""
        ...

    async def call(self, method: str, *arguments: Any) -> Any:
        """A method of `Rank`. Raises an error of Penstock's as itself, InfrastructureFailure for everything else."""
        ...

    async def keep(self, whole: bool) -> Any:
        """Its `state`, as a `Kept`. Raises WeightSyncError when there is no room for it."""
        ...

    async def take(self, kept: Any, part: StatePart) -> None:
        """`set_state`. Raises WeightSyncError when what was kept is gone."""
        ...

    async def end(self) -> None:
        """It is gone when this returns, whatever it was doing."""
        ...


class RankLauncher(Protocol):
    async def launch(self, setups: Sequence[RankSetup]) -> Sequence[RankHost]:
        """One for each, in order. Raises a PenstockError, with nothing left running, when not all can be had."""
        ...

    async def close(self) -> None: ...


class Broken(Exception):
    """The ranks cannot go on together."""

    def __init__(self, culprits: dict[int, str], cause: PenstockError | None = None) -> None:
        super().__init__("; ".join(f"rank {rank}: {reason}" for rank, reason in culprits.items()) or str(cause))
        self.culprits = culprits
        self.cause = cause
        """What a rank refused while another did not: it would again."""


class RankGroup:
    def __init__(self, hosts: Sequence[RankHost], config: RanksConfig) -> None:
        self.hosts = hosts
        self._config = config

    @classmethod
    async def start(cls, launcher: RankLauncher, setup: RankSetup, config: RanksConfig) -> RankGroup:
        """Returns when every rank has the model. Raises Broken, or what all of them refuse; none is left then."""
        setups = [msgspec.structs.replace(setup, rank=rank) for rank in range(setup.size)]
        try:
            group = cls(await launcher.launch(setups), config)
        except InfrastructureFailure as failure:
            raise Broken({0: str(failure)}) from failure
        try:
            [port] = answers(await group._settled([group.hosts[0].call("open_store", group.address)], "open_store"))
            for refusal in refusals(await group.call("join", group.address, port)):
                raise refusal
        except BaseException:
            await group.end()
            raise
        return group

    @property
    def address(self) -> str:
        """Of the first rank."""
        return self.hosts[0].address

    @property
    def lost(self) -> dict[int, str]:
        """Ranks that are known to be gone, and how they ended."""
        return {rank: host.death for rank, host in enumerate(self.hosts) if host.death is not None}

    async def one_lost(self) -> None:
        """Waits until a rank has died."""
        waits = [asyncio.create_task(host.gone()) for host in self.hosts]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def lost_with(self, culprits: Mapping[int, str]) -> dict[int, str]:
        """These, and those on a machine that is lost with them: of one rank on it that is known before the others."""
        hosts = {self.hosts[rank].node: self.hosts[rank] for rank in culprits}
        gone = {node for node, host in hosts.items() if not await host.node_lives()}
        lost = {rank: "its machine is gone" for rank, host in enumerate(self.hosts) if host.node in gone}
        return dict(sorted((lost | dict(culprits)).items()))

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """Of every rank its answer, or the PenstockError it raised. Raises Broken."""
        return await self._settled([host.call(method, *arguments) for host in self.hosts], method)

    async def keep(self, whole: set[int]) -> list[Any]:
        return await self._settled([host.keep(rank in whole) for rank, host in enumerate(self.hosts)], "keep")

    async def take(self, given: Sequence[Any], part: StatePart) -> list[Any]:
        """What each rank is given."""
        calls = [host.take(kept, part) for host, kept in zip(self.hosts, given, strict=True)]
        return await self._settled(calls, "take")

    async def end(self) -> None:
        await asyncio.gather(*(host.end() for host in self.hosts))

    async def _settled(self, calls: Sequence[Coroutine[Any, Any, Any]], method: str) -> list[Any]:
        timeout_s = self._config.start_timeout_s if method in ("open_store", "join") else self._config.call_timeout_s
        tasks = [asyncio.create_task(call, name=f"{method} of rank {rank}") for rank, call in enumerate(calls)]
        try:
            _, waiting = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            if waiting and any(task.done() for task in tasks):
                await asyncio.wait(waiting, timeout=SETTLE_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        failed = {rank: story for rank, task in enumerate(tasks) if (story := _failure(task, method)) is not None}
        if failed and self.lost:
            # Whatever the others met, or refused, may be what this did to them.
            raise Broken(self.lost)
        if failed:
            refused = (task.exception() for rank, task in enumerate(tasks) if rank not in failed)
            raise Broken(failed, next((error for error in refused if isinstance(error, PenstockError)), None))
        return [task.exception() or task.result() for task in tasks]


def _failure(task: asyncio.Task[Any], method: str) -> str | None:
    """Why a rank did not end its call as a rank may."""
    if task.cancelled():
        return f"no answer to {method}"
    error = task.exception()
    if error is None or (isinstance(error, PenstockError) and not isinstance(error, InfrastructureFailure)):
        return None
    return str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"


def refusals(settled: Sequence[Any]) -> list[PenstockError]:
    return [each for each in settled if isinstance(each, PenstockError)]


def answers(settled: Sequence[Any]) -> list[Any]:
    """Raises the first refusal."""
    for refusal in refusals(settled):
        raise refusal
    return list(settled)
