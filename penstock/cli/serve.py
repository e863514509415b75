"""`penstock serve`: a model behind the endpoint that agents are trained through."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import signal
from pathlib import Path
from typing import Any

from penstock.cli.loading import loading, make_observers, use_model_cache
from penstock.cli.output import say
from penstock.errors import ConfigError
from penstock.garbage import keep_what_is_loaded

DEFAULT_PORT = 8000


def add_to(commands: Any) -> None:
    command = commands.add_parser("serve", help="answer clients of OpenAI and Anthropic with a model or a trained run")
    command.add_argument("model", metavar="MODEL_OR_RUN", help="a model's name or directory, or a run directory")
    command.add_argument("--host", default="127.0.0.1", help="where to listen (default: this machine only)")
    command.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"0 takes a free one (default: {DEFAULT_PORT})")
    command.add_argument("--key", help="the key that clients must send (default: one is drawn at random)")
    command.add_argument("--no-key", action="store_true", help="ask for no key; only on this machine")
    command.add_argument(
        "--tool-parser", default="hermes", metavar="NAME", help="how calls of tools are written (default: hermes)"
    )
    command.add_argument("--max-tokens", type=int, default=1024, help="the longest answer (default: 1024)")
    command.add_argument("--max-running", type=int, default=32, help="answers made at a time (default: 32)")
    command.set_defaults(run=serve)


def serve(options: argparse.Namespace) -> None:
    if options.key is not None and options.no_key:
        raise ConfigError("--key and --no-key exclude each other")
    if options.key == "":
        raise ConfigError("--key is empty; --no-key asks for none")
    if not 0 <= options.port < 1 << 16:
        raise ConfigError(f"--port is {options.port}; ports go up to 65535, and 0 takes one that is free")
    name = model_of(options.model)
    use_model_cache()
    observers = make_observers()
    with loading(name, observers) as ending:
        try:
            server, engine = _build(options, name)
            keep_what_is_loaded()
        finally:
            observers.close()
        ending.said = "before it served"
        try:
            asyncio.run(_serve(server, engine, options))
        finally:
            gc.unfreeze()


def model_of(given: str) -> str:
    """The name or directory of a model; of a run directory the newest weights that it exported."""
    exported = Path(given) / "hf"
    if not exported.is_dir():
        return given
    if (exported / "final").is_dir():
        return str(exported / "final")
    steps = {int(n): path for path in exported.glob("step-*") if (n := path.name.removeprefix("step-")).isdecimal()}
    if not steps:
        raise ConfigError(
            f"run {given} has exported no weights yet; it does so when it ends, and every hf_interval steps"
        )
    return str(steps[max(steps)])


def _build(options: argparse.Namespace, name: str) -> tuple[Any, Any]:
    try:
        from penstock.agent_loop.session.alone import EngineServer, require_guarded
    except ImportError as error:
        raise ConfigError(f"serving needs {error.name}; install penstock[serve]") from None
    from penstock.agent_loop.parsers import find_parser
    from penstock.engine import EmbeddedEngineConfig, EnginesConfig
    from penstock.models import load_tokenizer, model_context, resolve_model
    from penstock.rollout import SampleParams

    key = "" if options.no_key else options.key
    require_guarded(options.host, key)
    parser = find_parser(options.tool_parser)
    try:
        params = SampleParams(max_tokens=options.max_tokens)
        engines = EnginesConfig(engine=EmbeddedEngineConfig(max_running=options.max_running))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    directory = resolve_model(name)
    tokenizer = load_tokenizer(directory)
    engine = engines.build(str(directory), tokenizer)
    server = EngineServer(
        engine,
        tokenizer,
        sample_params=params,
        parser=parser,
        context=model_context(directory),
        models=(Path(options.model).name,),
        host=options.host,
        port=options.port,
        key=key,
    )
    return server, engine


async def _serve(server: Any, engine: Any, options: argparse.Namespace) -> None:
    """Until a signal comes."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, ended.set)
    try:
        await server.start()
        await engine.check_health()
        say("\n".join(_greeting(server)))
        await ended.wait()
    finally:
        await server.close()
        await engine.close()


def _greeting(server: Any) -> list[str]:
    body = json.dumps({"model": server.models[0], "messages": [{"role": "user", "content": "Hello!"}]})
    given = f" -H 'Authorization: Bearer {server.key}'" if server.key else ""
    return [
        f"serving {server.models[0]}; Ctrl-C ends it",
        f"  base URL  {server.base_url}",
        f"  key       {server.key or 'none is asked for'}",
        f"  curl {server.base_url}/chat/completions{given} -H 'Content-Type: application/json' -d '{body}'",
    ]
