"""The parts of gpu.py with edges alone, between two processes that may share one GPU. This process is the prefill side.

All peers of a part start together, so that their imports overlap. They answer over a pipe of their own: libraries print
to standard output, which goes to the report. Every answer has a time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from baton.core.edge_orders import SECTION_BYTES, Part, cut_sections
from baton.core.errors import HandoffError
from baton.transfer.edge import EdgeSpec, allocator, buffer_device, edge_prefix, make_edge
from baton.transfer.edge_endpoint import LocalEndpoint, LocalEndpoints, make_buffers
from baton.transfer.nccl import configure_nccl
from baton.transfer.rendezvous import EdgeStore
from baton.transfer.staging import PagedLayers
from benchmarks.gpu_parts.setting import DEVICE, QUICK, REHEARSAL, Checks, Failed, bar, check, synchronize

SIZES = (1, 4096, 1 << 20) if REHEARSAL else (1, 4 << 20, 64 << 20)
LAYERS, HEADS, HEAD_DIM = (4, 2, 16) if REHEARSAL else (32, 8, 128)
TOKENS, BLOCK = (64, 16) if REHEARSAL else (512, 16)
DTYPE = torch.float32 if REHEARSAL else torch.bfloat16
LIMIT_S, FREED_S = 20.0, 5.0
ANSWER_S = 25.0
"""How long a peer may take for an answer; the first includes its imports."""


def one_gpu() -> None:
    """NCCL refuses two ranks of one host on one GPU; with a host id of its own each rank counts as another host."""
    os.environ.update(
        NCCL_HOSTID=f"stage-{os.getpid()}", NCCL_SOCKET_IFNAME="lo", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1",
        NCCL_IB_DISABLE="1", NCCL_CUMEM_HOST_ENABLE="0",
    )  # fmt: skip
    configure_nccl("127.0.0.1")


def device_of(kind: str) -> torch.device:
    kv = torch.device("cpu") if REHEARSAL else torch.device("cuda", 0)
    return buffer_device(kind, kv)


def layers() -> list[tuple[torch.Tensor, torch.Tensor]]:
    blocks = TOKENS // BLOCK
    device = DEVICE if REHEARSAL else "cuda:0"
    return [
        tuple(torch.randn(blocks, BLOCK, HEADS, HEAD_DIM, device=device).to(DTYPE) for _ in range(2))  # type: ignore[misc]
        for _ in range(LAYERS)
    ]


def part() -> Part:
    num_bytes = TOKENS * LAYERS * 2 * HEADS * HEAD_DIM * DTYPE.itemsize
    return Part(tuple(range(TOKENS // BLOCK)), 0, TOKENS, num_bytes, b"piece")


class Peer:
    """The decode side, in a process of its own; each command and each answer is a JSON line."""

    def __init__(self, kind: str, spec: EdgeSpec) -> None:
        where = [kind, spec.host, str(spec.port), spec.prefix]
        self._answers, theirs = os.pipe()
        command = [sys.executable, "-u", "-m", "benchmarks.gpu_parts", "edge-peer", str(theirs)]
        self.process = subprocess.Popen([*command, *where], stdin=subprocess.PIPE, pass_fds=(theirs,), text=True)
        os.close(theirs)
        self._left = b""

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Raises Failed when the peer has ended, reports an error, or does not answer within ANSWER_S."""
        deadline = time.monotonic() + ANSWER_S
        while b"\n" not in self._left:
            ready, _, _ = select.select([self._answers], [], [], max(deadline - time.monotonic(), 0.0))
            check(bool(ready), f"the peer did not answer within {ANSWER_S:g} s")
            read = os.read(self._answers, 1 << 16)
            check(bool(read), f"the peer has ended with {self.process.poll()}")
            self._left += read
        line, _, self._left = self._left.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        check("error" not in answer, str(answer.get("error")))
        return answer

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._answers)


