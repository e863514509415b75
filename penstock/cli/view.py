"""`penstock view`: a run, or a directory of runs, as a page in a browser."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
from pathlib import Path
from typing import Any

from penstock.errors import RefusedError


def add_to(commands: Any) -> None:
    command = commands.add_parser("view", help="a run as a live page in a browser")
    command.add_argument("directory", type=Path, metavar="RUN_OR_DIR", nargs="?", default=Path("runs"))
    command.add_argument("--demo", action="store_true", help="a small recorded run, to look around")
    command.add_argument("--port", type=int, default=0, help="on this machine's loopback (default: any that is free)")
    command.set_defaults(run=view)


def view(options: argparse.Namespace) -> int:
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise RefusedError("penstock view needs a web server: pip install 'penstock[serve]'")
    from penstock.view.demo import demo_run
    from penstock.view.runs import Runs
    from penstock.view.server import ViewServer

    if not 0 <= options.port < 1 << 16:
        raise RefusedError(f"--port is {options.port}; ports go up to 65535, and 0 takes one that is free")
    with demo_run() if options.demo else contextlib.nullcontext(options.directory) as directory:
        runs = Runs(directory)
        try:
            server = ViewServer(runs, port=options.port)
        except OSError as error:
            raise RefusedError(f"--port {options.port} cannot be used: {error}") from error
        print(f"open {server.url}\nCtrl-C ends it.", flush=True)
        server.serve()
    return 0
