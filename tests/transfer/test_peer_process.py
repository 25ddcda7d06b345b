"""Edges between real processes: bytes, a killed peer, a stopped peer, the next generation, and process exit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from baton.core.errors import HandoffError
from baton.transfer.edge import EdgeSpec
from baton.transfer.gloo import GlooEdge
from baton.transfer.rendezvous import EdgeStore
from baton.transfer.sections import checksum
from tests.support.limits import Stall

MakeSpec = Callable[..., EdgeSpec]
Peers = Callable[[EdgeSpec], Any]


def connected(spec: EdgeSpec, peer: Any) -> GlooEdge:
    edge = GlooEdge(spec)
    peer.send_command("edge", prefix=spec.prefix, generation=spec.generation)
    edge.connect()
    assert peer.read_reply() == {}
    return edge


def failure(call: Callable[[], None]) -> tuple[HandoffError, Stall]:
    with Stall() as stall, pytest.raises(HandoffError) as caught:
        call()
    return caught.value, stall


def kill_peer_during(peer: Any, transfer: Callable[[], None]) -> None:
    """Repeats `transfer`, kills the peer meanwhile, and checks that a transfer fails far within its timeout (20 s)."""
    killed_at = 0.0

    def kill() -> None:
        nonlocal killed_at
        killed_at = time.monotonic()
        os.kill(peer.pid, signal.SIGKILL)

    def transfers() -> None:
        for _ in range(40):
            transfer()

    transfer()
    timer = threading.Timer(0.1, kill)
    timer.start()
    error, stall = failure(transfers)
    took_s = stall.ended - killed_at
    timer.join()
    assert killed_at, error
    print(f"killed peer seen in {took_s * 1e3:.1f} ms: {error}")
    assert took_s < stall.allows(5)


def section_ends(num_bytes: int, sections: int) -> list[int]:
    return [num_bytes * (index + 1) // sections for index in range(sections)]


@pytest.mark.parametrize("sections", [1, 7])
def test_a_process_receives_bytes_and_detects_a_stopped_or_killed_sender(
    spec: MakeSpec, peers: Peers, sections: int
) -> None:
    peer = peers(spec("prefill"))
    slow = {"connect_timeout_s": 30.0}  # for importing torch on a busy machine
    edge = connected(spec("decode", 1, **slow), peer)
    buf = torch.empty(5_000_000, dtype=torch.uint8)
    ends, long_ends = section_ends(buf.numel(), sections), section_ends(buf.numel() * 10, sections)
    peer.send_command("send", bytes=buf.numel(), seed=7, ends=ends)
    edge.recv(buf, 20, ends=ends)
    assert peer.read_reply() == {}
    generator = torch.Generator().manual_seed(7)
    assert torch.equal(buf, torch.randint(0, 256, (buf.numel(),), dtype=torch.uint8, generator=generator))
    edge.close()
    peer.send_command("send", bytes=10, seed=1)
    assert "send of" in peer.read_reply()["error"]

    edge = connected(spec("decode", 2, **slow), peer)  # the next generation, the same two processes
    os.kill(peer.pid, signal.SIGSTOP)
    error, stall = failure(lambda: edge.recv(buf, 0.5, ends=ends))
    assert 0.4 < stall.took_s < stall.allows(3) and "Timed out" in error.message  # only the timeout detects it
    edge.close()
    os.kill(peer.pid, signal.SIGCONT)

    edge = connected(spec("decode", 3, **slow), peer)
    for _ in range(40):
        peer.send_command("send", bytes=buf.numel() * 10, seed=0, ends=long_ends)
    long = torch.empty(buf.numel() * 10, dtype=torch.uint8)
    kill_peer_during(peer, lambda: edge.recv(long, 20, ends=long_ends))
    edge.close()


@pytest.mark.parametrize("sections", [1, 7])
def test_a_receiver_stopped_or_killed_during_a_transfer_is_detected(
    spec: MakeSpec, peers: Peers, sections: int
) -> None:
    payload = torch.zeros(50_000_000, dtype=torch.uint8)
    ends = section_ends(payload.numel(), sections)
    peer = peers(spec("decode"))
    edge = connected(spec("prefill", 1, connect_timeout_s=30.0), peer)
    peer.send_command("recv", bytes=1000)
    edge.send(payload[:1000], 20)
    assert peer.read_reply() == {"checksum": checksum(b"", payload[:1000])}
    os.kill(peer.pid, signal.SIGSTOP)
    error, stall = failure(lambda: edge.send(payload, 0.5, ends))
    assert 0.4 < stall.took_s < stall.allows(3) and "Timed out" in error.message
    edge.close()
    os.kill(peer.pid, signal.SIGCONT)

    edge = connected(spec("prefill", 2, connect_timeout_s=30.0), peer)
    for _ in range(40):
        peer.send_command("recv", bytes=payload.numel(), ends=ends)
    kill_peer_during(peer, lambda: edge.send(payload, 20, ends))
    edge.close()


EXIT_WITH_A_BLOCKED_EDGE = """
import asyncio, sys, torch
from baton.transfer.edge import EdgeSpec
from baton.transfer.edge_thread import EdgeWorker
host, port, prefix = sys.argv[1], int(sys.argv[2]), sys.argv[3]
async def main():
    ends = [EdgeWorker(EdgeSpec(host, port, prefix, 1, side)) for side in ("prefill", "decode")]
    await asyncio.gather(*(end.connect() for end in ends))
    asyncio.create_task(ends[1].recv(torch.zeros(10, dtype=torch.uint8), 600))
    await asyncio.sleep(0.2)
    print("leaving", ends[1].in_flight)
asyncio.run(main())
"""


def test_a_blocked_edge_does_not_keep_a_process_from_exiting(store: EdgeStore) -> None:
    argv = [sys.executable, "-c", EXIT_WITH_A_BLOCKED_EDGE, store.host, str(store.port), f"{store.nonce}/x"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": "."})
    assert (done.returncode, done.stdout) == (0, "leaving recv\n"), done.stderr
