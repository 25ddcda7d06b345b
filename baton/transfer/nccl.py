"""An edge over NCCL: the same contract on GPU memory.

Differences from Gloo: all work is queued on the stream of the edge's thread and on the group's own stream, which no
other work uses (stream_pool.py), so neither the engine nor another edge waits for a peer. All sections of a buffer and
one message with their checksums are queued together; the host polls for the end of the last one, so no thread is ever
in a wait that cannot be interrupted. There is no size header (it would cost a device round trip): both ends take the
sizes from the plan, and a mismatch times out.

PyTorch's NCCL watchdog can end the process on an error or a timeout; even when that is disabled, it sleeps for a minute
with its lock held. `configure_nccl` disables what can be disabled and must run before CUDA is used in the process;
operations get a timeout that never expires, and the deadlines of `send`, `recv` and `EdgeWorker` replace it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

import torch
from torch import Tensor

from baton.transfer.edge import Arrived, EdgeSpec, Ready, cut_buffer
from baton.transfer.rendezvous import Meeting
from baton.transfer.shared_buffers import boot_id
from baton.transfer.stream_pool import NCCL_PRIORITY, stream_pool

NEVER = timedelta(days=1)
"""The operation timeout given to PyTorch: its handling of a timeout does more harm than the hang."""
MAX_CTAS = 4
"""Channels of one edge; each uses a few MB of buffers on both GPUs, and one SM while an operation runs: the kernel of a
posted receive spins there until the sender comes."""
_POLL_MIN_S, _POLL_MAX_S = 0.00005, 0.002
_ABORT_GRACE_S = 0.2

NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # errors are read from the work objects; nothing is torn down
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # it would switch error handling on
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # else `wait` polls the device: a thread would stop at each sum over ranks
    "TORCH_NCCL_HIGH_PRIORITY": "0",  # groups take streams of the priority that stream_pool.py expects
    "NCCL_COMM_BLOCKING": "-1",  # 0 and 1 would replace what each group says
    "TORCH_NCCL_BCAST_UNIQUEID": "1",  # else the ends of an edge create two communicators, which never connect
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "0",  # an allocation of the engine would wait for edges, and fail
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # no thread that kills the process when its watchdog seems stuck
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "86400",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # how long the watchdog sleeps, with its lock held, after an error
    "TORCH_NCCL_PROPAGATE_ERROR": "0",  # an error of one edge does not reach other edges
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_FR_BUFFER_SIZE": "0",  # no traceback recorded for each operation or printed after an error
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "8",  # seconds that creating a communicator may hold a lock
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # hardware queues: streams that share one wait for each other
}


def configure_nccl(host: str) -> None:
    """Sets the environment variables that NCCL, PyTorch's NCCL groups and CUDA read, for every group of the process.
    NCCL listens on the interface that has the address `host`, unless the environment names others: by itself it takes
    the first ones that are not loopback, whatever address this worker was given."""
    os.environ.update(NCCL_ENVIRONMENT)
    of_torch: Any = torch.distributed
    if of_torch.get_debug_level() == of_torch.DebugLevel.DETAIL:  # as TORCH_NCCL_DESYNC_DEBUG; read at the import
        of_torch.set_debug_level(of_torch.DebugLevel.INFO)
    interface = interface_of(host)
    if interface and "NCCL_SOCKET_IFNAME" not in os.environ:
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"  # "=": this name, not every name that begins with it
        os.environ.setdefault("NCCL_SOCKET_FAMILY", "AF_INET6" if ":" in host else "AF_INET")


def local_gpus(local_size: int) -> tuple[str, ...]:
    """Returns, for each rank of a worker on this machine, its GPU as NCCL identifies it: two ranks with the same one
    cannot connect. NCCL compares the host and the GPU's address on the PCI bus, which all MIG instances of a GPU share.
    Empty if a variable of NCCL allows it."""
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") not in ("", "0"):
        return ()
    host = os.environ.get("NCCL_HOSTID") or f"{socket.gethostname()}, boot {boot_id()}"
    gpus = []
    for rank in range(local_size):
        facts: Any = torch.cuda.get_device_properties(rank % torch.cuda.device_count())
        where = f"GPU-{facts.uuid}"
        if hasattr(facts, "pci_bus_id"):  # not in every torch
            where = f"PCI {facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}"
        gpus.append(f"{facts.name} {where} of {host}")
    return tuple(gpus)


class NcclEdge:
    """One end of an edge over NCCL; see `Edge` for the contract. `spec.device` names the GPU, such as "cuda:0"."""

    def __init__(self, spec: EdgeSpec) -> None:
        self.spec = spec
        self._group: Any = None
        self._meeting = Meeting(spec)
        self._dead = False
        self._ended = threading.Event()  # the communicator has ended, or was never created
        self._ending = threading.Lock()  # held while it is being ended
        self._streams: list[int] = []  # of the group

    def connect(self) -> None:
        nccl: Any = getattr(torch.distributed, "ProcessGroupNCCL", None)
        if nccl is None or not torch.cuda.is_available():
            raise self.spec.error("this torch has no NCCL or no GPU")
        device = torch.device(self.spec.device)
        streams = stream_pool(device, NCCL_PRIORITY)
        with self._meeting.meet() as (store, deadline), streams.taken_by_torch() as self._streams:
            self._group = nccl(store, self.spec.rank, 2, edge_options(nccl))
            # One byte each way creates and tests the communicator; after it the store's keys are no longer needed.
            probe = torch.zeros(1, dtype=torch.uint8, device=device)
            for sender in (0, 1):
                name = "send" if sender == self.spec.rank else "recv"
                self._wait(name, [self._launch(name, probe)], deadline, 1)

    def send(self, buf: Tensor, timeout_s: float, ends: Sequence[int] = (), ready: Ready | None = None) -> None:
        deadline = time.monotonic() + timeout_s
        sections = cut_buffer(self.spec, buf, ends)
        works, words = [], []
        for index, section in enumerate(sections):
            words.append(_on_device(0 if ready is None else ready(index), buf.device))
            works.append(self._launch("send", section))
        works.append(self._launch("send", torch.cat(words).view(torch.uint8)))
        self._wait("send", works, deadline, buf.numel())

    def recv(
        self,
        buf: Tensor,
        timeout_s: float,
        on_posted: Callable[[], None] | None = None,
        ends: Sequence[int] = (),
        arrived: Arrived | None = None,
    ) -> None:
        deadline = time.monotonic() + timeout_s
        sections = cut_buffer(self.spec, buf, ends)
        words = torch.empty(len(sections), dtype=torch.int64, device=buf.device)
        works = [self._launch("recv", part) for part in (*sections, words.view(torch.uint8))]
        if on_posted is not None:
            on_posted()
        self._wait("recv", works, deadline, buf.numel())
        if arrived is not None:
            for index in range(len(sections)):
                arrived(index, words[index : index + 1])

    def abort(self) -> None:
        self._meeting.abort()
        # The edge's thread detects this at its next poll and ends the communicator itself: ending it here could wait
        # for a lock that the edge's thread holds. If that thread does not get there in time, `edge-abort` ends it.
        if self._group is not None and not self._ended.is_set():
            threading.Thread(target=self._abort_late, name="edge-abort", daemon=True).start()

    def close(self) -> None:
        self._dead = True
        self._end()  # `shutdown` would wait for a peer that may have exited
        self._group = None
        streams, self._streams = self._streams, []
        if streams:
            stream_pool(torch.device(self.spec.device), NCCL_PRIORITY).give_back(*streams)

    def _launch(self, name: str, buf: Tensor) -> Any:
        """Queues one operation after the work already on the thread's stream. Raises HandoffError."""
        if self._dead or self._group is None or self._meeting.aborted:
            raise self._failed(name, buf.numel(), 0.0, "the edge has ended")
        try:
            return getattr(self._group, name)([buf], self.spec.peer_rank, 0)
        except RuntimeError as e:
            raise self._failed(name, buf.numel(), 0.0, str(e)) from e

    def _wait(self, name: str, works: Sequence[Any], deadline: float, num_bytes: int) -> None:
        """Polls the last operation; when it has ended, all have. Raises HandoffError; the edge is dead then."""
        start, pause_s, cause = time.monotonic(), _POLL_MIN_S, ""
        try:
            while True:
                # Checked first: `is_completed` holds the GIL while it waits for a lock that an abort may hold.
                if self._meeting.aborted or time.monotonic() > deadline:
                    cause = "aborted" if self._meeting.aborted else "timed out"
                    break
                if works[-1].is_completed():
                    # Raises the operation's error on every torch (`exception` only from 2.13, `is_success` never).
                    # Otherwise it orders the thread's stream after the operation, without blocking.
                    for work in works:
                        work.wait()
                    break
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.5, _POLL_MAX_S)
        except RuntimeError as e:
            cause = str(e) or repr(e)
        if cause:
            raise self._failed(name, num_bytes, time.monotonic() - start, cause)

    def _failed(self, name: str, num_bytes: int, took_s: float, cause: str) -> Exception:
        self._dead = True
        self._end()  # only now is the buffer no longer used by the device
        return self.spec.error(f"{name} of {num_bytes} bytes failed after {took_s:.2f} s: {cause.splitlines()[0]}")

    def _abort_late(self) -> None:
        if not self._ended.wait(_ABORT_GRACE_S):
            self._end()

    def _end(self) -> None:
        """Returns when the communicator has ended, whichever thread ends it: until then its operations may still read
        and write their buffers. The edge's thread calls it again after `edge-abort`: the first operation creates the
        communicator, and an abort before that ends nothing."""
        with self._ending:
            group = self._group
            if group is not None:
                with contextlib.suppress(RuntimeError):
                    group.abort()
            self._ended.set()


