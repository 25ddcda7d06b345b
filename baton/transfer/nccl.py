"""An edge over NCCL: the same contract on GPU memory.

Differences from Gloo: everything is queued on the stream of the edge's thread and on the group's own, so the engine's
stream never waits for a peer. All sections of a buffer and one message with their checksums are queued at once; the
host polls for the end of the last, so no thread sits in a wait that cannot be left. There is no size header (it would
cost a device round trip): both ends take the sizes from the plan, and a mismatch ends in the timeout.

PyTorch's NCCL watchdog can end the process on an error or a timeout, and even where it may not, it sleeps for a minute
with its lock held. `configure_nccl` turns off what can be turned off and must run before CUDA is used in the process;
operations get a timeout that never comes, and the deadlines of `send`, `recv` and `EdgeWorker` take its place.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from baton.transfer.edge import Arrived, EdgeSpec, Ready, cut_buffer
from baton.transfer.rendezvous import Meeting

NEVER = timedelta(days=1)
"""What an operation may take by PyTorch's own limit: its own timeout does more harm than the hang."""
MAX_CTAS = 4
"""Channels of one edge; each takes a few MB of buffers on both GPUs and one SM while it moves bytes."""
_POLL_MIN_S, _POLL_MAX_S = 0.00005, 0.002
_ABORT_GRACE_S = 0.2

NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # errors are ours to read from the work; nothing is torn down
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # no thread that kills a process whose watchdog seems stuck
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "86400",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # the watchdog sleeps so long, with its lock held, after an error
    "TORCH_NCCL_PROPAGATE_ERROR": "0",  # one edge's error stays in that edge
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_FR_BUFFER_SIZE": "0",  # no traceback gathered for each operation, none printed after an error
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "8",  # seconds that making a communicator may hold a lock
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # hardware queues: streams that share one wait for each other
}


def configure_nccl() -> None:
    """Sets what PyTorch's NCCL groups and CUDA read from the environment, for every group of the process."""
    os.environ.update(NCCL_ENVIRONMENT)


class NcclEdge:
    """One end of an edge over NCCL; see `Edge` for the contract. `spec.device` names the GPU, such as "cuda:0"."""

    def __init__(self, spec: EdgeSpec) -> None:
        self.spec = spec
        self._group: Any = None
        self._meeting = Meeting(spec)
        self._dead = False
        self._ended = threading.Event()  # the communicator is gone, or was never there

    def connect(self) -> None:
        nccl: Any = getattr(torch.distributed, "ProcessGroupNCCL", None)
        if nccl is None or not torch.cuda.is_available():
            raise self.spec.error("this torch has no NCCL or no GPU")
        device = torch.device(self.spec.device)
        with self._meeting.meet() as (store, deadline):
            self._group = nccl(store, self.spec.rank, 2, edge_options(nccl))
            # A byte each way makes the communicator now, proves it, and ends the need for the store's keys.
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
        # The edge's thread sees that at its next poll and ends the communicator itself: from here it could wait for a
        # lock that this thread holds. Where the thread does not come to that, somebody else has to.
        if self._group is not None and not self._ended.is_set():
            threading.Thread(target=self._abort_late, name="edge-abort", daemon=True).start()

    def close(self) -> None:
        self._dead = True
        self._end()  # `shutdown` would wait for a peer that may be gone

    def _launch(self, name: str, buf: Tensor) -> Any:
        """Queues one operation behind what the thread's stream was given. Raises HandoffError."""
        if self._dead or self._group is None or self._meeting.aborted:
            raise self.spec.error(f"{name} on an edge that has ended")
        try:
            return getattr(self._group, name)([buf], self.spec.peer_rank, 0)
        except RuntimeError as e:
            raise self._failed(name, buf.numel(), 0.0, str(e)) from e

    def _wait(self, name: str, works: Sequence[Any], deadline: float, num_bytes: int) -> None:
        """Polls the last operation, behind which all have ended. Raises HandoffError; the edge is dead then."""
        start, pause_s, cause = time.monotonic(), _POLL_MIN_S, ""
        try:
            while True:
                # First of all: to ask for completion takes a lock that an abort may hold, and Python's with it.
                if self._meeting.aborted or time.monotonic() > deadline:
                    cause = "aborted" if self._meeting.aborted else "timed out"
                    break
                if works[-1].is_completed():
                    # Raises what went wrong, with every torch: `exception` cannot before 2.13, `is_success` never can.
                    # Else it orders the thread's stream behind the operation; nothing waits.
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
        self._end()  # only then is the buffer free of the device
        return self.spec.error(f"{name} of {num_bytes} bytes failed after {took_s:.2f} s: {cause.splitlines()[0]}")

    def _abort_late(self) -> None:
        if not self._ended.wait(_ABORT_GRACE_S):
            self._end()

    def _end(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):  # it may have ended already
                group.abort()
        self._ended.set()


def edge_options(nccl: Any) -> Any:
    """Of an edge's group: not blocking, since a blocking initialisation cannot be aborted."""
    options = nccl.Options(is_high_priority_stream=False)
    options._timeout = NEVER
    options.config.blocking = 0
    options.config.min_ctas, options.config.max_ctas = 1, MAX_CTAS
    return options


def _on_device(word: int | Tensor, device: torch.device) -> Tensor:
    return word if isinstance(word, Tensor) else torch.tensor([word], dtype=torch.int64, device=device)
