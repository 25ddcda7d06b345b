"""The app on a real socket: clients that disconnect, read slowly or send bad HTTP; start and stop."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import socket
import time
from typing import Any

import pytest
from starlette.applications import Starlette

from baton.core.errors import StartupError
from baton.runtime.ports import bind
from coordinator import connections as connection_limits
from coordinator.http import server as http_server
from coordinator.http.app import HttpSettings, create_app
from coordinator.submission import Delta
from coordinator.text.model import TextModel
from tests.support.fake_generator import FakeGenerator, reply
from tests.support.front_kit import RawClient, running
from tests.support.limits import Stall

TEXT = {"prompt": "Hello"}
FOREVER = 60.0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [[FOREVER], [Delta("a", (1,)), FOREVER]], ids=["prefill", "decode"])
async def test_client_disconnect_closes_the_generator_immediately(
    app: Starlette, generator: FakeGenerator, stream: bool, script: list[Delta | float]
) -> None:
    generator.script = script
    async with running(app) as server:
        client = await RawClient.connect(server)
        await client.post("/v1/completions", TEXT | {"stream": stream})
        await generator.until(submitted=1)
        await asyncio.sleep(0.02)
        with Stall() as stall:
            await client.close()
            await generator.until(finished=1)
        assert stall.took_s < stall.allows(2.0)


async def test_client_disconnect_removes_its_prompt_from_the_encoding_queue(
    app: Starlette, generator: FakeGenerator, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that still waits to be encoded is dropped when its client disconnects."""
    waiting, never = set[asyncio.Task[Any] | None](), asyncio.Event()

    async def encode_async(text: str, **_: Any) -> list[int]:
        waiting.add(asyncio.current_task())
        try:
            await never.wait()
        finally:
            waiting.discard(asyncio.current_task())
        return [1, 2]

    monkeypatch.setattr(text_model, "encode_async", encode_async)
    async with running(app) as server:
        clients = [await RawClient.connect(server) for _ in range(3)]
        for client in clients:
            await client.post("/v1/completions", TEXT)
        async with asyncio.timeout(FOREVER):
            while len(waiting) < 3:
                await asyncio.sleep(0.01)
            await clients[0].close()
            await clients[1].close()
            while len(waiting) > 1:
                await asyncio.sleep(0.01)
            never.set()
            await generator.until(submitted=1)
        await clients[2].close()
    assert not waiting and len(generator.submissions) == 1


