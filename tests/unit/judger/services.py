"""A judge's service that does what the answer it is given says: right, wrong, late or not at all."""

import asyncio
import contextlib
import json

HUGE = 100 << 20

Reply = tuple[int, bytes, dict[str, str]]


def scored(command: str) -> Reply:
    """What a service that judges one answer says."""
    if command.startswith("score "):
        return 200, command.removeprefix("score ").encode(), {}
    answers = {
        "fine": b'{"score": 0.5, "style": 0.25, "text": "well"}',
        "number": b"0.75",
        "nan": b'{"score": NaN}',
        "inf": b'{"score": 1e999}',
        "string": b'{"score": "high"}',
        "missing": b'{"points": 1}',
        "null": b"null",
        "wrong json": b'{"score": 1',
        "empty": b"",
        "deep": b"[" * 100_000,
    }
    if command in answers:
        return 200, answers[command], {}
    if command == "redirect":
        return 302, b"", {"location": "http://127.0.0.1:9/elsewhere"}
    if command == "gzip":
        return 200, b"\x1f\x8b", {"content-encoding": "gzip"}
    return int(command) if command.isdigit() else 400, b"sorry", {}


def chat(content: str, finish_reason: str = "stop") -> bytes:
    return json.dumps({"choices": [{"message": {"content": content}, "finish_reason": finish_reason}]}).encode()


class Service:
    """`async with Service() as service`: listens on `service.url`. `seen` has the requests, decoded.

    `command` finds what to do in a request: hang, crash, half, huge, slow or once, before `answer` is asked.
    """

    def __init__(self, answer=None, command=lambda asked: str(asked.get("response", ""))) -> None:
        self._command = command
        self._answer = answer or (lambda asked: scored(str(asked.get("response", asked.get("responses")))))
        self.seen: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""
        self._flaky: set[str] = set()

    async def __aenter__(self) -> "Service":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}/judge"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        if hasattr(self._server, "close_clients"):
            self._server.close_clients()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                headers = {}
                for line in head.decode().splitlines()[1:]:
                    name, _, value = line.partition(":")
                    headers[name.lower()] = value.strip()
                asked = json.loads(await reader.readexactly(int(headers.get("content-length", 0))))
                self.seen.append(asked)
                self.headers.append(headers)
                if not await self._reply(asked, writer):
                    break
        writer.close()

    async def _reply(self, asked: dict, writer: asyncio.StreamWriter) -> bool:
        command = self._command(asked)
        if command == "hang":
            await asyncio.sleep(3600)
        if command == "crash":
            writer.transport.abort()
            return False
        if command == "slow":
            await asyncio.sleep(0.05)
            command = asked["response"] = "fine"
        if command.startswith("once "):
            if command not in self._flaky:
                self._flaky.add(command)
                asked = asked | {"response": "503"}
            else:
                asked = asked | {"response": command.removeprefix("once ")}
        if command == "half":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n" + b'{"score": 1')
            await writer.drain()
            return False
        if command == "huge":
            writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {HUGE}\r\n\r\n".encode())
            for _ in range(HUGE >> 16):
                writer.write(b"1" * (1 << 16))
                await writer.drain()
            return True
        status, body, headers = self._answer(asked)
        lines = [f"HTTP/1.1 {status} OK", f"content-length: {len(body)}", *(f"{k}: {v}" for k, v in headers.items())]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        await writer.drain()
        return True
