"""`python -m launch.doctor.probe FILE`: represents one rank while the doctor runs; the file holds its task.

It announces itself on the board, runs the steps as the doctor opens them, puts its results on the board, and ends when
the doctor does. An operation that exceeds the limit of a step stays in its thread: the process ends with `os._exit`.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from baton.core.edge_kinds import choose_edges
from baton.core.errors import BatonError, HandoffError
from baton.core.ranks import Ranks
from baton.engine.device import choose_device
from baton.engine.parallel import connect, open_store
from baton.runtime.process import die_with_parent
from baton.transfer.edge import Edge, EdgeSpec, edge_prefix
from baton.transfer.edge_kinds import allocator, buffer_device, make_edge
from baton.transfer.nccl import configure_nccl
from baton.transfer.rendezvous import EdgeStore
from baton.transfer.streams import own_stream
from launch.doctor.board import BoardClient
from launch.doctor.tasks import STEPS, Rank, Task, task_from_json

SMALL_BYTES, LARGE_BYTES = 1 << 10, 8 << 20
TRANSFERS = (*[SMALL_BYTES] * 9, *[LARGE_BYTES] * 3)
_LONGEST_S = 900.0
_SUM_ELEMENTS = 1 << 18
_INNER_SHARE, _EDGE_SHARE = 0.4, 0.8  # of a step's limit: a wait within the step times out first and names its peer

_Result = dict[str, Any]
"""`seconds` and `bytes_per_s`, if they were measured, or `error`."""


class Probe:
    """Its whole state: the task, the board, the devices of KV and buffers, the listeners, stores and edges that stay
    open until the end, and the worker's store once open. Raises StartupError when the device or the edge kind is not
    available."""

    def __init__(self, task: Task, board: BoardClient) -> None:
        self.task, self.board = task, board
        configure_nccl(task.me.host)
        self._device = choose_device(task.device, False, task.local_rank)
        self._kind = choose_edges(task.edge_kind, self._device.type)
        self._buffers = buffer_device(self._kind, self._device)
        self._inner_s = task.limit_s * _INNER_SHARE
        self._open: list[Any] = []
        self._store: Any = None
        self._wire = threading.Lock()

    def run(self) -> None:
        self.board.put(f"here/{self.task.me.key}", True)
        if self.task.leads and self.task.role == "decode":
            self._offer()
        for step in STEPS:
            self.board.wait(f"step/{step}", _LONGEST_S)
            for name, result in self._results(step).items():
                self.board.put(name, result)
        self.board.wait("report", _LONGEST_S)

    def _results(self, step: str) -> dict[str, _Result]:
        """Tries a step with all other ends concurrently, each in its own thread."""
        check = {"rendezvous": self._meet, "all-reduce": self._sum, "link": self._dial_link, "edge": self._move}[step]
        limit_s = self.task.step_s(step)
        results: dict[str, _Result] = {}

        def run(name: str, other: Rank) -> None:
            try:
                results[name] = check(other)
            except Exception as error:
                results[name] = {"error": str(error).splitlines()[0] if str(error) else repr(error)}

        expected = self.task.expected(step)
        threads = [threading.Thread(target=run, args=item, daemon=True) for item in expected.items()]
        deadline = time.monotonic() + limit_s
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return {name: results.get(name, {"error": f"timed out after {limit_s:g} s"}) for name in expected}

    def _meet(self, me: Rank) -> _Result:
        task, began = self.task, time.monotonic()
        if task.leads:
            self._open.append(store := EdgeStore(me.host, task.rendezvous_port))
            self.board.put(f"meet/{me.worker}", [store.host, store.port])
        host, port = self._await(f"meet/{me.worker}", f"the leader of {me.worker} opened no store")
        self._dial(host, port, f"{task.ranks[0]} at {host}:{port}")
        self._store = open_store({"MASTER_ADDR": host, "MASTER_PORT": str(port)}, self._inner_s)
        self._store.set(f"here/{me.rank}", "1")
        for other in task.ranks:
            try:
                self._store.get(f"here/{other.rank}")
            except RuntimeError:
                raise HandoffError(f"{other} did not join the store at {host}:{port}") from None
        return {"seconds": time.monotonic() - began}

    def _sum(self, me: Rank) -> _Result:
        task = self.task
        if self._store is None:
            raise HandoffError("the rendezvous of its ranks failed")
        self._dial_each_other()
        ranks = Ranks(me.rank, len(task.ranks), task.local_rank, len(task.ranks))
        group = connect(self._store, ranks, self._device, me.host)
        whole = torch.full((_SUM_ELEMENTS,), float(me.rank + 1), device=self._device)
        times = []
        for _ in range(3):
            began = time.monotonic()
            total = group.all_reduce(whole)
            if float(total[-1]) != sum(range(1, len(task.ranks) + 1)):
                raise HandoffError(f"wrong sum over its ranks: {float(total[-1])}")
            times.append(time.monotonic() - began)
        return {"seconds": min(times), "bytes_per_s": whole.numel() * whole.element_size() / min(times)}

    def _dial_each_other(self) -> None:
        """Opens plain connections first: unlike a collective, they name two ranks that cannot reach each other."""
        me = self.task.me
        self._store.set(f"port/{me.rank}", str(self._listen(0)))
        for other in self.task.ranks:
            if other.rank != me.rank:
                port = int(self._store.get(f"port/{other.rank}"))
                self._dial(other.host, port, f"{other} at {other.host}:{port}")

    def _offer(self) -> None:
        """Opens a decode leader's link port and the store of its edges; puts both, or the error, on the board."""
        task = self.task
        try:
            link = self._listen(task.link_port)
            self._open.append(store := EdgeStore(task.me.host, task.store_port))
            offer = {"link": link, "store": store.port, "host": store.host, "nonce": store.nonce}
        except (OSError, BatonError) as error:
            offer = {"error": str(error)}
        self.board.put(f"offer/{task.me.worker}", offer)

    def _dial_link(self, leader: Rank) -> _Result:
        offer = self._offered(leader.worker)
        began = time.monotonic()
        self._dial(offer["host"], offer["link"], f"the link of {leader.worker} at {offer['host']}:{offer['link']}")
        return {"seconds": time.monotonic() - began}

    def _move(self, peer: Rank) -> _Result:
        """Connects this end of an edge, then moves bytes over it from prefill to decode. A prefill rank uses its edges
        one after the other, because concurrent transfers would share the wire."""
        task = self.task
        prefill, decode = (task.me, peer) if task.role == "prefill" else (peer, task.me)
        offer = self._offered(decode.worker)
        spec = EdgeSpec(
            offer["host"],
            offer["store"],
            edge_prefix(offer["nonce"], prefill.worker, prefill.rank, decode.worker, decode.rank, 1),
            1,
            task.role,
            task.me.host,
            connect_timeout_s=task.limit_s * _EDGE_SHARE,
            device=str(self._buffers),
        )
        edge = make_edge(self._kind)(spec)
        self._open.append(edge)
        try:
            with own_stream(self._device):
                edge.connect()
                if task.role == "decode":
                    return self._receive(edge)
                with self._wire:
                    return self._send(edge)
        except BaseException:
            edge.abort()  # so that the other end does not wait for its timeout
            raise

    def _send(self, edge: Edge) -> _Result:
        deadline = time.monotonic() + self.task.limit_s
        times: dict[int, list[float]] = {SMALL_BYTES: [], LARGE_BYTES: []}
        for count in TRANSFERS:
            buf = allocator(self._kind)(count, self._buffers).copy_(_pattern(count))
            began = time.monotonic()
            if began >= deadline:
                raise HandoffError(f"the transfers did not end within {self.task.limit_s:g} s")
            edge.send(buf, deadline - began)
            times[count].append(time.monotonic() - began)
        return {"seconds": statistics.median(times[SMALL_BYTES]), "bytes_per_s": LARGE_BYTES / min(times[LARGE_BYTES])}

    def _receive(self, edge: Edge) -> _Result:
        for count in TRANSFERS:
            buf = torch.empty(count, dtype=torch.uint8, device=self._buffers)
            edge.recv(buf, self.task.step_s("edge"))
            if not torch.equal(buf.cpu(), _pattern(count)):
                raise HandoffError("the bytes received differ from those sent")
        return {}

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

    def _listen(self, port: int) -> int:
        """Listens on a port (0: any free one) until the process ends; returns the port. Raises OSError."""
        host = self.task.me.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._open.append(listener := socket.create_server((host, port), family=family))
        return int(listener.getsockname()[1])

    def _dial(self, host: str, port: int, what: str) -> None:
        try:
            socket.create_connection((host, port), timeout=self._inner_s).close()
        except OSError as error:
            raise HandoffError(f"cannot reach {what}: {error.strerror or error}") from None


def _pattern(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int64).remainder_(251).to(torch.uint8)


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
