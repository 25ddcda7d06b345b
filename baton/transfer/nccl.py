"""An edge over NCCL: the same contract on GPU memory. It has not run yet: no GPU was at hand; review by eye.

Differences from Gloo: the bytes move on the group's own stream behind a side stream, so the engine's stream never
waits for a peer; completion is polled, so no thread sits in a wait that cannot be left; `abort` ends the communicator
from any thread, which is also the proof that no kernel touches the buffer any more. There is no size header (it would
cost a device round trip): both ends take the size from the plan, and a mismatch ends in the timeout.

PyTorch's NCCL watchdog can end the process on an error or a timeout. `configure_watchdog` turns that off and must run
before the first NCCL group of the process; the deadlines of `send`, `recv` and `EdgeWorker` take its place.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from baton.transfer.edge import Arrived, EdgeSpec, Ready, check_buffer, cut_buffer
from baton.transfer.rendezvous import Meeting

_WORD = struct.Struct("<Q")
_POLL_MIN_S, _POLL_MAX_S = 0.00005, 0.002
_MAX_CTAS = 4  # channels of one edge; each takes a few MB of buffers on both GPUs and one SM while it moves bytes

WATCHDOG_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # errors are ours to read from the work; nothing is torn down
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # no thread that kills a process whose watchdog seems stuck
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "600",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",  # one edge's error stays in that edge
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",  # a blocking initialisation cannot be aborted
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "30",
}


def configure_watchdog() -> None:
    """Sets PyTorch's NCCL watchdog so that it cannot end the process. It speaks for every NCCL group of the process."""
    os.environ.update(WATCHDOG_ENVIRONMENT)


class NcclEdge:
    """One end of an edge over NCCL; see `Edge` for the contract. `spec.device` names the GPU, such as "cuda:0"."""

    def __init__(self, spec: EdgeSpec) -> None:
        self.spec = spec
        self._group: Any = None
        self._stream: Any = None
        self._meeting = Meeting(spec)
        self._dead = False

    def connect(self) -> None:
        nccl: Any = getattr(torch.distributed, "ProcessGroupNCCL", None)
        if nccl is None or not torch.cuda.is_available():
            raise self.spec.error("this torch has no NCCL or no GPU")
        device = torch.device(self.spec.device)
        with self._meeting.meet() as (store, deadline):
            options = nccl.Options(is_high_priority_stream=False)
            options._timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.01))
            options.config.blocking = 0
            options.config.min_ctas, options.config.max_ctas = 1, _MAX_CTAS
            self._group = nccl(store, self.spec.rank, 2, options)
            cuda: Any = torch.cuda
            self._stream = cuda.Stream(device)
            # A byte each way makes the communicator now, proves it, and ends the need for the store's keys.
            probe = torch.zeros(1, dtype=torch.uint8, device=device)
            for sender in (0, 1):
                name = "send" if sender == self.spec.rank else "recv"
                self._move(name, probe, deadline - time.monotonic())

    def send(self, buf: Tensor, timeout_s: float, ends: Sequence[int] = (), ready: Ready | None = None) -> None:
        check_buffer(self.spec, buf)
        deadline = time.monotonic() + timeout_s
        for index, section in enumerate(cut_buffer(self.spec, buf, ends)):
            word = _WORD.pack(0 if ready is None else ready(index))
            behind = torch.frombuffer(bytearray(word), dtype=torch.uint8).to(buf.device)
            for part in (section, behind):
                self._move("send", part, deadline - time.monotonic())

    def recv(
        self,
        buf: Tensor,
        timeout_s: float,
        on_posted: Callable[[], None] | None = None,
        ends: Sequence[int] = (),
        arrived: Arrived | None = None,
    ) -> None:
        check_buffer(self.spec, buf)
        deadline = time.monotonic() + timeout_s
        for index, section in enumerate(cut_buffer(self.spec, buf, ends)):
            self._move("recv", section, deadline - time.monotonic(), on_posted if index == 0 else None)
            behind = torch.empty(_WORD.size, dtype=torch.uint8, device=buf.device)
            self._move("recv", behind, deadline - time.monotonic())
            if arrived is not None:
                arrived(index, _WORD.unpack(bytes(behind.tolist()))[0])

    def abort(self) -> None:
        self._meeting.abort()
        group = self._group
        if group is not None:  # on a thread: ending a communicator may take a while, and this must not block
            threading.Thread(target=_abort, args=(group,), name="edge-abort", daemon=True).start()

    def close(self) -> None:
        self._dead = True
        group, self._group = self._group, None
        if group is not None:
            _abort(group)  # `shutdown` would wait for a peer that may be gone

    def _move(self, name: str, buf: Tensor, timeout_s: float, on_posted: Callable[[], None] | None = None) -> None:
        """Launches one operation on the side stream and polls it. Raises HandoffError; the edge is dead then."""
        if self._dead or self._group is None or self._meeting.aborted:
            raise self.spec.error(f"{name} on an edge that has ended")
        start, pause_s, cause = time.monotonic(), _POLL_MIN_S, ""
        try:
            self._stream.wait_stream(torch.cuda.current_stream(buf.device))  # `pack` ran there
            with torch.cuda.device(buf.device), torch.cuda.stream(self._stream):
                work = getattr(self._group, name)([buf], self.spec.peer_rank, 0)
            if on_posted is not None:
                on_posted()
            while not work.is_completed():
                if self._meeting.aborted or time.monotonic() - start > timeout_s:
                    cause = "aborted" if self._meeting.aborted else "timed out"
                    break
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.5, _POLL_MAX_S)
            else:
                error = work.exception()
                cause = str(error).splitlines()[0] if error is not None else ""
        except RuntimeError as e:
            cause = str(e).splitlines()[0] or repr(e)
        if cause:
            self._dead = True
            _abort(self._group)  # only then is the buffer free of the device
            took_s = time.monotonic() - start
            raise self.spec.error(f"{name} of {buf.numel()} bytes failed after {took_s:.2f} s: {cause}")


def _abort(group: Any) -> None:
    with contextlib.suppress(RuntimeError):  # it may have ended already
        group.abort()
