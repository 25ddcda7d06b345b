"""Gloo edges between two threads of one process: bytes, sizes, aborts, generations, and where the store listens."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from baton.core.errors import HandoffError, StartupError
from baton.transfer import rendezvous
from baton.transfer.edge import EdgeSpec
from baton.transfer.gloo import GlooEdge
from baton.transfer.rendezvous import EdgeStore, delete_keys
from tests.support.edges import in_threads, num_keys
from tests.support.processes import listening

MakeSpec = Callable[..., EdgeSpec]
Connected = Callable[..., tuple[GlooEdge, GlooEdge]]


def binds(host: str) -> bool:
    try:
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return True
    except OSError:
        return False


ADDRESSES = ["127.0.0.1", pytest.param("::1", marks=pytest.mark.skipif(not binds("::1"), reason="no IPv6"))]


def test_bytes_arrive_unchanged_and_no_store_key_remains(connected: Connected, store: EdgeStore) -> None:
    prefill, decode = connected()
    for size in (1, 1000, 3_000_001):
        sent = torch.randint(0, 256, (size,), dtype=torch.uint8)
        got = torch.zeros_like(sent)
        assert in_threads(lambda s=sent: prefill.send(s, 5), lambda g=got: decode.recv(g, 5)) == [None, None]  # type: ignore
        assert torch.equal(sent, got)
    assert num_keys(store) == 0


def test_sections_arrive_in_order_each_with_its_word(connected: Connected) -> None:
    prefill, decode = connected()
    chance = random.Random(3)
    for _ in range(40):
        size = chance.randrange(1, 400_000)
        ends = sorted({*chance.sample(range(1, size + 1), min(chance.randrange(12), size)), size})
        sent, got, came = torch.randint(0, 256, (size,), dtype=torch.uint8), torch.zeros(size).byte(), []
        words = [chance.getrandbits(64) for _ in ends]

        def arrived(
            index: int, word: int, sent: Any = sent, got: Any = got, ends: Any = ends, came: Any = came
        ) -> None:
            here = ends[index]
            came.append((index, word, torch.equal(got[:here], sent[:here])))

        assert in_threads(
            lambda s=sent, e=ends, w=words: prefill.send(s, 5, e, w.__getitem__),  # type: ignore[misc]
            lambda g=got, e=ends, a=arrived: decode.recv(g, 5, None, e, a),  # type: ignore[misc]
        ) == [None, None]
        assert came == [(index, word, True) for index, word in enumerate(words)]


def test_a_section_arrives_before_the_next_one_is_ready(connected: Connected) -> None:
    prefill, decode = connected()
    here, buf = threading.Event(), torch.zeros(2_000_000, dtype=torch.uint8)

    def ready(index: int) -> int:
        assert index == 0 or here.wait(10), "the first section has not arrived"
        return 0

    ends = (1_000_000, 2_000_000)
    receive = lambda: decode.recv(buf.clone(), 20, None, ends, lambda *_: here.set())  # noqa: E731
    assert in_threads(lambda: prefill.send(buf, 20, ends, ready), receive) == [None, None]


@pytest.mark.parametrize("ends", [(10,), (10, 20), (5, 10, 20)])
def test_a_different_number_of_sections_fails_the_edge_not_the_process(
    connected: Connected, ends: tuple[int, ...]
) -> None:
    prefill, decode = connected()
    buf = torch.zeros(20, dtype=torch.uint8)

    def receive() -> None:
        try:
            decode.recv(buf, 5, None, ends)
        finally:
            decode.close()

    mine = (4, 8, 12, 20)
    sender, receiver = in_threads(lambda: prefill.send(torch.ones(20, dtype=torch.uint8), 5, mine), receive)
    assert isinstance(receiver, HandoffError) and not buf.any()
    assert ("sections is 4" if ends[-1] == 20 else "cannot have sections that end at (10,)") in receiver.message
    assert isinstance(sender, HandoffError)


@pytest.mark.parametrize("ends", [(0, 8), (4, 4, 8), (6, 4, 8), (4,), (4, 9)])
def test_invalid_section_ends_are_refused(spec: MakeSpec, ends: tuple[int, ...]) -> None:
    with pytest.raises(HandoffError, match="8 bytes cannot have sections"):
        GlooEdge(spec("prefill")).send(torch.zeros(8, dtype=torch.uint8), 1, ends)


@pytest.mark.parametrize("receive_bytes", [10, 30])
def test_a_size_mismatch_fails_the_edge_not_the_process(connected: Connected, receive_bytes: int) -> None:
    prefill, decode = connected()
    buf = torch.zeros(receive_bytes, dtype=torch.uint8)

    def receive() -> None:
        try:
            decode.recv(buf, 5)
        finally:
            decode.close()

    sender, receiver = in_threads(lambda: prefill.send(torch.ones(20, dtype=torch.uint8), 5), receive)
    assert isinstance(receiver, HandoffError) and "bytes is 20" in receiver.message
    assert isinstance(sender, HandoffError)
    assert not buf.any()


@pytest.mark.parametrize("bad", [torch.zeros(0, dtype=torch.uint8), torch.zeros(4), torch.zeros(2, 2).byte()])
def test_an_invalid_buffer_is_refused(spec: MakeSpec, bad: torch.Tensor) -> None:
    edge = GlooEdge(spec("prefill"))
    with pytest.raises(HandoffError, match="uint8, 1-D"):
        edge.send(bad, 1)


def test_a_timeout_ends_the_edge_and_the_next_generation_works(connected: Connected) -> None:
    prefill, decode = connected()
    buf = torch.zeros(100, dtype=torch.uint8)
    with pytest.raises(HandoffError, match="recv of 100 bytes failed after 0"):
        decode.recv(buf, 0.2)
    with pytest.raises(HandoffError, match="ended"):
        decode.recv(buf, 0.2)
    decode.close()
    with pytest.raises(HandoffError, match="prefill side"):
        prefill.send(buf, 5)
    prefill.close()

    prefill, decode = connected(generation=2)
    assert in_threads(lambda: prefill.send(buf + 7, 5), lambda: decode.recv(buf, 5)) == [None, None]
    assert buf.eq(7).all()


@pytest.mark.parametrize("store", ADDRESSES, indirect=True)
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_abort_unblocks_a_blocked_operation(connected: Connected, side: str) -> None:
    prefill, decode = connected()
    edge, call = (prefill, prefill.send) if side == "prefill" else (decode, decode.recv)

    def abort_soon() -> None:
        time.sleep(0.1)
        edge.abort()
        edge.abort()

    start = time.monotonic()
    error, _ = in_threads(lambda: call(torch.zeros(1_000_000, dtype=torch.uint8), 20), abort_soon)
    assert isinstance(error, HandoffError) and "aborted" in error.message
    assert time.monotonic() - start < 10  # far below the 20 s of the operation


@pytest.mark.parametrize("store", ADDRESSES, indirect=True)
def test_closing_an_idle_end_fails_the_blocked_receive_of_its_peer(connected: Connected) -> None:
    prefill, decode = connected()
    start = time.monotonic()

    def close_soon() -> None:
        time.sleep(0.1)
        prefill.close()

    error, _ = in_threads(lambda: decode.recv(torch.zeros(10, dtype=torch.uint8), 20), close_soon)
    assert isinstance(error, HandoffError)
    assert time.monotonic() - start < 10


def test_abort_ends_a_connect_that_waits_for_its_peer(spec: MakeSpec, store: EdgeStore) -> None:
    edge = GlooEdge(spec("decode", connect_timeout_s=20))

    def abort_soon() -> None:
        time.sleep(0.1)
        edge.abort()

    start = time.monotonic()
    error, _ = in_threads(edge.connect, abort_soon)
    assert isinstance(error, HandoffError) and "aborted" in error.message
    assert time.monotonic() - start < 10
    assert num_keys(store) == 0
    with pytest.raises(HandoffError, match="aborted"):
        edge.connect()


def test_connect_fails_without_a_peer_or_without_a_store(spec: MakeSpec) -> None:
    with pytest.raises(HandoffError, match=r"did not connect within 0\.2 s"):
        GlooEdge(spec("prefill", connect_timeout_s=0.2)).connect()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        gone = EdgeSpec("127.0.0.1", unused.getsockname()[1], "x/g1", 1, "prefill")
        with pytest.raises(HandoffError, match="cannot connect to the decode worker's store"):
            GlooEdge(gone).connect()


def listeners() -> set[tuple[str, int]]:
    return listening(os.getpid())


def test_a_connect_that_fails_in_gloo_stops_listening_before_it_takes_the_keys_away(
    spec: MakeSpec, store: EdgeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that dialled the freed pair later would end this process. Here the peer never publishes its address."""
    before, closed = listeners(), list[bool]()
    here = spec("decode", connect_timeout_s=0.3)
    assert store._store is not None
    store._store.set(f"{here.prefix}/here/{here.peer_rank}", "1")
    monkeypatch.setattr(rendezvous, "delete_keys", lambda *_: closed.append(listeners() <= before))
    with pytest.raises(HandoffError, match="connecting failed"):
        GlooEdge(here).connect()
    assert closed == [True]


