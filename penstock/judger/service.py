"""Judges behind HTTP: what is asked of any service, and HTTPJudger, which posts a rollout and reads a score.

A service's answer counts only whole and with a 2xx status. Redirects are not followed: what is judged goes to the
address that was configured. An answer is read up to `max_answer_bytes`; more of it is never held in memory.

    POST {"prompt": [messages], "response": "...", "label": ..., "data_source": "...", "extra_info": {...}}
    200  0.5, or {"score": 0.5, "other numbers": ..., "text": "..."}

With `per_group` a group goes in one request, `"responses": [...]` in place of `"response"`, and the answer is a list.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import httpx
import msgspec
import pydantic

from penstock.judger.contract import Answer, Calls, ContractConfig, ContractJudger, Count, Try
from penstock.judger.failure import CallFailed
from penstock.judger.native import as_answers, as_verdict
from penstock.judger.slots import NoSlot, Slots
from penstock.judger.worker import judge_value
from penstock.ports import Judger, Local, Placement
from penstock.rollout import Group

MAY_PASS = (408, 409, 425, 429)
"""Client errors that another try may not meet."""
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e\t]*[\x21-\x7e])?|")
SHOWN_BYTES = 300
"""Of an answer that is refused."""


class ServiceConfig(ContractConfig):
    """What every judge behind HTTP has."""

    retry_backoff_s: Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)] = 0.5
    """Wait before the first repetition; doubles."""
    headers: dict[str, pydantic.SecretStr] = {}
    """Sent with every request. Their values are in no file that a run writes."""
    api_key: pydantic.SecretStr | None = None
    """Sent as `Authorization: Bearer`."""
    max_answer_bytes: Count = 1 << 20
    """Of a service's answer; a longer one is none."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        for name, value in self.headers.items():
            if not _HEADER_NAME.fullmatch(name):
                yield f"headers has {name!r}, which is no name of a header: letters, digits and hyphens"
            # What it is instead is not said: it may be a secret.
            if not _HEADER_VALUE.fullmatch(value.get_secret_value()):
                yield f"headers[{name!r}] has a line break, a space at an end or a character that no header can have"
        if self.api_key is not None and not _HEADER_VALUE.fullmatch(self.api_key.get_secret_value() or "\n"):
            yield (
                "api_key is empty, or has a line break or another character that no header can have; "
                "strip it if it was read from a file"
            )