class Started:
    """A peer that has started, and the spec of this end. `connect` makes the edge."""

    def __init__(self, kind: str, store: EdgeStore, generation: int) -> None:
        prefix = edge_prefix(store.nonce, "p", 0, "d", 0, generation)
        self.kind = kind
        self.spec = EdgeSpec(
            store.host, store.port, prefix, generation, "prefill", connect_timeout_s=LIMIT_S,
            device=str(device_of(kind)),
        )  # fmt: skip
        self.peer = Peer(kind, self.spec)
        self.edge: Any = None
        self.connect_s = 0.0

    def connect(self) -> Started:
        self.peer.answer()
        self.peer.tell(op="connect")
        self.edge = make_edge(self.kind)(self.spec)
        started = time.perf_counter()
        self.edge.connect()
        self.connect_s = time.perf_counter() - started
        self.peer.answer()
        return self

    def end(self) -> None:
        if self.edge is not None:
            self.edge.abort()
            self.edge.close()
        self.peer.end()


@contextlib.contextmanager
def started(kind: str, names: Sequence[str]) -> Iterator[dict[str, Started]]:
    """A peer for each name, all started together; all end with the block."""
    one_gpu()
    store, made = EdgeStore(), {}
    try:
        for generation, name in enumerate(names, 1):
            made[name] = Started(kind, store, generation)
        yield made
    finally:
        for each in made.values():
            each.end()
        store.close()


def first(checks: Checks) -> None:
    kind = "gloo" if REHEARSAL else "nccl"
    with checks.step(f"{kind}: bytes"), started(kind, ["bytes"]) as peers:
        pair = peers["bytes"].connect()
        print(f"- {kind}: connected in {pair.connect_s:.2f} s", flush=True)
        rate = bytes_alone(pair, kind)
        bar("NCCL edge connects and moves bytes", f"{rate / 1e9:.2f} GB/s", "all bytes arrive", True)


def run(checks: Checks, kind: str) -> None:
    troubles = ("SIGKILL", "SIGSTOP", "abort") if not QUICK or kind == "ipc" else ()
    freed = []
    with started(kind, ["bytes", "piece", *troubles]) as peers:
        with checks.step(f"{kind}: bytes"):
            bytes_alone(peers["bytes"].connect(), kind)
        with checks.step(f"{kind}: a piece of KV"):
            asyncio.run(piece(peers["piece"], kind))
        for how in troubles:
            with checks.step(f"{kind}: {how}"):
                freed.append(trouble(peers[how].connect(), kind, how))
    if freed:
        name = f"{'IPC' if kind == 'ipc' else 'NCCL'} peer lost: freed within 5 s"
        met = len(freed) == len(troubles) and max(freed) <= FREED_S
        bar(name, f"{max(freed):.2f} s ({len(freed)} of {len(troubles)})", f"{FREED_S:g} s", met)


def bytes_alone(pair: Started, kind: str) -> float:
    """Returns the bytes per second of the largest transfer."""
    for size in SIZES:
        buf = allocator(kind)(size, device_of(kind)).copy_(pattern(size))
        times = []
        for _ in range(7):
            pair.peer.tell(op="recv", bytes=size)
            pair.peer.answer()  # the receive is posted
            started = time.perf_counter()
            pair.edge.send(buf, LIMIT_S)
            times.append(time.perf_counter() - started)
            check(pair.peer.answer()["equal"], f"{size} bytes arrived changed")
        took = statistics.median(times[2:])
        print(f"- {kind}: {size} bytes in {took * 1e3:.3f} ms, {size / took / 1e9:.2f} GB/s", flush=True)
    return size / took