def edge_options(nccl: Any) -> Any:
    """Returns the options of an edge's group: non-blocking, since a blocking initialisation cannot be aborted."""
    options = nccl.Options(is_high_priority_stream=False)
    options._timeout = NEVER
    options.config.blocking = 0
    options.config.min_ctas, options.config.max_ctas = 1, MAX_CTAS
    return options


def _on_device(word: int | Tensor, device: torch.device) -> Tensor:
    return word if isinstance(word, Tensor) else torch.tensor([word], dtype=torch.int64, device=device)


_IPV4_AT, _IPV6_AT = 4, 8  # of the address in sockaddr_in and sockaddr_in6


class _IfAddrs(ctypes.Structure):
    """`struct ifaddrs` of getifaddrs(3), as far as it is read."""


_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def interface_of(host: str) -> str:
    """Returns the name of the interface that has the address `host` (a numeric address or a name); empty for one that
    stands for all interfaces, or that none has. A loopback address belongs to the loopback interface, whichever of
    127.0.0.0/8 it is."""
    try:
        target = ip_address(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, ValueError):
        return ""
    if target.is_unspecified:
        return ""
    for name, address in interface_addresses():
        candidate = ip_address(address)
        if candidate == target or (target.is_loopback and candidate.is_loopback):
            return name
    return ""


def interface_addresses() -> Iterator[tuple[str, str]]:
    """Yields (interface, address) for each IPv4 and IPv6 address of this machine. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "getifaddrs failed")
    try:
        entry = first
        while entry:
            here = entry.contents
            if here.address:
                family = ctypes.c_ushort.from_address(here.address).value
                if family in (socket.AF_INET, socket.AF_INET6):
                    at, size = (_IPV4_AT, 4) if family == socket.AF_INET else (_IPV6_AT, 16)
                    raw = ctypes.string_at(here.address + at, size)
                    yield here.name.decode(), socket.inet_ntop(family, raw)
            entry = here.next
    finally:
        libc.freeifaddrs(first)
