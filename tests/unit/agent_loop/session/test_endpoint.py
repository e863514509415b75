"""The endpoint over real sockets: with the clients of OpenAI and Anthropic, and with those who mean no good."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from session_clients import Talk, user
from starlette.routing import Mount, Route

from penstock.agent_loop.session.agents import in_thread
from penstock.agent_loop.session.app import SESSION, make_app
from penstock.agent_loop.session.server import Access, SessionServer
from penstock.agent_loop.session.session import SessionRules
from penstock.rollout import ROOT
from penstock.testing import EngineFaults

if TYPE_CHECKING:  # Their imports take seconds, and every test process collects this file.
    import anthropic
    import openai

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
HELLO = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


class Served(Talk):
    server: SessionServer
    access: Access

    @property
    def root(self) -> str:
        return self.access.base_url.removesuffix("/v1")

    def http(self, key: str | None = None) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.access.key if key is None else key}"} if key != "" else {}
        return httpx.AsyncClient(base_url=self.root, headers=headers, timeout=20)

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        import openai

        return openai.AsyncOpenAI(base_url=self.access.base_url, api_key=self.access.key, **options)

    def anthropic(self) -> anthropic.AsyncAnthropic:
        import anthropic

        return anthropic.AsyncAnthropic(base_url=self.root, api_key=self.access.key)


@contextlib.asynccontextmanager
async def serving(*texts: Any, max_body: int = 1 << 20, **options: Any) -> AsyncGenerator[Served, None]:
    talk = Served(*texts, **options)
    talk.server = SessionServer(max_body=max_body)
    await talk.server.start()
    name, talk.access = talk.server.open(talk.session)
    try:
        yield talk
    finally:
        talk.server.shut(name)
        await talk.over()
        await talk.server.close()


def serve(main: Callable[[Served], Awaitable[None]], *texts: Any, **options: Any) -> Served:
    async def whole() -> Served:
        async with serving(*texts, **options) as talk:
            await main(talk)
        return talk

    return asyncio.run(whole())


# The clients that people have.

THREE_TURNS = [CALL, "It is 3.", "bye"]


def three_turns_of_openai(client: openai.OpenAI, *, stream: bool) -> None:
    """As anybody writes it who knows the client and nothing of what is behind it."""
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    while len(messages) < 6:
        if stream:
            text, calls = "", {}
            for chunk in client.chat.completions.create(model="m", messages=messages, tools=[TOOL], stream=True):
                delta = chunk.choices[0].delta
                text += delta.content or ""
                calls |= {call.index: call.model_dump(exclude={"index"}) for call in delta.tool_calls or ()}
            message: Any = {"role": "assistant", "content": text}
            message |= {"tool_calls": list(calls.values())} if calls else {}
            called = message.get("tool_calls", [])
        else:
            choice = client.chat.completions.create(model="m", messages=messages, tools=[TOOL]).choices[0]
            message, called = choice.message, [call.model_dump() for call in choice.message.tool_calls or ()]
        messages.append(message)
        for call in called:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "3"})
        if not called:
            messages.append({"role": "user", "content": "thanks"})


async def three_turns_of_async_openai(client: openai.AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    while len(messages) < 6:
        answer = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
        message = answer.choices[0].message
        messages.append(message.model_dump())
        if message.tool_calls:
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in message.tool_calls]
        else:
            messages.append({"role": "user", "content": "thanks"})


def three_turns_of_anthropic(client: anthropic.Anthropic, *, stream: bool) -> None:
    tools: Any = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}]
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    while len(messages) < 6:
        options: Any = {"model": "m", "max_tokens": 200, "messages": messages, "tools": tools}
        if stream:
            with client.messages.stream(**options) as streamed:
                answer: Any = streamed.get_final_message()
        else:
            answer = client.messages.create(**options)
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "3"}
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results or "thanks"})


async def play_with(client: str, talk: Served) -> None:
    import anthropic
    import openai

    known: Any = {"base_url": talk.access.base_url, "api_key": talk.access.key, "max_retries": 0}
    name, _, how = client.partition(" ")
    if client == "openai async":
        async with talk.openai() as opened:
            await three_turns_of_async_openai(opened)
    elif name == "openai":
        await in_thread(lambda: three_turns_of_openai(openai.OpenAI(**known), stream=how == "stream"), name="client")
    else:
        own = known | {"base_url": talk.root} if how != "openai's url" else known
        await in_thread(
            lambda: three_turns_of_anthropic(anthropic.Anthropic(**own), stream=how == "stream"), name="client"
        )


@pytest.mark.parametrize(
    "client", ["openai", "openai stream", "openai async", "anthropic", "anthropic stream", "anthropic openai's url"]
)
def test_an_unmodified_client_has_a_conversation_of_three_turns_with_a_tool(client: str) -> None:
    talk = serve(lambda talk: play_with(client, talk), *THREE_TURNS)
    talk.require_exact()
    ((parent, _, runs),) = talk.shape
    assert parent == ROOT
    assert [text for text, trained in runs if trained] == [text + "<|im_end|>" for text in THREE_TURNS]
    assert "<tool_response>\n3\n</tool_response>" in runs[2][0]


def test_text_is_streamed_while_the_engine_is_at_work() -> None:
    async def main(talk: Served) -> None:
        text, seen_early = "", False
        async with talk.openai() as client:
            streamed = await client.chat.completions.create(
                model="m", messages=[user("hello")], stream=True, stream_options={"include_usage": True}
            )
            async for chunk in streamed:
                if chunk.choices:
                    text += chunk.choices[0].delta.content or ""
                    seen_early = seen_early or bool(text and not talk.engine.asked)
                else:
                    assert chunk.usage is not None and chunk.usage.completion_tokens > 20
        assert text == "word " * 20
        assert seen_early

    serve(main, "word " * 20, tokens_per_s=100.0)


def test_a_client_that_lost_patience_and_asks_again_joins_its_answer() -> None:
    async def main(talk: Served) -> None:
        async with talk.openai(timeout=0.3, max_retries=5) as client:
            answer = await client.chat.completions.create(model="m", messages=[user("hello")])
            assert answer.choices[0].message.content == "slow"

    talk = serve(main, "slow", latency_s=lambda _: 1.0)
    assert talk.shape == [(ROOT, HELLO, [("slow<|im_end|>", True)])]


def test_an_answer_that_nobody_took_is_not_trained() -> None:
    async def main(talk: Served) -> None:
        async with talk.http() as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/chat/completions", json=chat(), timeout=0.2)
        await talk.engine.is_done.wait()

    talk = serve(main, "lost", latency_s=lambda _: 0.5)
    assert talk.shape == [(ROOT, HELLO, [("lost<|im_end|>", False)])]


def test_completions_and_models_and_counts_are_served() -> None:
    async def main(talk: Served) -> None:
        async with talk.openai() as client:
            answer = await client.completions.create(model="m", prompt="Once", max_tokens=50)
            assert answer.choices[0].text == " upon"
            streamed = await client.completions.create(model="m", prompt="Twice", max_tokens=50, stream=True)
            assert "".join([chunk.choices[0].text async for chunk in streamed]) == " over"
            assert [model.id async for model in client.models.list()] == ["penstock"]
        async with talk.anthropic() as other:
            count = await other.messages.count_tokens(model="m", messages=[{"role": "user", "content": "hello"}])
            assert count.input_tokens == len(talk.rollout.prompt.ids) // 4

    talk = serve(main, " upon", " over")
    assert len(talk.rollout.turns) == 4


def test_errors_have_the_shape_of_the_api_that_was_called() -> None:
    import anthropic
    import openai

    hello: Any = [user("hello")]

    async def ask_openai(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="one answer is made per request") as refused:
            await client.chat.completions.create(model="m", messages=hello, n=2)
        assert refused.value.type == "invalid_request_error"
        with pytest.raises(openai.NotFoundError, match="is not served"):
            await client.embeddings.create(model="m", input="x")
        await client.chat.completions.create(model="m", messages=hello)
        with pytest.raises(openai.BadRequestError, match="its 1 turns") as limit:
            await client.chat.completions.create(model="m", messages=hello)
        assert limit.value.code == "session_limit"

    async def ask_anthropic(client: anthropic.AsyncAnthropic) -> None:
        image: Any = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": {}}]}
        with pytest.raises(anthropic.BadRequestError, match="only text") as refused:
            await client.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": [image]}])
        assert isinstance(refused.value.body, dict)
        assert refused.value.body["error"]["type"] == "invalid_request_error"
        with pytest.raises(anthropic.BadRequestError, match="its 1 turns"):
            await client.messages.create(model="m", max_tokens=5, messages=hello)

    async def main(talk: Served) -> None:
        async with talk.openai() as first, talk.anthropic() as second:
            await ask_openai(first)
            await ask_anthropic(second)

    serve(main, "one", rules=SessionRules(max_turns=1))


def test_an_engine_that_fails_is_an_error_that_clients_try_again() -> None:
    async def main(talk: Served) -> None:
        async with talk.http() as client:
            failed = await client.post("/v1/chat/completions", json=chat())
            assert (failed.status_code, failed.json()["error"]["code"]) == (503, "engine_error")
            talk.engine.faults = EngineFaults()
            assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200

    talk = serve(main, "one", faults=EngineFaults(fails=1.0))
    assert talk.shape == [(ROOT, HELLO, [("one<|im_end|>", True)])]


# Who may come in.


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [user("hello")], **fields}


def routes_of(talk: Served) -> list[tuple[str, str]]:
    """Every method of every route, from the application itself."""
    found = []
    for mount in make_app(talk.server, prefix=SESSION).routes:
        assert isinstance(mount, Mount)
        for route in mount.routes:
            assert isinstance(route, Route)
            found += [(method, route.path) for method in route.methods or ()]
    return found


def test_no_route_lets_anybody_in_without_the_key_of_its_session() -> None:
    async def main(talk: Served) -> None:
        other = Served("x")
        name, access = talk.server.open(other.session)
        routes = routes_of(talk)
        assert len(routes) >= 10
        for key, status in (("", 401), ("wrong", 401), (talk.access.key + "x", 401), (access.key, 403)):
            async with talk.http(key) as client:
                for method, path in routes:
                    response = await client.request(method, path, content=json.dumps(chat(max_tokens=5)))
                    assert response.status_code == status, (method, path, key)
                    kind = "authentication_error" if status == 401 else "permission_error"
                    assert method == "HEAD" or response.json()["error"]["type"] == kind
        talk.server.shut(name)
        async with httpx.AsyncClient(headers={"x-api-key": access.key}) as client:
            gone = await client.post(access.base_url + "/chat/completions", json=chat())
            assert gone.status_code == 401
        assert not talk.engine.asked and not other.engine.asked
        assert talk.rollout.turns == other.rollout.turns == ()

    serve(main, "never")


WRONG: list[Any] = [None, True, -1, 0, 1.5, 10**30, "", "x", [], [[]], {}, {"a": 1}, [None], [1, "x"], "\x00", [{}]]


def malformed(rng: random.Random) -> bytes:
    """Certainly nothing that could be answered."""
    kind = rng.randrange(5)
    if kind == 0:
        return rng.randbytes(rng.randint(0, 60))
    if kind == 1:
        whole = json.dumps(chat()).encode()
        return whole[: rng.randint(0, len(whole) - 1)]
    if kind == 2:
        return json.dumps(rng.choice(WRONG)).encode()
    if kind == 3:
        return b"[" * rng.choice([10, 2000]) + b"]" * rng.randint(0, 5)
    broken = chat(max_tokens=5)
    field, values = rng.choice(
        [
            ("messages", [value for value in WRONG if value != "x"]),
            ("model", [value for value in WRONG if not isinstance(value, str)]),
            ("max_tokens", [-1, 0, 1.5, 10**30, "x", [], {}]),
            ("stream", [1, "x", [], {}]),
            ("stop", [1, {}, [1], [[]]]),
            ("tools", [1, "x", {}, [1], [{}], [{"type": "function"}], [{"function": {"name": 1}}]]),
            ("temperature", ["x", [], {}]),
        ]
    )
    broken[field] = rng.choice(values)
    if field == "messages" and rng.random() < 0.5:
        broken["messages"] = [
            rng.choice(
                [
                    {"role": "nobody", "content": "x"},
                    {"role": "user", "content": {"a": 1}},
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
                    {"content": "x"},
                    {"role": "assistant", "content": "x"},
                    {"role": "assistant", "tool_calls": [{"id": 1}]},
                ]
            )
        ]
    if field in ("stop", "temperature"):  # other words on Anthropic's wire, where they are not known
        broken["messages"] = []
    return json.dumps(broken).encode()


def test_a_thousand_malformed_bodies_are_refused_and_nothing_is_recorded() -> None:
    async def main(talk: Served) -> None:
        rng = random.Random(0)
        statuses = []
        async with talk.http() as client:
            for number in range(1000):
                path = ("/v1/chat/completions", "/v1/messages", "/v1/completions")[number % 3]
                response = await client.post(path, content=malformed(rng))
                assert 400 <= response.status_code < 500, (path, response.request.content, response.text)
                assert response.json()["error"]["message"]
                statuses.append(response.status_code)
        assert len(statuses) == 1000
        assert talk.rollout.turns == () and talk.rollout.segments == () and not talk.engine.asked

    serve(main, "never")


def test_a_retry_count_of_any_length_is_read() -> None:
    async def main(talk: Served) -> None:
        async with talk.http() as client:
            headers = {"x-stainless-retry-count": "9" * 5000}
            answer = await client.post("/v1/chat/completions", json=chat(), headers=headers)
            assert answer.status_code == 200

    serve(main, "one")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_a_hundred_megabytes_is_cut_off_early(chunked: bool) -> None:
    async def main(talk: Served) -> None:
        sent, answer = await in_thread(lambda: flood(talk, chunked), name="client")
        assert b" 413 " in answer.splitlines()[0]
        assert sent < 20 << 20
        async with talk.http() as client:
            assert (await client.get("/v1/models")).status_code == 200

    serve(main, "never", max_body=1 << 20)


def flood(talk: Served, chunked: bool) -> tuple[int, bytes]:
    """Sends until the server has enough; returns how much that was, and what it said."""
    url = httpx.URL(talk.access.base_url)
    with socket.create_connection((url.host, url.port or 0), timeout=20) as connection:
        length = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % (100 << 20)
        connection.sendall(
            b"POST %s/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n%s\r\n\r\n"
            % (url.path.encode(), talk.access.key.encode(), length)
        )
        piece, sent = b"x" * (1 << 16), 0
        with contextlib.suppress(ConnectionError):
            while sent < 100 << 20:
                connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
                sent += len(piece)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while data := connection.recv(1 << 16):
                answer += data
        return sent, answer or b"HTTP/1.1 413 (the connection was reset before it was read)"
