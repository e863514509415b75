"""Frames over a socket to a process of our own: a 4-byte length, then the body."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


class Channel:
    """This end. Belongs to no event loop while nobody waits on it."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.setblocking(False)

    def send_at_once(self, body: bytes) -> None:
        """A frame that a fresh socket's buffer takes. Raises OSError when the other side is gone."""
        self._socket.send(framed(body))

    async def send(self, body: bytes, descriptor: int | None = None) -> None:
        """With a descriptor for the other side, if there is one: it goes with the length, on a socket that is idle."""
        loop = asyncio.get_running_loop()
        if descriptor is None:
            await loop.sock_sendall(self._socket, framed(body))
        else:
            socket.send_fds(self._socket, [struct.pack(">I", len(body))], [descriptor])
            await loop.sock_sendall(self._socket, body)

    async def receive(self, max_size: int) -> bytes:
        """Raises EOFError when the other side is gone, ValueError for a frame that is too long."""
        (size,) = struct.unpack(">I", await self._read(4))
        if size > max_size:
            raise ValueError(f"a frame of {size} bytes")
        return await self._read(size)

    async def _read(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        body = bytearray()
        while len(body) < size:
            chunk = await loop.sock_recv(self._socket, min(size - len(body), 1 << 20))
            if not chunk:
                raise EOFError
            body += chunk
        return bytes(body)

    def close(self) -> None:
        # Before closing: a reader that is removed later would take the next socket with this number along.
        with contextlib.suppress(RuntimeError):  # no loop runs
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._socket)
            loop.remove_writer(self._socket)
        self._socket.close()
