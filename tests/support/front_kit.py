"""A front end on a real socket, and a client that sends raw bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import ASGIApp

from baton.runtime.ports import bind
from coordinator.http.server import HttpServer


@contextlib.asynccontextmanager
async def running(
    app: ASGIApp, *, grace_s: float = 1.0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[HttpServer]:
    """Serves `app` on a free loopback port."""
    server = HttpServer(app, bind("127.0.0.1", 0, "--port", "HTTP"), grace_s=grace_s, tls=tls)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield server
    finally:
        server.stop()
        await task


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, server: HttpServer) -> RawClient:
        return cls(*await asyncio.open_connection(*server.address))

    @classmethod
    async def connect_to(cls, sock: socket.socket) -> RawClient:
        return cls(*await asyncio.open_connection(sock=sock))

    @classmethod
    async def connect_without_reading(cls, server: HttpServer) -> RawClient:
        """Connects with a small receive buffer in the kernel, and reads nothing."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, server.address)
        client = await cls.connect_to(sock)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        return client

    async def post(self, path: str, body: Any, *headers: str) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "Host: t", "Content-Type: application/json", f"Content-Length: {len(raw)}"]
        await self.send("\r\n".join([*lines, *headers]).encode() + b"\r\n\r\n" + raw)

    async def send(self, raw: bytes) -> None:
        self.writer.write(raw)
        await self.writer.drain()

    async def answer(self, timeout_s: float = 30.0) -> tuple[int, dict[str, str], bytes]:
        """Returns status, headers and body (only of responses that declare their length)."""
        async with asyncio.timeout(timeout_s):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
            return int(head[0].split(" ")[1]), headers, body

    async def closed(self, timeout_s: float = 5.0) -> bool:
        """Returns True once the server has closed the connection; times out otherwise."""
        async with asyncio.timeout(timeout_s):
            with contextlib.suppress(ConnectionError):
                while await self.reader.read(1 << 16):
                    pass
            return True

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()
