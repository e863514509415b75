from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from view_runs import end_run

from penstock.cli import main


def test_runs_lists_every_run_with_its_state_and_result(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(run_dir.parent)]) == 0
    assert re.search(r"first +killed +step 2 of 4 +reward 0.100 -> 0.200", capsys.readouterr().out)
    end_run(run_dir)
    assert main(["runs", str(run_dir.parent), "--json"]) == 0
    [run] = json.loads(capsys.readouterr().out)
    assert run["state"] == "done" and run["reward_last"] == 0.2


def test_runs_of_a_directory_without_any_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(tmp_path)]) == 2
    assert "has no run" in capsys.readouterr().err


@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_plot_draws_a_picture(run_dir: Path, tmp_path: Path, suffix: str, begins: bytes) -> None:
    out = tmp_path / f"curve{suffix}"
    assert main(["plot", str(run_dir), "-o", str(out)]) == 0
    assert out.read_bytes().startswith(begins)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-o", "curve.txt"], "a picture ends in .png"),
        (["--metric", "reward/meen"], "Did you mean 'reward/mean'?"),
        (["-o", "/nowhere/curve.png"], "cannot be written"),
    ],
)
def test_plot_says_why_it_does_not(
    run_dir: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", str(run_dir), *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("what", "name", "step"), [("", "first", 2), ("--demo", "demo", 24)])
def test_view_prints_an_address_that_opens_the_page_and_ends_with_a_signal(
    run_dir: Path, what: str, name: str, step: int
) -> None:
    command = [sys.executable, "-m", "penstock.cli", "view", what or str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stdout is not None
        url = process.stdout.readline().removeprefix("open ").strip()
        with httpx.Client(follow_redirects=True, timeout=30) as client:
            assert "<title>Penstock</title>" in client.get(url).text
            base = url.partition("?")[0]
            assert client.get(f"{base}api/{name}/now").json()["step"] == step
        assert httpx.get(base).status_code == 401
        process.send_signal(signal.SIGINT)
        assert process.wait(20) in (0, 130, -signal.SIGINT)


def test_a_port_that_is_taken_or_that_there_is_not_is_refused(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["view", str(run_dir), "--port", str(port)]) == 2
    assert f"--port {port} cannot be used" in capsys.readouterr().err
    assert main(["view", str(run_dir), "--port", "99999"]) == 2
    assert "--port is 99999" in capsys.readouterr().err
