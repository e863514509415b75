"""Train ranks in actors: the program of one, and how the driver talks to it.

    driver     ActorRanks    starts them, each in its bundle of a placement group; implements `RankLauncher`
               ActorRank     one of them; implements `RankHost`
    actor      RankProgram   a `Rank`, whose calls are made one after the other in one thread; control calls beside them

Ray starts none of them again: when one is lost the others could only wait for it, so all are ended and new ones stand
in the same bundles. A new rank takes what the old one had of its bundle, so it cannot start beside it. What is to
outlive a rank stays in the object store of its node and belongs to the driver, which never reads it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import numpy as np
import ray
import torch
from ray.exceptions import ObjectLostError, ObjectStoreFullError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup
from torch import Tensor

from penstock.cluster.host import CONTROL, marked
from penstock.cluster.launcher import START_S, CPUActorLauncher
from penstock.cluster.line import connection
from penstock.errors import InfrastructureFailure, RanksUnavailable, WeightSyncError
from penstock.learn.batch import TrainBatch
from penstock.learn.rank import RNG, Rank, RankSetup, StatePart
from penstock.resources import Demand
from penstock.rollout import FailureReason
from penstock.wire import WireError, error_from_wire, error_to_wire

T = TypeVar("T")

MAX_CONTROL_CALLS = 100
END_S = 120.0
"""For an actor that was killed to be known to be gone. Of a node that is silent a cluster says so after a minute."""
NODES_KNOWN_S = 10.0
"""For the cluster to say which nodes live."""
PROBE_S = 0.25
"""Between two looks at an actor that cannot be reached."""
BUNDLE_NODES = "bundles_to_node_id"


class Whereabouts(msgspec.Struct, frozen=True):
    """Where a rank lives."""

    node: str
    """Ray's id of it."""
    address: str
    pid: int


# In the actor.


class RankProgram:
    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._rank: Rank | None = None

    async def begin(self, setup: RankSetup) -> None:
        self._rank = Rank(setup)

    async def call(self, method: str, *arguments: Any) -> Any:
        """What the rank answers; an error is answered too, as the one that it is."""
        return await self._run(lambda: getattr(self._own, method)(*arguments))

    @marked(num_returns=2)
    async def keep(self, whole: bool) -> tuple[WireError | Plains, Any]:
        """Random numbers, which are small and go to the driver; the rest, which stays on this node."""
        state = await self._run(lambda: {name: _Plain.of(tensor) for name, tensor in self._own.state(whole).items()})
        if isinstance(state, WireError):
            return state, None
        rng = {name: state.pop(name) for name in list(state) if name.startswith(RNG)}
        return rng, state

    async def take(self, state: Plains, part: StatePart) -> Any:
        return await self._run(lambda: self._own.set_state({name: kept.tensor() for name, kept in state.items()}, part))

    @marked(concurrency_group=CONTROL)
    async def identify(self) -> Whereabouts:
        node = ray.get_runtime_context().get_node_id()
        return Whereabouts(node, ray.util.get_node_ip_address(), os.getpid())

    @marked(concurrency_group=CONTROL)
    async def live(self) -> None:
        """Until this actor is gone."""
        await asyncio.Event().wait()

    @marked(concurrency_group=CONTROL)
    async def stop(self, attempt: int) -> None:
        self._own.stop(attempt)

    @property
    def _own(self) -> Rank:
        assert self._rank is not None, "begin first"
        return self._rank

    async def _run(self, work: Callable[[], T]) -> T | WireError:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except Exception as error:  # whatever it is, the driver must hear of it
            return error_to_wire(error)


