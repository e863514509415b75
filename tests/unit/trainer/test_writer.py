"""What is written beside a run: in order, never forgotten, and given up only by a run that is stopped at once."""

from __future__ import annotations

import asyncio

import pytest

from penstock.errors import RunError, StorageError
from penstock.events import Event, Note
from penstock.testing import run_virtual
from penstock.trainer.writer import CheckpointWriter


class Disk:
    """Writes take a second each; `full` are those that fail."""

    def __init__(self, *full: str) -> None:
        self.written: list[str] = []
        self.notes: list[str] = []
        self.writer = CheckpointWriter(self)
        self._full = full

    def notice(self, event: Event) -> None:
        assert isinstance(event, Note)
        self.notes.append(event.text)

    def begin(self, name: str) -> None:
        self.writer.begin(name, lambda: self._write(name))

    async def _write(self, name: str) -> None:
        await asyncio.sleep(1)
        if name in self._full:
            raise StorageError(f"no space for {name}")
        self.written.append(name)


def test_what_is_begun_is_written_in_order_and_all_of_it_before_the_end() -> None:
    disk = Disk()

    async def main() -> float:
        async with disk.writer:
            for name in ("checkpoint 3", "export 3", "last"):
                disk.begin(name)
            assert disk.writer.is_busy
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 3.0
    assert disk.written == ["checkpoint 3", "export 3", "last"] and disk.notes == []


def test_after_a_failure_nothing_more_is_written_and_everybody_who_asks_is_told() -> None:
    disk = Disk("a")

    async def main() -> None:
        async with disk.writer:
            disk.begin("a")
            disk.begin("b")
            disk.writer.check()
            await asyncio.sleep(5)
            for ask in (disk.writer.check, lambda: disk.begin("c")):
                with pytest.raises(StorageError, match="no space for a"):
                    ask()

    with pytest.raises(StorageError, match="no space for a"):
        run_virtual(main())
    assert disk.written == []


@pytest.mark.parametrize("full", [(), ("a",)])
def test_a_run_that_fails_elsewhere_ends_as_that_and_what_it_began_is_written_or_told(full: tuple[str, ...]) -> None:
    disk = Disk(*full)

    async def main() -> None:
        async with disk.writer:
            disk.begin("a")
            raise RunError("a bad batch")

    with pytest.raises(RunError, match="a bad batch"):
        run_virtual(main())
    assert disk.written == ([] if full else ["a"])
    assert disk.notes == (["beside that, StorageError: no space for a"] if full else [])


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "trains"])
def test_a_run_that_is_stopped_at_once_gives_up_what_is_not_written(waits: bool) -> None:
    disk = Disk()

    async def run() -> None:
        async with disk.writer:
            disk.begin("a")
            disk.begin("b")
            if not waits:
                await asyncio.sleep(100)

    async def main() -> float:
        running = asyncio.create_task(run())
        await asyncio.sleep(0.5)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 0.5
    assert disk.written == []
