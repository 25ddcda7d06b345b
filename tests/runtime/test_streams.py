"""A stream has many senders: the end of one sender does not end the stream."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc.aio
import pytest

from baton.core.errors import BatonError, HandoffError, JoinRefused
from baton.core.handover import LinkHello, LinkWelcome, Ping, Posted
from baton.core.kv_layout import KVLayout, LayerKV
from baton.core.request import SequenceId
from baton.runtime import codec, streams
from baton.runtime.streams import FIRST_BYTES, LinkHandler, LinkLost, MessageStream, dial_link, serve_links
from baton.v1 import worker_pb2
from tests.support.builders import make_facts, make_join

HELLO = LinkHello("p0", 1, "run", make_facts(), 1)
LARGE = LinkHello("p" * (1 << 20), 1, "run", make_facts(), 1)
WELCOME = LinkWelcome("d0", "127.0.0.1", 1, "n", 1, make_facts(), 1 << 20)


@contextlib.asynccontextmanager
async def serving(handler: LinkHandler) -> AsyncIterator[str]:
    server, port = await serve_links("127.0.0.1", handler)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def linked(handler: LinkHandler) -> AsyncIterator[MessageStream]:
    """The dialler's end of a link."""
    async with serving(handler) as address:
        link = await dial_link(address, HELLO, 2.0)
        assert link.welcome == WELCOME
        yield link.stream
        await link.close()


async def never_reads(stream: MessageStream, hello: LinkHello) -> None:
    """Reads nothing after the hello."""
    await stream.send(WELCOME)
    await asyncio.sleep(10)


async def echo(stream: MessageStream, hello: LinkHello) -> None:
    assert hello == HELLO
    await stream.send(WELCOME)
    while (message := await stream.receive()) is not None:
        await stream.send(message)


async def test_messages_arrive_in_order_in_both_directions() -> None:
    async with linked(echo) as stream:
        for nonce in range(20):
            await stream.send(Ping(nonce))
        assert [(await stream.receive()).nonce for _ in range(20)] == list(range(20))  # type: ignore[union-attr]
    with pytest.raises(LinkLost, match="closed locally"):
        await stream.send(Ping(1))


async def test_a_cancelled_sender_does_not_end_the_stream() -> None:
    """An aborted hand-over may be cancelled at any point, also in the middle of a write."""
    async with linked(echo) as stream:
        for nonce in range(20):
            sender = asyncio.create_task(stream.send(Ping(nonce)))
            for _ in range(nonce % 5):
                await asyncio.sleep(0)
            sender.cancel()
            await asyncio.wait({sender})
        await stream.send(Ping(1000))
        assert stream.ended is None
        async with asyncio.timeout(2.0):
            while (await stream.receive()).nonce != 1000:  # type: ignore[union-attr]
                pass


async def test_unshielded_and_shielded_sends_keep_their_order() -> None:
    async with linked(echo) as stream:
        for nonce in range(0, 20, 2):
            await stream.send_unshielded(Ping(nonce))
            await stream.send(Ping(nonce + 1))
        assert [(await stream.receive()).nonce for _ in range(20)] == list(range(20))  # type: ignore[union-attr]


async def test_an_unshielded_send_that_is_cancelled_during_a_write_ends_the_stream() -> None:
    async with linked(never_reads) as stream:
        reader = asyncio.create_task(stream.receive())

        async def send() -> None:
            while True:
                await stream.send_unshielded(LARGE)

        sender = asyncio.create_task(send())
        await asyncio.sleep(0.3)
        sender.cancel()
        await asyncio.wait({sender})
        async with asyncio.timeout(2.0):
            assert sender.cancelled() and await reader is None
        assert stream.ended == "its sender was cancelled"
        with pytest.raises(LinkLost):
            await stream.send_unshielded(Ping(1))


async def test_a_peer_that_does_not_read_is_lost_after_the_limit() -> None:
    async with linked(never_reads) as stream:
        with pytest.raises(LinkLost):
            while True:
                await stream.send(LARGE, timeout_s=0.2)
        assert stream.ended is not None
        assert await stream.receive() is None


async def test_a_write_that_fails_after_its_sender_was_cancelled_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with linked(never_reads) as stream:
        senders = [asyncio.create_task(stream.send(LARGE, timeout_s=0.3)) for _ in range(8)]
        await asyncio.sleep(0.1)
        for sender in senders:
            sender.cancel()
        await asyncio.wait(senders)
        async with asyncio.timeout(2.0):
            while stream.ended is None:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        gc.collect()
    assert not [r for r in caplog.records if r.name == "asyncio"]


async def test_a_reader_that_survived_a_cancellation_detects_the_end_of_the_stream() -> None:
    """Otherwise a worker whose connection was cut a second time would have no session and not detect it."""
    async with linked(echo) as stream:

        async def read() -> tuple[int, object]:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
            return task.cancelling(), await stream.receive()  # `uncancel` was not called

        reader = asyncio.create_task(read())
        await asyncio.sleep(0.1)
        stream.end("silent for 3 s")
        assert await reader == (1, None)


