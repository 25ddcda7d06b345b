"""Stage 4 of gpu.py: edges alone, between two processes that may share one GPU. This process is the prefill side."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from gpu_stages import DEVICE, QUICK, REHEARSAL, Checks, check, synchronize

import torch  # isort: skip

from baton.core.edge_orders import Part
from baton.core.errors import HandoffError
from baton.core.sections import SECTION_BYTES, cut_sections
from baton.transfer.edge import EdgeSpec, edge_prefix
from baton.transfer.edge_end import LocalEnd, LocalEnds, make_buffers
from baton.transfer.edge_kinds import allocator, buffer_device, make_edge
from baton.transfer.nccl import configure_nccl
from baton.transfer.rendezvous import EdgeStore

SIZES = (1, 4096, 1 << 20) if REHEARSAL else (1, 4 << 20, 64 << 20)
LAYERS, HEADS, HEAD_DIM = (4, 2, 16) if REHEARSAL else (32, 8, 128)
TOKENS, BLOCK = (64, 16) if REHEARSAL else (512, 16)
DTYPE = torch.float32 if REHEARSAL else torch.bfloat16
LIMIT_S, FREED_S = 20.0, 5.0


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
    """The decode side, in a process of its own; each command and each reply is a JSON line."""

    def __init__(self, kind: str, spec: EdgeSpec) -> None:
        where = [kind, spec.host, str(spec.port), spec.prefix]
        command = [sys.executable, "-u", str(Path(__file__).with_name("gpu_stages.py")), "edge-peer", *where]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        check(bool(line), "the peer has ended")
        found: dict[str, Any] = json.loads(line)
        check("error" not in found, str(found.get("error")))
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Pair:
    """An edge to a fresh peer."""

    def __init__(self, kind: str, store: EdgeStore, generation: int) -> None:
        prefix = edge_prefix(store.nonce, "p", 0, "d", 0, generation)
        self.spec = EdgeSpec(
            store.host, store.port, prefix, generation, "prefill", connect_timeout_s=LIMIT_S,
            device=str(device_of(kind)),
        )  # fmt: skip
        self.peer = Peer(kind, self.spec)
        self.edge = make_edge(kind)(self.spec)
        self.peer.answer()
        started = time.perf_counter()
        self.edge.connect()
        self.connect_s = time.perf_counter() - started
        self.peer.answer()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.edge.abort()
        self.edge.close()
        self.peer.end()


def run(checks: Checks) -> None:
    one_gpu()
    store = EdgeStore()
    generation = 0
    for kind in ("gloo", "ipc") if REHEARSAL else ("nccl", "ipc"):
        generation += 10
        with checks.part(f"{kind}: bytes"), Pair(kind, store, generation) as pair:
            print(f"- {kind}: connected in {pair.connect_s:.2f} s")
            bytes_alone(pair, kind)
        with checks.part(f"{kind}: a piece of KV"):
            asyncio.run(piece(kind, store, generation + 1))
        for offset, how in ((2, "SIGKILL"), (3, "SIGSTOP"), (4, "abort")) if kind == "gloo" or not QUICK else ():
            with checks.part(f"{kind}: {how}"), Pair(kind, store, generation + offset) as pair:
                trouble(pair, kind, how)
    store.close()


def bytes_alone(pair: Pair, kind: str) -> None:
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
        print(f"- {kind}: {size} bytes in {took * 1e3:.3f} ms, {size / took / 1e9:.2f} GB/s")


async def piece(kind: str, store: EdgeStore, generation: int) -> None:
    """Hands over one chunk: it is packed, sent, checked and stored by the ends that workers use."""
    prefix = edge_prefix(store.nonce, "p", 0, "d", 0, generation)
    spec = EdgeSpec(
        store.host, store.port, prefix, generation, "prefill", connect_timeout_s=LIMIT_S, device=str(device_of(kind))
    )
    peer = Peer(kind, spec)
    try:
        peer.answer()
        torch.manual_seed(1)
        source, whole = layers(), part()
        kept = make_buffers(kind, source[0][0].device, 4 * whole.num_bytes)
        end = LocalEnd(spec, source, LocalEnds(source, BLOCK, spec.bind_host, kind, buffers=kept))
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
    finally:
        peer.end()


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


def trouble(pair: Pair, kind: str, how: str) -> None:
    """Sends to a peer that never receives: it is killed or stopped, or this end is aborted."""
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
    else:
        check(False, "the send went well")


def pattern(size: int) -> torch.Tensor:
    return (torch.arange(size, dtype=torch.int64) * 2654435761 >> 7).to(torch.uint8)


def peer(kind: str, host: str, port: str, prefix: str) -> int:
    """Runs the decode side, in the other process."""
    one_gpu()
    return asyncio.run(_peer(kind, host, int(port), prefix))  # type: ignore[arg-type]


async def _peer(kind: str, host: str, port: int, prefix: str) -> int:
    device = device_of(kind)
    spec = EdgeSpec(host, port, prefix, 0, "decode", connect_timeout_s=LIMIT_S, device=str(device))

    def say(**answer: Any) -> None:
        print(json.dumps(answer), flush=True)

    torch.manual_seed(1)
    expected = layers()
    target = [tuple(torch.zeros_like(t) for t in pair) for pair in expected]
    whole = part()
    kept = make_buffers(kind, expected[0][0].device, 4 * whole.num_bytes)
    synchronize()
    generation = int(prefix.rpartition("/g")[2])
    spec = EdgeSpec(host, port, prefix, generation, "decode", connect_timeout_s=LIMIT_S, device=str(device))
    end = LocalEnd(spec, target, LocalEnds(target, BLOCK, spec.bind_host, kind, buffers=kept))  # type: ignore[arg-type]
    say()
    await end.connect()
    say()
    for line in iter(sys.stdin.readline, ""):
        command = json.loads(line)
        try:
            if command["op"] == "recv":
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
