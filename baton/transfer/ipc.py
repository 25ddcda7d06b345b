"""An edge between two workers on one host: the receiver copies directly from the sender's buffer.

The sender exports its staging buffer (shared_buffers.py) and announces over a Gloo edge, section by section, what is
packed; the receiver maps the buffer, copies each section into its own, and reports when it no longer needs the
sender's. Only the receiver copies, so a late copy is harmless: an aborted sender never writes into memory that is
reused by then, and what a late receiver has copied is discarded, since its edge has ended. The Gloo edge provides
order, deadlines, aborts and the detection of a dead peer.

On GPUs memory is exported by CUDA's IPC handles. When KV is in host memory, shared memory is used instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from baton.core.errors import HandoffError
from baton.transfer.edge import Arrived, EdgeSpec, Ready, Word, cut_buffer
from baton.transfer.gloo import GlooEdge
from baton.transfer.shared_buffers import export, host_identity, map_exported
from baton.transfer.streams import HELD, current_stream, finish

_RECORD = 1024  # bytes: the length of a buffer's handle, then the handle
_IDENTITY = 512
_CLOSE_S = 1.0
MOST_MAPPED = 8
"""Buffers of the sender that stay mapped. It has a few in turn, and mapping one waits for the driver of the GPU."""


class IpcEdge:
    """One end of an edge within a host; see `Edge` for the contract."""

    def __init__(self, spec: EdgeSpec) -> None:
        self.spec = spec
        self._device = torch.device(spec.device)
        self._control = GlooEdge(replace(spec, device="cpu"))  # carries its messages
        self._mapped: dict[bytes, Tensor] = {}  # the sender's buffers by handle, the most recently used last

    def connect(self) -> None:
        deadline = time.monotonic() + self.spec.connect_timeout_s
        self._control.connect()
        mine = _padded(host_identity(self._device), _IDENTITY)
        theirs = torch.empty_like(mine)
        for sender in (0, 1):
            left_s = max(deadline - time.monotonic(), 0.01)
            if sender == self.spec.rank:
                self._control.send(mine, left_s)
            else:
                self._control.recv(theirs, left_s)
        if not torch.equal(mine, theirs):
            self.close()
            here, there = (_content(one).decode(errors="replace") for one in (mine, theirs))
            raise self.spec.error(f"edge-kind ipc needs both workers on one host: this is {here}, the peer {there}")

    def send(self, buf: Tensor, timeout_s: float, ends: Sequence[int] = (), ready: Ready | None = None) -> None:
        deadline = time.monotonic() + timeout_s
        sections = cut_buffer(self.spec, buf, ends)
        records = _padded(export(buf), _RECORD).repeat(len(sections))

        def announce(index: int) -> int:
            word = 0 if ready is None else ready(index)
            if isinstance(word, Tensor):
                word = torch.empty(1, dtype=torch.int64, pin_memory=True).copy_(word, non_blocking=True)
            finish(self._device, max(deadline - time.monotonic(), 0.01))  # section packed, word on the host
            return int(word) & (1 << 64) - 1

        self._control.send(records, timeout_s, _ends(len(sections)), announce)
        self._control.recv(torch.empty(1, dtype=torch.uint8), max(deadline - time.monotonic(), 0.01))

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
        records, start = torch.empty(len(sections) * _RECORD, dtype=torch.uint8), 0

        def copy(index: int, word: Word) -> None:
            nonlocal start
            end = start + sections[index].numel()
            sections[index].copy_(self._source(records[:_RECORD], buf.numel())[start:end])
            start = end
            if self._device.type == "cuda":
                signed = int(word) - (int(word) >> 63 << 64)
                word = torch.tensor([signed], dtype=torch.int64).pin_memory().to(self._device, non_blocking=True)
            if arrived is not None:
                arrived(index, word)

        self._control.recv(records, timeout_s, on_posted, _ends(len(sections)), copy)
        finish(self._device, max(deadline - time.monotonic(), 0.01))
        self._control.send(torch.zeros(1, dtype=torch.uint8), max(deadline - time.monotonic(), 0.01))

    def abort(self) -> None:
        self._control.abort()

    def close(self) -> None:
        mapped, self._mapped = self._mapped, {}
        try:
            finish(self._device, _CLOSE_S)
        except (HandoffError, RuntimeError):  # a queued copy still reads a mapped buffer
            HELD.keep(mapped, current_stream(self._device))
        self._control.close()

    def _source(self, record: Tensor, num_bytes: int) -> Tensor:
        """Returns the sender's buffer, which stays mapped while it is one of the MOST_MAPPED last used. No copy from
        others is queued any more: each `recv` waits for its own. Raises HandoffError."""
        handle = _content(record)
        mapped = self._mapped.pop(handle, None)
        if mapped is None:
            while len(self._mapped) >= MOST_MAPPED:
                del self._mapped[next(iter(self._mapped))]
            mapped = map_exported(handle, self._device)
        self._mapped[handle] = mapped
        if mapped.numel() != num_bytes:
            raise self.spec.error(f"the sender exports {mapped.numel()} bytes, expected {num_bytes}")
        return mapped


def _ends(count: int) -> tuple[int, ...]:
    return tuple(_RECORD * (index + 1) for index in range(count))


def _padded(content: bytes, size: int) -> Tensor:
    if len(content) + 2 > size:
        raise HandoffError(f"{len(content)} bytes do not fit into a record of {size}")
    return torch.frombuffer(
        bytearray(len(content).to_bytes(2, "little") + content.ljust(size - 2, b"\0")), dtype=torch.uint8
    )


def _content(record: Tensor) -> bytes:
    raw = bytes(record.tolist())
    return raw[2 : 2 + int.from_bytes(raw[:2], "little")]
