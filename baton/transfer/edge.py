"""The interface of the backends: one edge between one prefill rank and one decode rank.

An edge is a private two-rank group; it belongs to one thread, which calls `connect`, then `send` or `recv` one at a
time, then `close`. Only `abort` may be called from elsewhere. An edge that has failed once is dead: both ends create a
new one under the next generation, so a late byte of the old edge cannot arrive in the new one.

`MakeEdge` of a kind of edge is loaded by its name in baton.core.edge_kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Literal, Protocol

import torch
from torch import Tensor

from baton.core.edge_kinds import EDGE_KINDS
from baton.core.errors import HandoffError

Side = Literal["prefill", "decode"]
Word = int | Tensor
"""64 bits sent with a section: an int, or, when buffers lie on a device, an int64 [1] there."""
Ready = Callable[[int], Word]
"""Called before section i of a buffer is read for sending; returns the word to send with the section."""
Arrived = Callable[[int, Word], None]
"""Called in order with i and the word of section i, when section i has arrived; later ones may not have."""
SENDER, RECEIVER = 0, 1  # ranks in the two-rank group


def edge_prefix(nonce: str, prefill: str, prefill_rank: int, decode: str, decode_rank: int, generation: int) -> str:
    """Returns the name of one generation of one edge, which prefixes its keys in the decode worker's store.

    `nonce` is the store's own (`EdgeStore.nonce`), so a restarted worker never uses keys of its previous incarnation.
    """
    return f"{nonce}/{prefill}.{prefill_rank}/{decode}.{decode_rank}/g{generation}"


@dataclass(frozen=True, slots=True)
class EdgeSpec:
    """Everything that one end needs to make its edge.

    `host` and `port` are the decode worker's `EdgeStore`; `bind_host` is this end's own address for the bytes;
    `generation` is a number that the prefill worker's process has used for no other edge, and is part of `prefix`
    already (see `edge_prefix`);
    `operation_timeout_s` applies when a send or receive names none; `device` is the device of the buffers.
    """

    host: str
    port: int
    prefix: str
    generation: int
    side: Side
    bind_host: str = "127.0.0.1"
    connect_timeout_s: float = 5.0
    operation_timeout_s: float = 10.0
    device: str = "cpu"

    @property
    def rank(self) -> int:
        return SENDER if self.side == "prefill" else RECEIVER

    @property
    def peer_rank(self) -> int:
        return 1 - self.rank

    def error(self, problem: str) -> HandoffError:
        """Returns a HandoffError that names the side, the edge, its store and the problem (`problem`)."""
        return HandoffError(f"edge {self.prefix} ({self.side} side, store {self.host}:{self.port}): {problem}")


class Edge(Protocol):
    """One end of an edge. Every method but `abort` blocks and belongs to the edge's thread; every wait is bounded. All
    raise HandoffError; after the first error the edge is dead and every later call raises immediately."""

    def connect(self) -> None:
        """Connects to the peer within `connect_timeout_s`."""

    def send(self, buf: Tensor, timeout_s: float, ends: Sequence[int] = (), ready: Ready | None = None) -> None:
        """Sends `buf` (uint8, 1-D, contiguous, not empty) in sections that end at `ends` (empty: as one section), and
        returns when it may be reused. An exception of `ready` ends the edge."""

    def recv(
        self,
        buf: Tensor,
        timeout_s: float,
        on_posted: Callable[[], None] | None = None,
        ends: Sequence[int] = (),
        arrived: Arrived | None = None,
    ) -> None:
        """Fills `buf` (uint8, 1-D, contiguous, not empty; the sender's size and number of sections exactly).
        `on_posted` is called once the receive is open to the peer, before the wait for it. An exception of `arrived`
        ends the edge."""

    def abort(self) -> None:
        """Ends the edge and unblocks an operation as far as the backend can. May be called from any thread, at any
        time, more than once. Does not block and does not raise."""

    def close(self) -> None:
        """Frees the group and its sockets; the peer then detects the end of the edge. Safe to call twice."""


MakeEdge = Callable[[EdgeSpec], Edge]


def cut_buffer(spec: EdgeSpec, buf: Tensor, ends: Sequence[int]) -> list[Tensor]:
    """Returns the sections of `buf`. Raises HandoffError unless `buf` suits an edge, `ends` rise strictly, and the last
    of them is its size."""
    if str(buf.dtype) != "torch.uint8" or buf.dim() != 1 or not buf.is_contiguous() or buf.numel() == 0:
        raise spec.error(f"a buffer must be uint8, 1-D, contiguous, not empty: {buf.dtype} {tuple(buf.shape)}")
    if buf.device.type != spec.device.split(":")[0]:
        raise spec.error(f"the buffer is on {buf.device}, the edge on {spec.device}")
    ends = tuple(ends) or (buf.numel(),)
    starts = (0, *ends[:-1])
    if ends[-1] != buf.numel() or any(start >= end for start, end in zip(starts, ends, strict=True)):
        raise spec.error(f"a buffer of {buf.numel()} bytes cannot have sections that end at {ends}")
    return [buf[start:end] for start, end in zip(starts, ends, strict=True)]


def make_edge(kind: str) -> MakeEdge:
    make: MakeEdge = resolve_name(EDGE_KINDS[kind].edge)
    return make


def allocator(kind: str) -> Callable[[int, torch.device], Tensor]:
    """Returns the function (bytes, device) -> staging buffer."""
    allocate: Callable[[int, torch.device], Tensor] = resolve_name(EDGE_KINDS[kind].allocate)
    return allocate


def edge_connect_s(kind: str, operation_timeout_s: float) -> float:
    """Returns the limit for connecting; the first NCCL communicator takes seconds to load and detect the topology."""
    return max(EDGE_KINDS[kind].connect_s, operation_timeout_s)


def buffer_device(kind: str, device: torch.device) -> torch.device:
    """Returns the device of staging buffers; `device` is that of the blocks."""
    return device if EDGE_KINDS[kind].beside_kv else torch.device("cpu")
