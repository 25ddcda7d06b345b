"""The benchmark's HTTP client: whatever a server does, an answer or one plain error."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from launch.bench_http import Session

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
Serve = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def server(serve: Serve) -> AsyncIterator[tuple[Session, list[int]]]:
    """A session with a server that lets `serve` answer each request; and how many connections it has seen."""
    connections: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(len(connections))
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                await serve(head + await reader.readexactly(length), writer)
        writer.close()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    try:
        async with (
            asyncio.timeout(10),
            Session(f"http://127.0.0.1:{port}/v1", {"Authorization": "Bearer k"}) as session,
        ):
            yield session, connections
    finally:
        listening.close()


async def ask(session: Session) -> tuple[int, bytes, list[bytes]]:
    pieces: list[bytes] = []
    answer = await session.post("/completions", b"{}", lambda now, piece: pieces.append(piece))
    return answer.status, answer.body, pieces


async def test_pieces_come_as_they_are_written_and_the_connection_is_used_again() -> None:
    asked: list[bytes] = []

    async def serve(request: bytes, writer: asyncio.StreamWriter) -> None:
        asked.append(request)
        writer.write(CHUNKED)
        for piece in (b"5\r\none\r\n\r\n", b"5\r\ntwo\r\n\r\n", b"0\r\n\r\n"):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.05)

    async with server(serve) as (session, connections):
        for _ in range(3):
            assert await ask(session) == (200, b"", [b"one\r\n", b"two\r\n"])
        assert connections == [0]
        await asyncio.gather(ask(session), ask(session))
        assert connections == [0, 1]  # one request at a time on each
    assert asked[0].startswith(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"Authorization: Bearer k\r\n" in asked[0] and asked[0].endswith(b"Content-Length: 2\r\n\r\n{}")


async def test_a_refusal_has_its_body_and_feeds_nothing() -> None:
    async def serve(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 503 X\r\nContent-Length: 4\r\n\r\nfull")

    async with server(serve) as (session, connections):
        assert await ask(session) == (503, b"full", [])
        assert await ask(session) == (503, b"full", [])
        assert connections == [0]


@pytest.mark.parametrize("end", [b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx", b"eof"])
async def test_a_connection_that_ends_with_its_answer_is_not_used_again(end: bytes) -> None:
    async def serve(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(end if end != b"eof" else b"HTTP/1.1 200 OK\r\n\r\nx")
        writer.close()

    async with server(serve) as (session, connections):
        assert await ask(session) == (200, b"", [b"x"])
        assert await ask(session) == (200, b"", [b"x"])
        assert connections == [0, 1]


@pytest.mark.parametrize(
    ("bytes_", "message"),
    [
        (b"", "the server closed the connection"),
        (CHUNKED + b"5\r\none", "the server closed the connection"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\none", "the server closed the connection"),
        (b"SSH-2.0\r\n\r\n", "what came is not HTTP"),
    ],
)
async def test_an_answer_that_breaks_off_is_an_error(bytes_: bytes, message: str) -> None:
    async def serve(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes_)
        writer.close()

    async with server(serve) as (session, _):
        with pytest.raises(OSError, match=message):
            await ask(session)


async def test_what_the_caller_makes_of_a_piece_may_fail() -> None:
    async def serve(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + b"1\r\nx\r\n")

    def feed(now: float, piece: bytes) -> None:
        raise ValueError("not JSON")

    async with server(serve) as (session, connections):
        for _ in range(2):
            with pytest.raises(ValueError, match="not JSON"):
                await session.post("/completions", b"{}", feed)
        assert connections == [0, 1]


async def test_a_caller_that_gives_up_takes_its_connection_with_it() -> None:
    async def serve(request: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    async with server(serve) as (session, connections):
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await ask(session)
        assert connections == [0, 1]


def test_what_is_no_url_is_refused() -> None:
    for base in ("ftp://x/v1", "http:///v1", "nothing"):
        with pytest.raises(ValueError, match="not an http or https URL"):
            Session(base)


async def test_nobody_there() -> None:
    async with Session("http://127.0.0.1:1/v1") as session:
        with pytest.raises(OSError, match=r"127\.0\.0\.1"):
            await ask(session)
