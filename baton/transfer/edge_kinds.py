"""Which backend moves the bytes of a worker's edges. The only place that knows them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from baton.core.errors import StartupError
from baton.transfer.edge import MakeEdge
from baton.transfer.gloo import GlooEdge
from baton.transfer.ipc import IpcEdge
from baton.transfer.nccl import NcclEdge
from baton.transfer.shared_buffers import allocate_shared
from baton.transfer.staging_buffers import plain_buffer

EdgeKind = Literal["gloo", "nccl", "ipc"]


@dataclass(frozen=True, slots=True)
class Backend:
    """`make` makes one end of an edge. `beside_kv`: packed and received KV lies where the blocks are, not in host
    memory; `allocate(bytes, device)` gives buffers for it. `needs_gpu`: it moves device memory alone. To connect takes
    at most `connect_s`, or the limit of an operation if that is longer."""

    make: MakeEdge
    beside_kv: bool
    needs_gpu: bool
    allocate: Callable[[int, torch.device], Tensor] = plain_buffer
    connect_s: float = 0.0


EDGES: Mapping[EdgeKind, Backend] = {
    "gloo": Backend(GlooEdge, beside_kv=False, needs_gpu=False),
    "nccl": Backend(NcclEdge, beside_kv=True, needs_gpu=True, connect_s=15.0),
    "ipc": Backend(IpcEdge, beside_kv=True, needs_gpu=False, allocate=allocate_shared),
}


def choose_edges(wanted: str, device: torch.device) -> EdgeKind:
    """ "auto" is NCCL for KV on a GPU, else Gloo, which takes KV on a GPU through host memory. Raises StartupError for
    a kind that there is not, or NCCL without a GPU."""
    if wanted == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    for kind, backend in EDGES.items():
        if wanted == kind:
            if backend.needs_gpu and device.type != "cuda":
                raise StartupError(f"edge-kind {kind}: KV on {device.type} goes over gloo")
            return kind
    raise StartupError(f"edge-kind must be auto, {', '.join(EDGES)}, not {wanted!r:.60}")


def edge_connect_s(kind: EdgeKind, operation_timeout_s: float) -> float:
    """A first communicator of NCCL loads its library and finds out about the machine, which takes seconds."""
    return max(EDGES[kind].connect_s, operation_timeout_s)


def buffer_device(kind: EdgeKind, device: torch.device) -> torch.device:
    """Where packed and received KV lies before it is sent or scattered; `device` is where the blocks are."""
    return device if EDGES[kind].beside_kv else torch.device("cpu")