async def test_slow_reader_pauses_its_stream_until_the_send_timeout_closes_it(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = FakeGenerator([Delta("x" * 200, (1,))] * 50, endless=True)
    monkeypatch.setattr(http_server, "SEND_TIMEOUT_S", 0.6)
    app = create_app(generator, text_model, HttpSettings("tiny"))
    async with running(app) as server:
        slow = await RawClient.connect_without_reading(server)
        await slow.post("/v1/completions", TEXT | {"stream": True})
        await generator.until(submitted=1)
        stuck_at = -1
        while generator.yielded != stuck_at:  # until the socket is full and no more deltas are requested
            stuck_at = generator.yielded
            await asyncio.sleep(0.2)
        assert generator.yielded * 350 < 300 << 10 and generator.finished == []
        await generator.until(finished=1)  # the stream is closed after SEND_TIMEOUT_S
        await slow.close()


async def test_client_that_reads_slowly_but_steadily_is_not_disconnected(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading all buffered output takes longer than the limit, but reading each part of it takes less."""
    generator = FakeGenerator([Delta("x" * 1_000_000, (1,)), *reply("y")])
    monkeypatch.setattr(http_server, "SEND_TIMEOUT_S", 0.8)
    app = create_app(generator, text_model, HttpSettings("tiny"))
    async with running(app) as server:
        loop, body, answer = asyncio.get_running_loop(), json.dumps(TEXT | {"stream": True}).encode(), b""
        head = f"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.setblocking(False)
            await loop.sock_connect(slow, server.address)
            await loop.sock_sendall(slow, f"{head}content-type: application/json\r\n\r\n".encode() + body)
            began = time.monotonic()
            while not answer.endswith(b"0\r\n\r\n"):
                await asyncio.sleep(0.01)
                part = await asyncio.wait_for(loop.sock_recv(slow, 8192), 5.0)
                assert part, f"cut after {len(answer)} bytes"
                answer += part
    assert answer.count(b"x") >= 1_000_000 and time.monotonic() - began > 0.8


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0_client_gets_no_chunks_and_the_end_of_the_connection(
    app: Starlette, generator: FakeGenerator, stream: bool
) -> None:
    generator.script = reply("Hel", "lo", " world")
    raw = json.dumps(TEXT | {"stream": stream}).encode()
    async with running(app) as server:
        client = await RawClient.connect(server)
        head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
        await client.send(head.encode() + raw)
        async with asyncio.timeout(30):
            answer = await client.reader.read(-1)  # up to the end of the connection
        start, _, body = answer.partition(b"\r\n\r\n")
        assert b" 200 OK" in start and b"connection: close" in start and b"transfer-encoding" not in start
        assert body.endswith(b"data: [DONE]\n\n" if stream else b"}")
        assert body.startswith(b"data: {" if stream else b"{")
        assert stream or b"content-length: %d" % len(body) in start


async def test_stop_lets_running_requests_finish(app: Starlette, generator: FakeGenerator) -> None:
    generator.script = [Delta("a", (1,)), 0.3, *reply("b")]
    async with running(app) as server:
        client, idle = [await RawClient.connect(server) for _ in range(2)]
        await client.post("/v1/completions", TEXT)
        await generator.until(submitted=1)
        server.stop()
        assert await idle.closed()
        status, headers, body = await client.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert json.loads(body)["choices"][0]["text"] == "ab"
        await client.close()
        await idle.close()


async def test_stop_ends_requests_that_exceed_the_grace_period(app: Starlette, generator: FakeGenerator) -> None:
    generator.script = [Delta("a", (1,)), FOREVER]
    async with running(app, grace_s=1) as server:
        streaming, whole = [await RawClient.connect(server) for _ in range(2)]
        await streaming.post("/v1/completions", TEXT | {"stream": True})
        await whole.post("/v1/completions", TEXT)
        await generator.until(submitted=2)
    assert len(generator.finished) == 2
    seen = await streaming.reader.read()
    assert b"[DONE]" not in seen and not seen.endswith(b"0\r\n\r\n")  # never a false finish
    status, _, body = await whole.answer()
    assert (status, json.loads(body)["error"]["code"]) == (503, "draining")
    await streaming.close()
    await whole.close()


async def test_port_in_use_is_reported_in_one_line(app: Starlette) -> None:
    async with running(app) as server:
        with pytest.raises(StartupError) as caught:
            bind(*server.address, "--port", "HTTP")
        host, port = server.address
        assert str(caught.value) == f"HTTP port {port} on {host} is in use; choose another with --port"
    with pytest.raises(StartupError, match=r"^HTTP port 1 on no-such-host\.invalid \(--port\) cannot be used: "):
        bind("no-such-host.invalid", 1, "--port", "HTTP")


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
BAD_HTTP = {
    "length and chunked": (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "two lengths": (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
    "signed length": (HEAD + b"Content-Length: +2\r\n\r\n{}", 400),
    "negative length": (HEAD + b"Content-Length: -2\r\n\r\n{}", 400),
    "length with a space": (HEAD + b"Content-Length: 2 3\r\n\r\n{}", 400),
    "chunked twice": (HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", 400),
    "space before the colon": (GET + b"Host : t\r\n\r\n", 400),
    "folded header": (GET + b"Host: t\r\nX: a\r\n b\r\n\r\n", 400),
    "bare line feeds": (b"GET /health HTTP/1.1\nHost: t\n\n", 400),
    "no version": (b"GET /health\r\n\r\n", 400),
    "not HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "chunk size not hex": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    "no host": (GET + b"\r\n", 400),
    "two hosts": (GET + b"Host: t\r\nHost: u\r\n\r\n", 400),
    "empty host": (GET + b"Host: \r\n\r\n", 400),
    "host with a path": (GET + b"Host: evil/health?x=\r\n\r\n", 400),
    "host with a user": (GET + b"Host: a@b\r\n\r\n", 400),
    "many headers": (GET + b"Host: t\r\n" + b"X: y\r\n" * 101 + b"\r\n", 431),
    "a long header": (GET + b"Host: t\r\nX: " + b"y" * 9000 + b"\r\n\r\n", 431),
    "long headers": (GET + b"Host: t\r\n" + (b"X: " + b"y" * 6000 + b"\r\n") * 3 + b"\r\n", 431),
    "an endless header": (GET + b"Host: t\r\nX: " + b"y" * 70_000, 431),
    "a long path": (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: t\r\n\r\n", 414),
    "body declared over the cap": (HEAD + b"Content-Length: 9999999\r\n\r\n", 413),
    "body over the cap in chunks": (HEAD + CHUNKED + (b"80000\r\n" + b" " * 0x80000 + b"\r\n") * 3, 413),
}


async def test_malformed_http_is_refused_with_the_standard_error_body(app: Starlette, generator: FakeGenerator) -> None:
    found = {}
    async with running(app) as server:
        for name, (raw, _) in BAD_HTTP.items():
            client = await RawClient.connect(server)
            await client.send(raw)
            found[name], _, body = await client.answer()
            error = json.loads(body)["error"]
            assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) < 250, name
            await client.close()
            again = await RawClient.connect(server)
            await again.send(GET + b"Host: t\r\n\r\n")
            assert (await again.answer())[0] == 200, name
            await again.close()
    assert found == {name: expected for name, (_, expected) in BAD_HTTP.items()}
    assert generator.submissions == []


async def test_slow_request_heads_and_bodies_time_out(text_model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.4)
    app = create_app(FakeGenerator(), text_model, HttpSettings("tiny", body_timeout_s=0.2))
    async with running(app) as server:
        silent, head, body = [await RawClient.connect(server) for _ in range(3)]
        await head.send(GET)
        await body.send(HEAD + b"Content-Length: 10\r\n\r\n{")
        assert (await head.answer())[0] == 408
        assert (await body.answer())[0] == 408
        for client in (silent, head, body):
            assert await client.closed()
            await client.close()


async def test_connections_support_keep_alive_and_pipelining(app: Starlette) -> None:
    async with running(app) as server:
        client = await RawClient.connect(server)
        await client.send((GET + b"Host: t\r\n\r\n") * 3)
        assert [(await client.answer())[0] for _ in range(3)] == [200, 200, 200]
        await client.post("/v1/completions", TEXT)
        assert (await client.answer())[0] == 200
        await client.close()


async def test_connections_over_the_limit_are_refused(app: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "MAX_CONNECTIONS", 2)
    async with running(app) as server:
        clients = [await RawClient.connect(server) for _ in range(3)]
        status, _, body = await clients[2].answer()
        assert (status, json.loads(body)["error"]["code"]) == (503, "overloaded")
        for client in clients:
            await client.close()


def test_one_address_cannot_use_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "MAX_CONNECTIONS", 8)
    connections = connection_limits.ConnectionLimit()
    assert [connections.opened("10.0.0.1") for _ in range(8)] == [True] * 6 + [False] * 2
    for _ in range(2):
        connections.closed("10.0.0.1")  # they were refused and are closed
    assert connections.opened("10.0.0.2") and connections.opened("10.0.0.2")
    assert not connections.opened("10.0.0.3")  # the limit for all addresses together
    for address in ["10.0.0.3"] + ["10.0.0.2"] * 2 + ["10.0.0.1"] * 6:
        connections.closed(address)
    assert connections._total == 0 and not connections._of
    assert [connections.opened("127.0.0.1") for _ in range(9)] == [True] * 8 + [False]  # loopback: may be a proxy


@pytest.mark.parametrize(
    ("hard", "line"),
    [
        (96, "at most 1 connections of clients: ulimit -Hn is 96; 16512 allow 16384"),
        (1024, "at most 896 connections of clients: ulimit -Hn is 1024; 16512 allow 16384"),
        (4096, ""),
        (connection_limits.resource.RLIM_INFINITY, ""),
    ],
)
def test_a_limit_that_allows_few_connections_is_named_at_the_start(
    hard: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits.resource, "getrlimit", lambda which: (64, hard))
    assert connection_limits.few_connections() == line


def test_other_open_files_reduce_the_connection_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = connection_limits.RESERVED_FILES + 20
    monkeypatch.setattr(connection_limits.resource, "getrlimit", lambda which: (limit, limit))
    connections = connection_limits.ConnectionLimit()
    assert connections.limit == 20 and connections.opened("a") and connections.opened("b")
    monkeypatch.setattr(connection_limits, "_open_files", lambda: 20)
    connections.count_files()
    assert connections.limit == 2 and not connections.opened("c")


async def test_connection_limit_reserves_file_descriptors(app: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit of open files every accept would fail and be logged, thousands of times a second."""
    few = connection_limits.RESERVED_FILES + 50
    monkeypatch.setattr(connection_limits.resource, "getrlimit", lambda which: (few, few))
    monkeypatch.setattr(connection_limits, "_open_files", lambda: 48)  # such as gRPC connections
    async with running(app) as server:
        await asyncio.sleep(0.1)  # until open files are counted
        clients = [await RawClient.connect(server) for _ in range(3)]
        status, _, body = await clients[2].answer()
        assert (status, json.loads(body)["error"]["code"]) == (503, "overloaded")
        for client in clients:
            await client.close()


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [(1024, 1 << 20, (16_512, 1 << 20)), (1024, 2048, (2048, 2048)), (1024, -1, (16_512, -1)), (20_000, 20_000, None)],
)
def test_open_file_limit_is_raised_as_far_as_allowed(
    soft: int, hard: int, expected: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(connection_limits.resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(connection_limits.resource, "setrlimit", lambda which, limits: asked.append(limits))
    connection_limits.allow_connections()
    assert asked == ([expected] if expected else [])


async def test_burst_of_connections_does_not_exhaust_file_descriptors(
    app: Starlette, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(connection_limits, "connection_limit", lambda other_files: 3)
    async with running(app) as server:
        await RawClient.connect(server)
        opened = len(os.listdir("/proc/self/fd"))
        clients = [socket.socket() for _ in range(300)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex(server.address)
        # The kernel has queued all of them; 100 more files may be opened, of which 3 may be connections.
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 400, before[1]))
        try:
            await asyncio.sleep(0.5)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for client in clients:
                client.close()
    assert not [r for r in caplog.records if "out of system resource" in r.message]


async def test_stream_with_slow_tokens_is_not_closed(text_model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit for a client that reads nothing runs while it has unread output, not between two tokens."""
    first, second = reply("a", "b")
    generator = FakeGenerator([first, 0.8, second])
    monkeypatch.setattr(http_server, "SEND_TIMEOUT_S", 0.3)
    app = create_app(generator, text_model, HttpSettings("tiny"))
    async with running(app) as server:
        client = await RawClient.connect(server)
        await client.post("/v1/completions", {"model": "tiny", "prompt": "hi", "stream": True})
        async with asyncio.timeout(10):
            assert b"200 OK" in await client.reader.readuntil(b"\r\n\r\n")
            assert await client.reader.readuntil(b"[DONE]")
        await client.close()


OFFER = "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__"


@pytest.mark.parametrize("pieces", [1, 2, 40])
@pytest.mark.parametrize("chunked", [False, True])
async def test_an_offer_to_upgrade_is_ignored_and_its_body_read(
    app: Starlette, generator: FakeGenerator, pieces: int, chunked: bool
) -> None:
    """As Java's HttpClient and `curl --http2` send it; then the connection goes on, with and without the offer."""
    body = json.dumps(TEXT | {"user": "u" * 200}).encode()
    size = f"Content-Length: {len(body)}"
    if chunked:
        size, body = "Transfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    lines = ("POST /v1/completions HTTP/1.1", "Host: t", "Content-Type: application/json", size, *OFFER)
    raw = "\r\n".join(lines).encode() + b"\r\n\r\n" + body
    async with running(app) as server:
        client = await RawClient.connect(server)
        for _ in range(2):
            step = -(-len(raw) // pieces)
            for at in range(0, len(raw), step):
                await client.send(raw[at : at + step])
                await asyncio.sleep(0)
            status, headers, answer = await client.answer()
            assert (status, headers.get("x-ignored-fields")) == (200, "user"), answer
            assert json.loads(answer)["choices"][0]["text"] == "Hello world"
        await client.post("/v1/completions", TEXT)
        assert (await client.answer())[0] == 200
        await client.send(raw * 3)  # pipelined
        assert [(await client.answer())[0] for _ in range(3)] == [200] * 3
        await client.close()
    assert len(generator.submissions) == 6


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /live HTTP/1.1\r\nHost: t\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: a", 200),
        ("GET /live HTTP/1.1\r\nHost: t\r\nConnection: close, upgrade\r\nUpgrade: h2c", 200),
        ("GET /live HTTP/1.0\r\nConnection: upgrade\r\nUpgrade: h2c", 200),
        ("CONNECT t:443 HTTP/1.1\r\nHost: t", 400),
        ("CONNECT t:443 HTTP/1.1\r\nHost: t\r\nConnection: upgrade\r\nUpgrade: h2c", 400),
        ("CONNECT / HTTP/1.1\r\nHost: t", 400),
    ],
)
async def test_other_offers_and_tunnels(app: Starlette, head: str, status: int) -> None:
    async with running(app) as server:
        client = await RawClient.connect(server)
        await client.send(head.encode() + b"\r\n\r\n")
        answer = await client.answer()
        assert answer[0] == status, answer
        if "close" in head or "1.0" in head or status == 400:
            assert await client.closed()
        await client.close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
async def test_curl_offers_http2(app: Starlette) -> None:
    async with running(app) as server:
        url = f"http://127.0.0.1:{server.address[1]}/v1/completions"
        words = ["-s", "--http2", "-H", "content-type: application/json", "-d", json.dumps(TEXT), url]
        curl = await asyncio.create_subprocess_exec("curl", *words, stdout=asyncio.subprocess.PIPE)
        assert json.loads((await curl.communicate())[0])["choices"][0]["text"] == "Hello world"


async def test_answers_are_not_held_back_by_nagle_s_algorithm(app: Starlette) -> None:
    """Head and body of a short answer are two writes: without TCP_NODELAY the second waits 40 ms for the client's ACK.
    asyncio sets it only if the listening socket names the protocol."""
    async with running(app) as server:
        await RawClient.connect(server)
        while not server.server_state.connections:
            await asyncio.sleep(0.005)
        (connection,) = server.server_state.connections
        sock = connection.transport.get_extra_info("socket")  # type: ignore[union-attr]
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