class Service:
    """One address. Raises CallFailed, and nothing else."""

    def __init__(self, url: str, config: ServiceConfig) -> None:
        self._url = url
        self._config = config
        self._slots = Slots(config.max_concurrency)
        self._calls = Calls()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clients: set[httpx.AsyncClient] = set()
        self._idle: list[httpx.AsyncClient] = []
        self._certificates: ssl.SSLContext | Literal[False] | None = None

    async def post(self, content: Any, wait_until: float) -> bytes:
        """The body of a whole 2xx answer. Waits for its turn until the loop's time `wait_until`."""
        try:
            body = msgspec.json.encode(content)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CallFailed("start", f"the rollout cannot be sent as JSON: {error}", may_pass=False) from None
        try:
            async with self._slots.take(wait_until):
                return await self._calls.within(self._config.timeout_s, self._exchange(body))
        except NoSlot:
            raise CallFailed("busy", f"all {self._slots.size} concurrent calls were taken") from None

    async def _exchange(self, body: bytes) -> bytes:
        client = None
        try:
            client = self._take()
            async with client.stream("POST", self._url, content=body) as response:
                if "content-encoding" in response.headers:
                    encoding = response.headers["content-encoding"]
                    raise _refused(f"answered in {encoding[:40]!r}, which was not asked for", may_pass=False)
                if response.is_success:
                    return await self._read(response)
                raise await _wrong_status(response)
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, OSError, ValueError) as error:
            raise CallFailed("service", f"no answer from {self._url}: {type(error).__name__}: {error}"[:500]) from None
        finally:
            if client is not None and client in self._clients:
                self._idle.append(client)

    async def _read(self, response: httpx.Response) -> bytes:
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > self._config.max_answer_bytes:
                raise _refused(f"answered with more than max_answer_bytes, {self._config.max_answer_bytes} bytes")
        return bytes(body)

    def _take(self) -> httpx.AsyncClient:
        """A client of one connection. One client of many looks at all of them for every request."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # a client belongs to the loop that made it
            self._loop, self._clients, self._idle = loop, set(), []
        if self._idle:
            return self._idle.pop()
        config = self._config
        headers = {name: value.get_secret_value() for name, value in config.headers.items()}
        headers |= {"content-type": "application/json", "accept-encoding": "identity"}
        if config.api_key is not None:
            headers["authorization"] = f"Bearer {config.api_key.get_secret_value()}"
        if self._certificates is None:
            # For https only: else certificates are read for nothing, on the event loop.
            self._certificates = httpx.create_ssl_context() if self._url.startswith("https:") else False
        client = httpx.AsyncClient(
            headers=headers,
            timeout=config.timeout_s,
            limits=httpx.Limits(max_connections=1),
            follow_redirects=False,
            verify=self._certificates,
            trust_env=False,  # no proxy, no password file: what is judged goes where the configuration says
        )
        self._clients.add(client)
        return client

    async def close(self) -> None:
        self._calls.close()
        clients, self._clients, self._idle = self._clients, set(), []
        if asyncio.get_running_loop() is self._loop:
            for client in clients:
                await client.aclose()


def _refused(what: str, *, may_pass: bool = True) -> CallFailed:
    """Of an answer that came and does not count; one that comes always is a service that cannot be the judge."""
    return CallFailed("service", f"the service {what}", way="" if may_pass else what, may_pass=may_pass)


async def _wrong_status(response: httpx.Response) -> CallFailed:
    status = response.status_code
    if response.is_redirect or 300 <= status < 400:
        to = response.headers.get("location", "nowhere")[:200]
        return _refused(f"answered {status}, a redirect to {to}; none is followed", may_pass=False)
    said = b""
    async for chunk in response.aiter_raw():
        said += chunk[: SHOWN_BYTES - len(said)]
        if len(said) >= SHOWN_BYTES:
            break
    shown = said.decode(errors="replace").strip()
    return _refused(f"answered {status}{f': {shown}' if shown else ''}", may_pass=status >= 500 or status in MAY_PASS)


def url_problems(url: str, field: str) -> Iterator[str]:
    """Why nothing can be posted there, for `Config.problems`."""
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        yield f"{field} is {url!r}; it is no URL: {error}"
        return
    if parsed.userinfo:
        shown = url.replace(parsed.userinfo.decode(), "...")
        yield f"{field} is {shown!r}; a password does not belong there: give api_key or headers, which nothing shows"
        return
    if parsed.scheme not in ("http", "https") or not parsed.host or re.search(r"\s", url):
        yield f"{field} is {url!r}; it must begin with http:// or https:// and name a host"
    elif parsed.port is not None and not 1 <= parsed.port <= 65535:
        yield f"{field} is {url!r}; a port is from 1 to 65535"


class HTTPJudgerConfig(ServiceConfig):
    """A service that is posted the rollout and answers with its score."""

    url: str
    """Where rollouts are posted."""
    per_group: bool = False
    """One request for a whole group; the answer is a list, null for what the service does not judge."""

    @property
    def actors_name(self) -> str:
        return f"judger {self.url}"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from url_problems(self.url, "url")

    def build(self, placement: Placement = Local()) -> Judger:  # noqa: B008 - it has no state
        return self.placed(placement, HTTPJudger)


class HTTPJudger(ContractJudger):
    def __init__(self, config: HTTPJudgerConfig) -> None:
        super().__init__(config.url, config)
        self.relative = config.per_group
        self._service = Service(config.url, config)

    async def call(self, group: Group, turn: Try) -> list[Answer]:
        body = await self._service.post(self._question(group), turn.wait_until)
        try:
            value = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise CallFailed("service", f"the service answered with what is no JSON: {error}") from None
        reply = judge_value(value, "group" if self.relative else "judge")
        if "unjudged" in reply:
            raise CallFailed("abstention", reply["unjudged"], way=reply["way"])
        return as_answers(reply, len(group)) if self.relative else [as_verdict(reply)]

    def _question(self, group: Group) -> dict[str, Any]:
        first = group[0]
        said: dict[str, Any] = {"response": first.response_text}
        if self.relative:
            said = {"responses": [rollout.response_text for rollout in group]}
        return {
            "prompt": first.messages,
            **said,
            "label": first.ground_truth,
            "data_source": first.data_source,
            "extra_info": first.extra_info,
        }

    async def close(self) -> None:
        await self._service.close()