class _Plain(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of any type as bytes that Ray hands on without a copy."""

    dtype: str
    shape: tuple[int, ...]
    values: Any

    @classmethod
    def of(cls, tensor: Tensor) -> _Plain:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.view(torch.uint8).numpy())

    def tensor(self) -> Tensor:
        """To be read only: it is a view of the node's memory."""
        values: np.ndarray[Any, Any] = self.values
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            flat = torch.from_numpy(values)
        dtype: torch.dtype = getattr(torch, self.dtype)
        return flat.view(dtype).view(self.shape) if len(values) else torch.empty(self.shape, dtype=dtype)


Plains = Mapping[str, _Plain]
"""A state, by name."""

RemoteRank = ray.remote(
    concurrency_groups={CONTROL: MAX_CONTROL_CALLS},
    max_restarts=0,
    max_task_retries=0,
    enable_task_events=False,
)(RankProgram)


# In the driver.


class KeptObject:
    """What a rank keeps in the object store of its node; it is there as long as this and the node are.

    Its random numbers are here: no other rank has them, and they would go with its node.
    """

    def __init__(self, ref: Any, rng: Plains) -> None:
        self.ref = ref
        self.rng = rng

    def close(self) -> None:
        self.ref = None


class ActorRank:
    """One rank, and the actor it is in. Belongs to the event loop it was started in."""

    def __init__(self, name: str, handle: Any, ranks: ActorRanks) -> None:
        self.name = name
        self._handle = handle
        self._ranks = ranks
        self._where: Whereabouts | None = None
        self.death: str | None = None
        self._gone = asyncio.Event()
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why, when the whole cluster is gone."""
        self._forget = connection().when_lost(functools.partial(_tell_loop, asyncio.get_running_loop(), self._lose))
        self._watching = asyncio.create_task(self._watch(), name=f"watch {name}")

    @property
    def node(self) -> str:
        """With its id: there may be several at one address."""
        return f"{self.where.address} ({self.where.node[:8]})"

    @property
    def address(self) -> str:
        return self.where.address

    @property
    def pid(self) -> int:
        return self.where.pid

    @property
    def where(self) -> Whereabouts:
        assert self._where is not None, "it is identified when it has started"
        return self._where

    async def identify(self) -> None:
        self._where = await self._answer(self._handle.identify.remote())

    async def begin(self, setup: RankSetup) -> None:
        await self._answer(self._handle.begin.remote(setup))

    async def gone(self) -> None:
        await self._gone.wait()

    async def node_lives(self) -> bool:
        """A cluster knows that a node is gone before it says so of the actors there."""
        if self._lost.done():
            return False
        try:
            async with asyncio.timeout(NODES_KNOWN_S):
                nodes = await _of_daemon_thread(ray.nodes)
        except TimeoutError:
            return True  # nobody says that it does not
        return any(node["Alive"] for node in nodes if node["NodeID"] == self.where.node)

    async def call(self, method: str, *arguments: Any) -> Any:
        if method == "stop":
            return await self._answer(self._handle.stop.remote(*arguments))
        return await self._answer(self._handle.call.remote(method, *map(self._ranks.sent_once, arguments)))

    async def keep(self, whole: bool) -> KeptObject:
        try:
            told, state = self._handle.keep.remote(whole)
            rng = await self._answer(told)
        except ObjectStoreFullError as error:
            raise WeightSyncError(f"{self.name}: the object store of its node is full: {_first_line(error)}") from None
        return KeptObject(state, rng)

    async def take(self, kept: KeptObject, part: StatePart) -> None:
        try:
            await self._answer(self._handle.take.remote(kept.rng if part == "rng" else kept.ref, part))
        except ObjectLostError as error:
            raise WeightSyncError(f"what was kept for {self.name} is gone: {_first_line(error)}") from None

    async def end(self) -> None:
        """It is gone when this returns. Raises RanksUnavailable when that is not to be found out."""
        await asyncio.to_thread(self._ranks.give_back, self._handle)
        try:
            async with asyncio.timeout(END_S):
                await self._gone.wait()
            self._forget()
        except TimeoutError:
            self._watching.cancel()
            raise RanksUnavailable(
                f"{self.name} was killed, and its cluster has not said for {END_S:g} s that it is gone; "
                "resume when it is"
            ) from None

    def _lose(self, words: str) -> None:
        """With the whole cluster."""
        if not self._lost.done():
            self._lost.set_result(words)
        self.death = self.death or words
        self._gone.set()

    async def _unless_lost(self, ref: Any) -> Any:
        """What it answers; of a cluster that is gone nothing comes any more."""
        asked = asyncio.ensure_future(_answer_of(ref))
        try:
            await asyncio.wait([asked, self._lost], return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise _failed(self._lost.result(), FailureReason.ACTOR_DIED)
            return asked.result()
        finally:
            asked.cancel()

    async def _watch(self) -> None:
        while self.death is None:
            try:
                await self._unless_lost(self._handle.live.remote())
            except InfrastructureFailure:
                return  # with the cluster
            except RayError as error:
                self._note(error)
                if self.death is None:
                    await asyncio.sleep(PROBE_S)

    async def _answer(self, ref: Any) -> Any:
        """Raises an error of Penstock's as itself, those of Ray's object store, InfrastructureFailure for all else."""
        try:
            answer = await self._unless_lost(ref)
        except asyncio.CancelledError:
            with contextlib.suppress(RayError):
                ray.cancel(ref)
            raise
        except RayActorError as error:
            self._note(error)
            raise _failed(self.death or _first_line(error), FailureReason.ACTOR_DIED) from None
        except (ObjectLostError, ObjectStoreFullError):
            raise
        except RayError as error:
            raise _failed(f"{type(error).__name__}: {_first_line(error)}", FailureReason.ENGINE_ERROR) from None
        if isinstance(answer, WireError):
            raise error_from_wire(answer)
        return answer

    def _note(self, error: RayError) -> None:
        """An actor that cannot be reached may live: of one whose node is gone the cluster says so after a while."""
        if not isinstance(error, ray.exceptions.ActorUnavailableError) and self.death is None:
            self.death = f"its actor is gone: {type(error).__name__}: {_first_line(error)}"
            self._gone.set()


class ActorRanks:
    """Starts ranks in the bundles of `group`, or of a placement group of their own."""

    def __init__(
        self,
        launcher: CPUActorLauncher,
        demand: Demand,
        *,
        group: PlacementGroup | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._launcher = launcher
        self._demand = demand
        self._own: PlacementGroup | None = None
        self._group = group
        self._bundles: list[int] = []
        """Of each rank, as long as there are ranks: Ray leaves a bundle where it is while its node lives."""
        self._environment = environment
        self._sent: tuple[Any, Any] = (None, None)

    async def launch(self, setups: Sequence[RankSetup]) -> list[ActorRank]:
        if connection().lost:
            raise RanksUnavailable(connection().lost)
        started: list[ActorRank] = []
        try:
            await asyncio.to_thread(self._place, len(setups))
            for setup in setups:
                name = f"rank-{setup.rank}"
                started.append(ActorRank(name, await asyncio.to_thread(self._start, name, setup.rank), self))
            await self._identify(started)
            numbers: Counter[str] = Counter()
            for rank, setup in zip(started, setups, strict=True):
                await rank.begin(msgspec.structs.replace(setup, local_rank=numbers[rank.where.node]))
                numbers[rank.where.node] += 1
        except BaseException:
            await asyncio.gather(*(rank.end() for rank in started))
            raise
        return started

    async def close(self) -> None:
        self._sent = (None, None)
        group, self._own = self._own, None
        if group is not None:
            await asyncio.to_thread(lambda: self._launcher.give_back(group=group))

    def give_back(self, handle: Any) -> None:
        self._launcher.give_back(actor=handle)

    def sent_once(self, argument: Any) -> Any:
        """A batch goes to every rank: it is stored once, and each reads it there."""
        if not isinstance(argument, TrainBatch):
            return argument
        if self._sent[0] is not argument:
            self._sent = argument, ray.put(argument)
        return self._sent[1]

    def _place(self, size: int) -> None:
        if self._group is None:
            self._group = self._own = self._launcher.reserve(self._demand)
        if not self._bundles:
            nodes = ray.util.placement_group_table(self._group)[BUNDLE_NODES]
            # Neighbours stand on one node.
            self._bundles = sorted(range(size), key=lambda bundle: (str(nodes[bundle]), bundle))

    def _start(self, name: str, rank: int) -> Any:
        assert self._group is not None
        return self._launcher.start(
            RemoteRank, self._demand, name, self._group, self._bundles[rank], environment=self._environment
        )

    async def _identify(self, started: Sequence[ActorRank]) -> None:
        try:
            async with asyncio.timeout(START_S):
                await asyncio.gather(*(rank.identify() for rank in started))
        except TimeoutError:
            missing = ", ".join(rank.name for rank in started if rank._where is None)
            words = f"{missing} did not start within {START_S:g} s: their node has no room, or is gone"
            raise _failed(words, FailureReason.ENGINE_START) from None


async def _answer_of(ref: Any) -> Any:
    return await ref


def _tell_loop(loop: asyncio.AbstractEventLoop, tell: Callable[[str], None], words: str) -> None:
    with contextlib.suppress(RuntimeError):  # it is closed
        loop.call_soon_threadsafe(tell, words)


async def _of_daemon_thread(ask: Callable[[], T]) -> T:
    """As `asyncio.to_thread`, of what may never return: the process does not wait for it at its end."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(found: T) -> None:
        if not answer.done():
            answer.set_result(found)

    def run() -> None:
        with contextlib.suppress(Exception):  # whoever waits has a deadline
            loop.call_soon_threadsafe(settle, ask())

    threading.Thread(target=run, name="ask the cluster", daemon=True).start()
    return await answer


def _failed(words: str, reason: FailureReason) -> InfrastructureFailure:
    return InfrastructureFailure(words, reason=reason)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no words").splitlines()[0]
