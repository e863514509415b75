"""The endpoint over an engine alone: every request is a session of its own, and nothing is kept.

For trying a model with any client. The client's sampling holds, and its answers are dropped when it is gone.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Any

import msgspec

from penstock.agent_loop.asking import Asked
from penstock.agent_loop.parsers import Parser
from penstock.agent_loop.rendering import Seams
from penstock.agent_loop.session.app import make_app
from penstock.agent_loop.session.exchange import Answers
from penstock.agent_loop.session.reply import Reply
from penstock.agent_loop.session.requests import Asking, Refused, bad_request
from penstock.agent_loop.session.server import ASK_FOR_KEY, Listener, is_loopback
from penstock.agent_loop.session.session import Session, SessionRules
from penstock.agent_loop.transcript import Transcript
from penstock.errors import ConfigError
from penstock.ports import Engine, Tokenizer
from penstock.rollout import Prompt, RolloutState, SampleParams


def require_guarded(host: str, key: str | None) -> None:
    """Raises ConfigError for an address that others can reach without a key."""
    if key == "" and not is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines; without a key it would serve everybody. Give a key, or "
            "none at all to have one drawn, or listen on 127.0.0.1"
        )


class EngineServer:
    """Whoever builds it closes it, and the engine."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        sample_params: SampleParams,
        parser: Parser | None,
        context: int,
        models: tuple[str, ...],
        host: str = "127.0.0.1",
        port: int = 0,
        key: str | None = None,
    ) -> None:
        """`key` is drawn at random when there is none; an empty one lets everybody in who can reach the socket.

        Raises ConfigError for an empty one on an address that others can reach.
        """
        require_guarded(host, key)
        self.models = models
        self.key = "sk-" + secrets.token_urlsafe(24) if key is None else key
        self._engine = engine
        self._tokenizer = tokenizer
        self._sample_params = sample_params
        self._parser = parser
        self._seams = Seams(tokenizer)
        self._rules = SessionRules(context=context)
        self._open: dict[Reply, Session] = {}
        self._number = 0
        self._listener = Listener(make_app(self), host=host, port=port)

    @property
    def base_url(self) -> str:
        return f"{self._listener.url}/v1"

    def admit(self, session: str, key: str) -> Answers:
        if not hmac.compare_digest(key.encode("utf-8", "surrogatepass"), self.key.encode()) and self.key:
            raise Refused(401, "the key is missing or wrong", code="invalid_api_key", headers=ASK_FOR_KEY)
        return self

    def ask(self, asking: Asking, *, request: bytes = b"", retried: bool = False) -> Reply:
        session = self._session(asking)
        reply = session.ask(asking)
        self._open[reply] = session
        return reply

    def count(self, asking: Asking) -> int:
        return self._session(asking).count(asking)

    def ended(self, reply: Reply, *, delivered: bool) -> None:
        self._open.pop(reply).drop()

    async def start(self) -> None:
        """Raises ConfigError when the address cannot be had."""
        await self._listener.start()

    async def wait(self) -> None:
        await self._listener.wait()

    async def close(self) -> None:
        await self._listener.close()

    def _session(self, asking: Asking) -> Session:
        self._number += 1
        name = f"request-{self._number}"
        params = self._params(asking)
        rollout = RolloutState(prompt=Prompt(), task_name="serve", group_id=name, rollout_id=name)
        asked = Asked(
            engine=self._engine,
            tokenizer=self._tokenizer,
            sample_params=params,
            run_seed=int(asking.sampling.get("seed", secrets.randbits(62))),
        )
        return Session(
            Transcript(rollout, asked),
            tokenizer=self._tokenizer,
            sample_params=params,
            rules=self._rules,
            parser=self._parser,
            seams=self._seams,
        )

    def _params(self, asking: Asking) -> SampleParams:
        sampling: dict[str, Any] = {name: value for name, value in asking.sampling.items() if name != "seed"}
        try:
            return msgspec.structs.replace(self._sample_params, **sampling)
        except ValueError as error:
            raise bad_request(str(error)) from None
