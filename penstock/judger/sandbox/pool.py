"""SandboxPool: some sandboxes are always ready, each is used once, and the next one starts when one is taken.

So a run waits for no start, whatever the run before it did to its own. Nothing here belongs to an event loop while no
run is under way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import weakref
from collections.abc import AsyncIterator

from penstock.judger.failure import CallFailed
from penstock.judger.pool import wait_until_gone
from penstock.judger.sandbox.box import Sandbox
from penstock.judger.sandbox.config import SandboxConfig
from penstock.judger.sandbox.walls import find_walls
from penstock.judger.slots import NoSlot, Slots

logger = logging.getLogger(__name__)

GONE_TIMEOUT_S = 2.0


def _kill_at_exit(owner: int, boxes: set[Sandbox]) -> None:
    if os.getpid() != owner:  # a forked child ends; the sandboxes are not its own
        return
    for box in boxes:
        box.kill()
    for box in boxes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            box.process.wait(timeout=1.0)
        box.clear()


class SandboxPool:
    """Raises ConfigError when no sandbox works on this machine."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self.walls = find_walls(config)
        self._slots = Slots(config.max_running)
        self._warm: list[Sandbox] = []
        self._boxes: set[Sandbox] = set()
        """All that were started and are not known to be gone."""
        self._closed = False
        self.started = 0
        weakref.finalize(self, _kill_at_exit, os.getpid(), self._boxes)
        self._said = False

    def _say(self) -> None:
        """Once, when the first is started: what this kind of sandbox does not stop."""
        if self._said:
            return
        self._said = True
        if gaps := self.walls.not_stopped():
            logger.warning(
                "code is judged in a sandbox of %s, which does not stop: %s. With bubblewrap (Debian's package of that "
                "name) all of it is stopped.",
                self.walls.kind,
                "; ".join(gaps),
            )

    @property
    def ready(self) -> int:
        """How many are kept ready now."""
        return sum(box.alive for box in self._warm)

    @contextlib.asynccontextmanager
    async def take(self, number: int, wait_until: float) -> AsyncIterator[list[Sandbox]]:
        """So many, ready. Waits for its turn until the loop's time `wait_until`. Raises CallFailed."""
        try:
            async with self._slots.take(wait_until):
                boxes: list[Sandbox] = []
                try:
                    for _ in range(number):
                        boxes.append(await self._next())
                    self.fill()  # those after it start while it runs
                    yield boxes
                finally:
                    for box in boxes:
                        self._bury(box)
                    self.fill()
        except NoSlot:
            raise CallFailed("busy", f"all {self._slots.size} sandboxes were taken") from None

    def fill(self) -> None:
        """Start what is missing. A machine that cannot start any is found out by the next run."""
        if self._closed:
            return
        for box in [box for box in self._warm if not box.alive]:
            self._warm.remove(box)
            self._bury(box)
        with contextlib.suppress(OSError):
            while len(self._warm) < self._config.warm:
                self._warm.append(self._start())

    async def _next(self) -> Sandbox:
        failure: CallFailed | None = None
        for _ in range(2):  # one that was kept ready may have died meanwhile
            if self._closed:
                raise CallFailed("closed", "the judger is closed")
            try:
                box = self._warm.pop(0) if self._warm else self._start()
            except OSError as error:
                raise CallFailed("start", f"no sandbox could be started: {error}") from None
            try:
                await box.get_ready(self._config.start_timeout_s)
                return box
            except CallFailed as error:
                failure = CallFailed("start", error.reason)
                self._bury(box)
            except BaseException:
                self._bury(box)
                raise
        assert failure is not None
        raise failure

    def _start(self) -> Sandbox:
        self._say()
        box = Sandbox(self.walls)
        self._boxes.add(box)
        self.started += 1
        return box

    def _bury(self, box: Sandbox) -> None:
        box.kill()
        for dead in [other for other in self._boxes if other.killed and not other.alive]:
            dead.clear()
            self._boxes.discard(dead)

    async def close(self) -> None:
        """Kill every sandbox; returns when they are gone, after at most a moment. Runs under way fail."""
        self._closed = True
        self._warm.clear()
        for box in self._boxes:
            box.kill()
        await wait_until_gone(list(self._boxes), GONE_TIMEOUT_S)
        for box in self._boxes:
            box.clear()
        self._boxes.clear()
