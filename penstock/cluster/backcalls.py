"""From an actor to what lives in the driver: a turn log, an observer, a judger of this process.

Ray has no calls from an actor to the driver, so they come with what the driver collects from the actor anyway:

    actor     Outbox        calls that wait for the driver, and for its answers
    driver    Attendant     one for each actor, which also sees that the actor died and that it is back

A driver that does not come for `SILENT_S` while calls wait fails them; a dead driver's actors are ended by Ray. What
runs in the driver for an actor that died is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from penstock.cluster.line import SILENT_S, ActorGone
from penstock.cluster.member import Member
from penstock.cluster.peer import Answer, Answering, Ask, Asking, Message
from penstock.cluster.wire import pack, read_answer
from penstock.errors import InfrastructureFailure
from penstock.events import ActorLost, ActorRecovered, Observer
from penstock.rollout import FailureReason

logger = logging.getLogger(__name__)

MAX_WAITING = 100_000
"""One-way messages; more are dropped. They are events, and a driver that is so far behind shows none."""
PROBE_S = 0.25


class Outbox:
    """In the actor. Everything but `tell` is called on the actor's own event loop."""

    def __init__(self, silent_s: float = SILENT_S) -> None:
        self._silent_s = silent_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._asking = Asking(self._send)
        self._waiting: list[Message] = []
        self._wake: Callable[[], None] = lambda: None
        self._attended_at = 0.0
        self._line = ""
        """The driver's, that was here last."""
        self._watching: asyncio.Task[None] | None = None

    async def call(self, port: str, method: str, arguments: tuple[Any, ...]) -> Any:
        """Raises what the object in the driver raises; InfrastructureFailure when the driver does not come."""
        self._watch()
        return read_answer(await self._asking.call(port, method, pack(arguments)))

    async def stream(self, port: str, method: str, arguments: tuple[Any, ...]) -> AsyncGenerator[Any, None]:
        self._watch()
        async with contextlib.aclosing(self._asking.stream(port, method, pack(arguments))) as answers:
            async for answer in answers:
                yield read_answer(answer)

    def tell(self, port: str, method: str, arguments: tuple[Any, ...]) -> None:
        """One way, from any thread, and at once."""
        if self._loop is None or threading.get_ident() == self._thread:
            self._asking.tell(port, method, arguments)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the actor ends
                self._loop.call_soon_threadsafe(self._asking.tell, port, method, arguments)

    def attended(self, line: str, wake: Callable[[], None]) -> list[Message]:
        """What the driver is to be given: it is here. `wake` is called when there is more.

        On a new line it has forgotten what it was given on the one before.
        """
        if line != self._line:
            self._line = line
            self._asking.fail(self._forgotten, but={ask.number for ask in self._waiting if isinstance(ask, Ask)})
        return self.more(line, wake)

    def more(self, line: str, wake: Callable[[], None]) -> list[Message]:
        """As `attended`, of one who has waited: nothing, if the driver is on another line by now."""
        if line != self._line:
            return []
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._attended_at = self._loop.time()
        self._wake = wake
        waiting, self._waiting = self._waiting, []
        return waiting

    def take(self, answer: Answer) -> None:
        self._asking.take(answer)

    def _send(self, message: Message) -> None:
        if isinstance(message, Ask) and message.wants == "nothing" and len(self._waiting) > MAX_WAITING:
            return
        self._waiting.append(message)
        self._wake()

    def _watch(self) -> None:
        if self._watching is None or self._watching.done():
            self._attended_at = max(self._attended_at, asyncio.get_running_loop().time())
            self._watching = asyncio.create_task(self._until_silent(), name="watch the driver")

    async def _until_silent(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)  # until who called waits
        while self._asking:
            left = self._attended_at + self._silent_s - loop.time()
            if left <= 0:
                self._asking.fail(self._silent)
                return
            await asyncio.sleep(left)

    def _forgotten(self) -> InfrastructureFailure:
        words = "the driver lost its connection to this actor, and with it what it was asked"
        return InfrastructureFailure(words, reason=FailureReason.ACTOR_DIED)

    def _silent(self) -> InfrastructureFailure:
        words = f"the driver has not asked for {self._silent_s:g} s"
        return InfrastructureFailure(words, reason=FailureReason.ACTOR_DIED)


class Attendant:
    """In the driver. `ports` are the objects that actors may call, by the id they know; others are added meanwhile."""

    def __init__(
        self, member: Member, ports: Mapping[str, Any], observer: Observer, kill: Callable[[Member], None]
    ) -> None:
        self.member = member
        self._ports = ports
        self._observer = observer
        self._kill = kill

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            line = self.member.line
            answering = Answering(line.send, self._find, self.member.name)
            try:
                gone = await line.attend(answering)
            finally:
                await answering.drop()
            await self._until_back(gone)

    async def _find(self, port: str) -> Any:
        return self._ports[port]

    async def _until_back(self, gone: ActorGone) -> None:
        """Also of one that does not answer: it is killed, and Ray starts it again."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._observer.notice(ActorLost(actor=self.member.name, reason=str(gone)))
        if "has not answered" in str(gone):
            self._kill(self.member)
        while True:
            try:
                async with asyncio.timeout(SILENT_S):
                    identity = await self.member.identify()
                break
            except (ActorGone, TimeoutError):
                await asyncio.sleep(PROBE_S)
        seconds = loop.time() - began
        self._observer.notice(ActorRecovered(actor=self.member.name, seconds=round(seconds, 3), node=identity.node))