async def test_a_reader_cancelled_while_the_stream_ends_raises_cancelled_error() -> None:
    async with linked(echo) as stream:
        reader = asyncio.create_task(stream.receive())
        await asyncio.sleep(0.1)
        stream.end("over")
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader


async def test_a_refusal_carries_its_reason() -> None:
    async def refuse(stream: MessageStream, hello: LinkHello) -> None:
        raise HandoffError("block_size: 4 and 8")

    async with serving(refuse) as address:
        with pytest.raises(BatonError, match="block_size: 4 and 8") as caught:
            await dial_link(address, HELLO, 2.0)
        assert caught.value.code == "join_refused"


async def test_a_first_message_that_is_not_a_hello_is_refused() -> None:
    async with serving(echo) as address:
        with pytest.raises(BatonError, match="must begin with LinkHello"):
            await dial_link(address, Ping(1), 2.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("hello", [LARGE, replace(HELLO, gpus=("g",) * 50_000)], ids=["one field", "many values"])
async def test_a_first_message_above_the_limit_is_refused_unread(
    hello: LinkHello, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read before the token is checked: 1,500,000 values blocked a coordinator for minutes."""
    monkeypatch.setattr(codec, "unwrap", lambda _: pytest.fail("its values were made"))
    async with serving(echo) as address:
        with pytest.raises(JoinRefused, match=rf"sent \d+ bytes; here a message has at most {FIRST_BYTES}$"):
            await dial_link(address, hello, 5.0)


def test_the_join_of_a_large_model_is_below_the_limit() -> None:
    layout = KVLayout(16, (LayerKV(128, 576, "float32", window=4096),) * 500)
    join = replace(make_join("d" * 128), facts=make_facts(layout=layout), pids=(1 << 22,) * 64, token="t" * 4096)
    assert codec.wrap(worker_pb2.SessionRequest, join).ByteSize() < FIRST_BYTES / 2


async def test_a_reply_that_is_not_a_welcome_is_refused() -> None:
    async def odd(stream: MessageStream, hello: LinkHello) -> None:
        await stream.send(Posted(SequenceId("r"), 0, 1))
        await stream.receive()

    async with serving(odd) as address:
        with pytest.raises(HandoffError, match="Posted"):
            await dial_link(address, HELLO, 2.0)


async def test_a_dial_fails_without_a_listener_and_without_a_reply() -> None:
    with pytest.raises(LinkLost):
        await dial_link("127.0.0.1:1", HELLO, 0.5)

    async def silent(stream: MessageStream, hello: LinkHello) -> None:
        await asyncio.sleep(10)

    async with serving(silent) as address:
        with pytest.raises(LinkLost, match=r"within 0\.3 s"):
            await dial_link(address, HELLO, 0.3)


async def test_a_dial_waits_for_a_slow_handshake() -> None:
    async with serving(echo) as address:
        port = int(address.rpartition(":")[2])

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(copied(reader, server_writer, 0.0), copied(server_reader, writer, 0.5))

        async def copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1 << 16):
                    writer.write(data)
            writer.close()

        async with await asyncio.start_server(relay, "127.0.0.1", 0) as slow:
            link = await dial_link(f"127.0.0.1:{slow.sockets[0].getsockname()[1]}", HELLO, 10.0)
            assert link.welcome == WELCOME
            await link.close()


async def test_a_dial_gives_up_a_handshake_without_a_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PING_LIMIT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(LinkLost, match="timed out"):
        await dial_link(f"127.0.0.1:{silent.getsockname()[1]}", HELLO, 30.0)


async def test_a_stream_says_whether_its_peer_closed_it() -> None:
    async def greets(stream: MessageStream, hello: LinkHello) -> None:
        await stream.send(WELCOME)

    for handler, closed in ((greets, True), (never_reads, False)):
        async with linked(handler) as stream:
            if closed:
                assert await stream.receive() is None
            stream.end("closed locally")
            assert stream.closed_by_peer is closed


async def test_stopping_the_server_ends_the_stream() -> None:
    server, port = await serve_links("127.0.0.1", echo)
    link = await dial_link(f"127.0.0.1:{port}", HELLO, 2.0)
    await server.stop(0)
    assert await link.stream.receive() is None
    assert link.stream.ended
    await link.close()


async def test_a_malformed_message_ends_the_stream_with_the_reason() -> None:
    from baton.core.errors import InvalidRequest
    from baton.v1 import kv_pb2, kv_pb2_grpc

    seen: asyncio.Queue[BaseException] = asyncio.Queue()

    async def note(stream: MessageStream, hello: LinkHello) -> None:
        await stream.send(WELCOME)
        try:
            await stream.receive()
        except InvalidRequest as e:
            seen.put_nowait(e)
            raise

    async with serving(note) as address, grpc.aio.insecure_channel(address) as channel:
        call = kv_pb2_grpc.KVLinkStub(channel).Link()
        stream = MessageStream(call, kv_pb2.LinkRequest, address)
        await stream.send(HELLO)
        assert await stream.receive() == WELCOME
        await call.write(kv_pb2.LinkRequest())
        assert "LinkRequest has no message" in str(await asyncio.wait_for(seen.get(), 30))
        assert await stream.receive() is None
        assert "LinkRequest has no message" in (stream.ended or "")