@pytest.mark.parametrize("store", ADDRESSES, indirect=True)
def test_edges_and_store_listen_only_on_the_configured_address(connected: Connected, store: EdgeStore) -> None:
    before = listeners()
    assert (store.host, store.port) in before
    prefill, decode = connected()
    opened = listeners() - before
    assert opened and {address for address, _ in opened} == {store.host}
    prefill.close()
    decode.close()
    store.close()
    assert (store.host, store.port) not in listeners()


@pytest.mark.parametrize("store", ADDRESSES, indirect=True)
def test_a_connected_pair_accepts_no_other_connection(connected: Connected, store: EdgeStore) -> None:
    before = listeners()
    prefill, decode = connected()
    opened = listeners() - before
    ports = {port for _, port in opened}
    held = len(os.listdir("/proc/self/fd"))
    for port in ports:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                socket.create_connection((store.host, port), timeout=0.1)
    assert len(ports) == 2 and len(os.listdir("/proc/self/fd")) == held
    sent, got = torch.randint(0, 256, (3_000_001,), dtype=torch.uint8), torch.zeros(3_000_001, dtype=torch.uint8)
    assert in_threads(lambda: prefill.send(sent, 5), lambda: decode.recv(got, 5)) == [None, None]
    assert torch.equal(sent, got)
    prefill.close()
    decode.close()
    assert not opened & listeners()


def test_a_store_listens_on_its_address_and_a_port_in_use_is_a_startup_error(store: EdgeStore) -> None:
    other = EdgeStore("127.0.0.2")
    assert ("127.0.0.2", other.port) in listeners()
    other.close()
    with pytest.raises(StartupError, match="cannot listen on 127"):
        EdgeStore("127.0.0.1", store.port)


def test_only_the_keys_of_one_generation_are_deleted(store: EdgeStore) -> None:
    client = store._store
    assert client is not None
    for name in ("a/g1/here/0", "a/g1/0/1", "a/g11/here/0"):
        client.set(f"{store.nonce}/{name}", "1")
    delete_keys(client, f"{store.nonce}/a/g1")
    assert num_keys(store) == 1