async def piece(pair: Started, kind: str) -> None:
    """Hands over one chunk: it is packed, sent, checked and stored by the ends that workers use."""
    peer, spec = pair.peer, pair.spec
    peer.answer()
    torch.manual_seed(1)
    source, whole = layers(), part()
    kept = make_buffers(kind, source[0][0].device, 4 * whole.num_bytes)
    end = LocalEndpoint(spec, PagedLayers.of(source), LocalEndpoints(source, BLOCK, spec.bind_host, kind, buffers=kept))
    peer.tell(op="connect")
    await end.connect()
    peer.answer()
    packing, sending = [], []
    for _ in range(6):
        peer.tell(op="take")
        await asyncio.to_thread(peer.answer)
        started = time.perf_counter()
        await end.fill(whole, 0)
        filled = time.perf_counter()
        await end.send()
        packing.append(filled - started)
        sending.append(time.perf_counter() - filled)
        check((await asyncio.to_thread(peer.answer))["intact"], "the piece arrived damaged")
    sections = len(cut_sections([whole.num_bytes // LAYERS] * LAYERS, SECTION_BYTES))
    took = statistics.median(sending[1:])
    print(
        f"- {kind}: a piece of {whole.num_bytes / 1e6:.1f} MB ({TOKENS} tokens, {LAYERS} layers): packed ahead in"
        f" {statistics.median(packing[1:]) * 1e3:.2f} ms, sent in {took * 1e3:.2f} ms,"
        f" {whole.num_bytes / took / 1e9:.2f} GB/s; {cost(kind, sections)}"
    )
    await end.close(5)


def cost(kind: str, sections: int) -> str:
    """The copies of the bytes and the host waits, according to the code (sections.py, nccl.py, ipc.py, gloo.py)."""
    if kind == "nccl":
        return (
            f"copies: packed and unpacked on the GPUs, none on a host; messages: {sections} sections and 1 with their"
            " checksums; waits of a host: 1 where it is sent, 3 where it arrives"
        )
    if kind == "ipc":
        return (
            "copies: packed, copied between buffers, unpacked, none on a host;"
            f" messages: {sections} records and 1 answer; waits of a host: {sections} + 1 where it is sent, 3 where it"
            " arrives"
        )
    return f"copies: through host memory at both ends; messages: {sections} sections with a checksum each"


def trouble(pair: Started, kind: str, how: str) -> float:
    """Sends to a peer that never receives: it is killed or stopped, or this end is aborted. Returns the seconds until
    the send ended."""
    buf = allocator(kind)(SIZES[-1], device_of(kind))
    limit_s = 1.0 if REHEARSAL else 2.0
    if how == "abort":
        threading.Timer(0.5, pair.edge.abort).start()
    else:
        threading.Timer(0.2, os.kill, (pair.peer.process.pid, getattr(signal, how))).start()
    started = time.perf_counter()
    try:
        pair.edge.send(buf, LIMIT_S if how == "abort" else limit_s)
    except HandoffError as error:
        took_s = time.perf_counter() - started
        print(f"- {kind}: {how}: freed after {took_s:.2f} s: {error.message.rpartition(': ')[2]}")
        check(took_s < FREED_S, f"freed after {took_s:.1f} s")
        started = time.perf_counter()
        pair.edge.close()
        check(time.perf_counter() - started < FREED_S, "closing took too long")
        return took_s
    raise Failed("the send went well")


def pattern(size: int) -> torch.Tensor:
    return (torch.arange(size, dtype=torch.int64) * 2654435761 >> 7).to(torch.uint8)


def peer(answers: str, kind: str, host: str, port: str, prefix: str) -> int:
    """Runs the decode side, in the other process; it answers over the descriptor `answers`."""
    one_gpu()
    return asyncio.run(_peer(int(answers), kind, host, int(port), prefix))


async def _peer(answers: int, kind: str, host: str, port: int, prefix: str) -> int:
    device = device_of(kind)

    def say(**answer: Any) -> None:
        os.write(answers, json.dumps(answer).encode() + b"\n")

    torch.manual_seed(1)
    expected = layers()
    target = [tuple(torch.zeros_like(t) for t in pair) for pair in expected]
    whole = part()
    kept = make_buffers(kind, expected[0][0].device, 4 * whole.num_bytes)
    synchronize()
    generation = int(prefix.rpartition("/g")[2])
    spec = EdgeSpec(host, port, prefix, generation, "decode", connect_timeout_s=LIMIT_S, device=str(device))
    end = LocalEndpoint(spec, PagedLayers.of(target), LocalEndpoints(target, BLOCK, spec.bind_host, kind, buffers=kept))  # type: ignore[arg-type]
    say()
    for line in iter(sys.stdin.readline, ""):
        command = json.loads(line)
        try:
            if command["op"] == "connect":
                await end.connect()
                say()
            elif command["op"] == "recv":
                buf = torch.zeros(command["bytes"], dtype=torch.uint8, device=device)
                synchronize()  # the edge's stream does not wait for this one
                await end.worker.recv(buf, LIMIT_S, on_posted=say)
                say(equal=torch.equal(buf.cpu(), pattern(command["bytes"])))
            else:
                intact = await end.take(whole, say)
                same = all(
                    torch.equal(a, b)
                    for mine, theirs in zip(target, expected, strict=True)
                    for a, b in zip(mine, theirs, strict=True)
                )
                say(intact=intact and same)
        except HandoffError as error:
            say(error=error.message)
    return 0
