"""`python -m launch.doctor.probe FILE`: stands for one rank while the doctor runs; the file holds its task.

It announces itself on the board, goes through the steps as the doctor opens them, leaves each result there, and ends
when the doctor does. A step that exceeds its limit is left behind in its thread: the process ends with `os._exit`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from baton.core.errors import BatonError, HandoffError
from baton.core.ranks import Ranks
from baton.engine.device import choose_device
from baton.engine.parallel import connect, open_store
from baton.process import die_with_parent
from baton.transfer.edge import EdgeSpec, edge_prefix
from baton.transfer.edge_kinds import allocator, buffer_device, choose_edges, make_edge
from baton.transfer.edge_thread import EdgeWorker
from baton.transfer.nccl import configure_nccl
from baton.transfer.rendezvous import EdgeStore
from launch.doctor.board import BoardClient
from launch.doctor.tasks import STEPS, Rank, Task, edge_key, task_from_json

SMALL_BYTES, SMALL_TIMES = 1 << 10, 9
LARGE_BYTES, LARGE_TIMES = 8 << 20, 3
_LONGEST_S = 900.0
_SUM_ELEMENTS = 1 << 18
_INNER_SHARE, _EDGE_SHARE = 0.4, 0.8  # of a step's limit: a wait inside it ends first and names its peer


class Probe:
    """Its whole state: the task, the board, what it listens on, and the worker's store once there."""

    def __init__(self, task: Task, board: BoardClient) -> None:
        self.task, self.board = task, board
        self._kept = ExitStack()
        self._store: Any = None
        self._device = self._buffers = torch.device("cpu")
        self._kind = "gloo"
        self._inner_s = task.limit_s * _INNER_SHARE

    def run(self) -> None:
        task = self.task
        configure_nccl()
        self._device = choose_device(task.device, False, task.local_rank)
        self._kind = choose_edges(task.edge_kind, self._device)
        self._buffers = buffer_device(self._kind, self._device)
        self.board.put(f"here/{task.me.key}", {"pid": os.getpid()})
        steps = (self._rendezvous, self._all_reduce, self._link, self._edges)
        for name, step in zip(STEPS, steps, strict=True):
            self.board.wait(f"step/{name}", _LONGEST_S)
            step()
        self.board.wait("report", _LONGEST_S)

    def _rendezvous(self) -> None:
        task = self.task
        if task.leads and task.role == "decode":
            self._offer()
        if len(task.ranks) == 1:
            return

        def meet() -> dict[str, Any]:
            began = time.monotonic()
            if task.leads:
                kept = EdgeStore(task.me.host, task.rendezvous_port)
                self._kept.callback(kept.close)
                self.board.put(f"meet/{task.me.worker}", [kept.host, kept.port])
            host, port = self._await(f"meet/{task.me.worker}", f"the leader of {task.me.worker} opened no store")
            self._dial(host, port, f"{task.ranks[0]} at {host}:{port}")
            self._store = open_store({"MASTER_ADDR": host, "MASTER_PORT": str(port)}, self._inner_s)
            self._store.set(f"here/{task.me.rank}", "1")
            for other in task.ranks:
                try:
                    self._store.get(f"here/{other.rank}")
                except RuntimeError:
                    raise HandoffError(f"{other} did not come to {host}:{port}") from None
            return {"seconds": time.monotonic() - began}

        self._check(f"rendezvous/{task.me.key}", meet)

    def _all_reduce(self) -> None:
        task = self.task
        if len(task.ranks) == 1:
            return

        def together() -> dict[str, Any]:
            if self._store is None:
                raise HandoffError("its ranks did not meet")
            self._dial_each_other()
            ranks = Ranks(task.me.rank, len(task.ranks), task.local_rank, len(task.ranks))
            group = connect(self._store, ranks, self._device, task.me.host)
            whole = torch.full((_SUM_ELEMENTS,), float(task.me.rank + 1), device=self._device)
            times = []
            for _ in range(3):
                began = time.monotonic()
                total = group.all_reduce(whole)
                if float(total[-1]) != sum(range(1, len(task.ranks) + 1)):
                    raise HandoffError(f"the sum over its ranks is {float(total[-1])}")
                times.append(time.monotonic() - began)
            return {"seconds": min(times), "bytes_per_s": whole.numel() * whole.element_size() / min(times)}

        self._check(f"all-reduce/{task.me.key}", together)

    def _dial_each_other(self) -> None:
        """Plain connections first: they name the two ranks that cannot reach each other; a collective does not."""
        me = self.task.me
        listener = socket.create_server((me.host, 0), family=_family(me.host))
        self._kept.callback(listener.close)
        self._store.set(f"port/{me.rank}", str(listener.getsockname()[1]))
        for other in self.task.ranks:
            if other.rank != me.rank:
                port = int(self._store.get(f"port/{other.rank}"))
                self._dial(other.host, port, f"{other} at {other.host}:{port}")

    def _offer(self) -> None:
        """Opens a decode leader's link port and the store of its edges; puts both, or the error, on the board."""
        task = self.task
        try:
            link = socket.create_server((task.me.host, task.link_port), family=_family(task.me.host))
            store = EdgeStore(task.me.host, task.store_port)
        except (OSError, BatonError) as error:
            self.board.put(f"offer/{task.me.worker}", {"error": str(error)})
            return
        self._kept.callback(link.close)
        self._kept.callback(store.close)
        offer = {"link": link.getsockname()[1], "store": store.port, "host": store.host, "nonce": store.nonce}
        self.board.put(f"offer/{task.me.worker}", offer)

    def _link(self) -> None:
        for name in self.task.links if self.task.role == "prefill" else ():

            def dial(name: str = name) -> dict[str, Any]:
                offer = self._offered(name)
                began = time.monotonic()
                self._dial(offer["host"], offer["link"], f"the link of {name} at {offer['host']}:{offer['link']}")
                return {"seconds": time.monotonic() - began}

            self._check(f"link/{self.task.me.worker}/{name}", dial)

    def _edges(self) -> None:
        asyncio.run(self._all_edges())

    async def _all_edges(self) -> None:
        edges = await asyncio.gather(*(self._connect(peer) for peer in self.task.peers))
        if self.task.role == "decode":
            await asyncio.gather(
                *(self._receive(peer, edge) for peer, edge in zip(self.task.peers, edges, strict=True))
            )
        else:
            for peer, edge in zip(self.task.peers, edges, strict=True):  # one by one: they would share the wire
                await self._send(peer, edge)

    async def _connect(self, peer: Rank) -> EdgeWorker | str:
        """The connected edge, or why there is none."""
        task = self.task
        prefill, decode = (task.me, peer) if task.role == "prefill" else (peer, task.me)
        try:
            offer = await asyncio.to_thread(self._offered, decode.worker)
            name = edge_prefix(offer["nonce"], prefill.worker, prefill.rank, decode.worker, decode.rank, 1)
            spec = EdgeSpec(
                offer["host"],
                offer["store"],
                name,
                1,
                task.role,
                task.me.host,
                connect_timeout_s=task.limit_s * _EDGE_SHARE,
                operation_timeout_s=task.limit_s,
                device=str(self._buffers),
            )
            edge = EdgeWorker(spec, make_edge(self._kind), kv_device=self._device)
            await edge.connect()
            return edge
        except BatonError as error:
            await asyncio.to_thread(self.board.put, f"end/{task.me.key}/{peer.key}", {"error": error.message})
            return error.message

    async def _send(self, peer: Rank, edge: EdgeWorker | str) -> None:
        result: dict[str, Any] = {"error": edge} if isinstance(edge, str) else {}
        if not isinstance(edge, str):
            try:
                async with asyncio.timeout(self.task.limit_s):
                    small = [await self._timed(edge, SMALL_BYTES) for _ in range(SMALL_TIMES)]
                    large = [await self._timed(edge, LARGE_BYTES) for _ in range(LARGE_TIMES)]
                result = {"seconds": statistics.median(small), "bytes_per_s": LARGE_BYTES / min(large)}
            except (BatonError, TimeoutError) as error:
                result = {"error": str(error) or f"no transfer ended within {self.task.limit_s:g} s"}
        await asyncio.to_thread(self.board.put, edge_key(self.task.me, peer), result)

    async def _timed(self, edge: EdgeWorker, count: int) -> float:
        buf = allocator(self._kind)(count, self._buffers).copy_(_pattern(count))
        began = time.monotonic()
        await edge.send(buf)
        return time.monotonic() - began

    async def _receive(self, peer: Rank, edge: EdgeWorker | str) -> None:
        if isinstance(edge, str):
            return
        try:
            for count in (*[SMALL_BYTES] * SMALL_TIMES, *[LARGE_BYTES] * LARGE_TIMES):
                buf = torch.empty(count, dtype=torch.uint8, device=self._buffers)
                await edge.recv(buf, self.task.limit_s * (1 + len(self.task.peers)))
                if not torch.equal(buf.cpu(), _pattern(count)):
                    raise HandoffError("the bytes received differ from those sent")
        except BatonError as error:
            await asyncio.to_thread(self.board.put, f"end/{self.task.me.key}/{peer.key}", {"error": error.message})

    def _offered(self, worker: str) -> dict[str, Any]:
        offer: dict[str, Any] = self._await(f"offer/{worker}", f"{worker} has not opened its ports")
        if "error" in offer:
            raise HandoffError(f"{worker} cannot open its ports: {offer['error']}")
        return offer

    def _await(self, name: str, otherwise: str) -> Any:
        value = self.board.wait(name, self._inner_s)
        if value is None:
            raise HandoffError(f"{otherwise} within {self._inner_s:g} s")
        return value

    def _dial(self, host: str, port: int, what: str) -> None:
        try:
            socket.create_connection((host, port), timeout=self._inner_s).close()
        except OSError as error:
            raise HandoffError(f"cannot reach {what}: {error.strerror or error}") from None

    def _check(self, name: str, check: Callable[[], dict[str, Any]]) -> None:
        """Runs a check on a thread of its own and puts its result on the board, or that it did not end."""
        found: dict[str, Any] = {"error": f"not done within {self.task.limit_s:g} s"}

        def run() -> None:
            nonlocal found
            try:
                found = check()
            except Exception as error:
                found = {"error": str(error).splitlines()[0] if str(error) else repr(error)}

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self.task.limit_s)
        self.board.put(name, found)


def _pattern(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int64).remainder_(251).to(torch.uint8)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def main() -> None:
    die_with_parent()
    torch.set_num_threads(1)
    order = json.loads(Path(sys.argv[1]).read_text())
    code = 0
    try:
        Probe(task_from_json(order["task"]), BoardClient(*order["board"])).run()
    except (BatonError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
