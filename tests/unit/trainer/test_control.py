"""The engines of a run, asked and changed through the socket in its directory."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from engine_fakes import FakeEngine

from penstock.cli import main as penstock
from penstock.engine import RolloutControllerConfig
from penstock.errors import RefusedError, RunError
from penstock.events import Event, Note
from penstock.trainer.control import SOCKET, EngineControl, Wish, ask


class Told:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def notice(self, event: Event) -> None:
        if isinstance(event, Note):
            self.notes.append(event.text)


class Stuck(FakeEngine):
    """It starts, and never says how it is."""

    closed = False

    async def check_health(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.closed = True


Test = Callable[[Path, list[Any]], Coroutine[Any, Any, None]]


def under_way(run_dir: Path, test: Test, *, kind: type[FakeEngine] = FakeEngine, fixed: str = "") -> list[str]:
    """Plays `test` beside a run with two engines; returns what the run said."""
    told, made = Told(), []

    async def new_engine(name: str) -> Any:
        made.append(kind())
        return made[-1]

    async def main() -> None:
        engines: Any = {"engine-0": FakeEngine(), "engine-1": FakeEngine()}
        controller = RolloutControllerConfig().build(engines, new_engine=new_engine)
        await controller.check_health()
        served = EngineControl(run_dir, controller, told, fixed=fixed)
        await served.open()
        try:
            async with asyncio.timeout(30):
                await test(run_dir, made)
        finally:
            await served.close()
            await controller.close()

    asyncio.run(main())
    return told.notes


async def say(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The command line, as another process would use it."""
    code = await asyncio.to_thread(penstock, ["engines", *arguments])
    output = capsys.readouterr()
    return code, output.out + output.err


def test_engines_are_listed_added_and_drained_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def test(run_dir: Path, made: list[Any]) -> None:
        run = str(run_dir)
        assert await say(capsys, run) == (0, "engine-0  active, 0 requests\nengine-1  active, 0 requests\n")
        code, output = await say(capsys, run, "add")
        assert code == 0 and output.startswith("engine-2 serves\n") and output.count("active") == 3
        code, output = await say(capsys, run, "drain", "engine-0")
        assert code == 0 and output.startswith("engine-0 has left\n") and output.count("active") == 2
        code, output = await say(capsys, run, "--json")
        assert [member["name"] for member in json.loads(output)["members"]] == ["engine-1", "engine-2"]
        assert len(made) == 1 and not made[0].dead

    told = under_way(tmp_path, test)
    assert told == [
        "engine-2 joined, as `penstock engines` asked",
        "engine-0 left, as `penstock engines` asked",
    ]
    assert not (tmp_path / SOCKET).exists()


def test_what_cannot_be_done_is_said_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def test(run_dir: Path, made: list[Any]) -> None:
        run = str(run_dir)
        assert await say(capsys, run, "drain", "engine-9") == (
            1,
            "penstock: there is no engine 'engine-9' to drain; the engines are engine-0, engine-1\n",
        )
        assert (await say(capsys, run, "drain"))[0] == 2
        assert (await say(capsys, run, "add", "engine-7"))[0] == 2
        assert (await say(capsys, run, "drain", "engine-1"))[0] == 0
        code, output = await say(capsys, run, "drain", "engine-0")
        assert code == 1 and "no other engine serves; add one first" in output
        assert (await asyncio.to_thread(ask, run_dir, Wish())).members[0].state == "active"

    assert len(under_way(tmp_path, test)) == 1


def test_a_run_that_shares_its_devices_only_lists_its_engines(tmp_path: Path) -> None:
    async def test(run_dir: Path, made: list[Any]) -> None:
        assert len((await asyncio.to_thread(ask, run_dir, Wish())).members) == 2
        for wish in (Wish(do="add"), Wish(do="drain", name="engine-0")):
            with pytest.raises(RunError, match="they share the devices"):
                await asyncio.to_thread(ask, run_dir, wish)

    assert under_way(tmp_path, test, fixed="they share the devices") == []


def test_a_caller_who_leaves_takes_the_wish_back(tmp_path: Path) -> None:
    async def test(run_dir: Path, made: list[Any]) -> None:
        _, writer = await asyncio.open_unix_connection(str(run_dir / SOCKET))
        writer.write(b'{"do": "add"}\n')
        while len((await asyncio.to_thread(ask, run_dir, Wish())).members) == 2:
            pass
        writer.close()
        while not made[0].closed:
            await asyncio.to_thread(ask, run_dir, Wish())
        assert len((await asyncio.to_thread(ask, run_dir, Wish())).members) == 2

    under_way(tmp_path, test, kind=Stuck)


@pytest.mark.parametrize("line", [b"\n", b"\xff\n", b'{"do": "explode"}\n', b"[" * 70_000, b"{}"])
def test_what_is_no_wish_is_refused_and_others_are_answered(tmp_path: Path, line: bytes) -> None:
    async def test(run_dir: Path, made: list[Any]) -> None:
        reader, writer = await asyncio.open_unix_connection(str(run_dir / SOCKET))
        writer.write(line)
        writer.write_eof()
        answer = await reader.read()
        assert not answer or json.loads(answer).get("error") or line == b"{}"
        writer.close()
        assert len((await asyncio.to_thread(ask, run_dir, Wish())).members) == 2

    under_way(tmp_path, test)


def test_only_the_owner_of_the_run_may_ask(tmp_path: Path) -> None:
    async def test(run_dir: Path, made: list[Any]) -> None:
        assert stat.S_IMODE((run_dir / SOCKET).stat().st_mode) == 0o600

    under_way(tmp_path, test)


def test_a_directory_may_be_deep(tmp_path: Path) -> None:
    deep = tmp_path / ("deep" * 30) / ("er" * 60)
    deep.mkdir(parents=True)

    async def test(run_dir: Path, made: list[Any]) -> None:
        assert len((await asyncio.to_thread(ask, run_dir, Wish())).members) == 2

    under_way(deep, test)


def test_without_a_run_there_is_nobody_to_ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RefusedError, match="no run is under way"):
        ask(tmp_path / "never", Wish())
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / SOCKET))
    assert penstock(["engines", str(tmp_path)]) == 2
    assert "no run is under way" in capsys.readouterr().err

    async def test(run_dir: Path, made: list[Any]) -> None:
        assert len((await asyncio.to_thread(ask, run_dir, Wish())).members) == 2

    under_way(tmp_path, test)  # what a killed run left does not stand in the way of the next


def test_a_run_goes_on_where_there_can_be_no_socket(tmp_path: Path) -> None:
    told = Told()

    async def main() -> None:
        served = EngineControl(tmp_path / "gone", None, told)  # type: ignore[arg-type]
        await served.open()
        await served.close()

    asyncio.run(main())
    assert len(told.notes) == 1 and "will not work" in told.notes[0]


def test_a_run_that_does_not_answer_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(SOCKET)
        silent.listen()
        with pytest.raises(RunError, match=r"did not answer within 0\.05 s"):
            ask(tmp_path, Wish(), timeout_s=0.05)
