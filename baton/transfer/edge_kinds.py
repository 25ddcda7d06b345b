"""Loads the backend of a worker's edges by its name in baton.core.edge_kinds."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name

import torch
from torch import Tensor

from baton.core.edge_kinds import EDGE_KINDS
from baton.core.errors import StartupError
from baton.transfer.edge import MakeEdge


def make_edge(kind: str) -> MakeEdge:
    make: MakeEdge = resolve_name(EDGE_KINDS[kind].edge)
    return make


def allocator(kind: str) -> Callable[[int, torch.device], Tensor]:
    """Returns the function (bytes, device) -> staging buffer."""
    allocate: Callable[[int, torch.device], Tensor] = resolve_name(EDGE_KINDS[kind].allocate)
    return allocate


def choose_edges(wanted: str, device: torch.device) -> str:
    """Resolves "auto" to NCCL for KV on a GPU, else to Gloo, which copies KV on a GPU through host memory. Raises
    StartupError for an unknown kind, or for one that needs a GPU when KV is not on one."""
    if wanted == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    if wanted not in EDGE_KINDS:
        raise StartupError(f"edge-kind must be auto, {', '.join(EDGE_KINDS)}, not {wanted!r:.60}")
    if EDGE_KINDS[wanted].needs_gpu and device.type != "cuda":
        raise StartupError(f"edge-kind {wanted} needs KV on a GPU, not on {device.type}; use gloo")
    return wanted


def edge_connect_s(kind: str, operation_timeout_s: float) -> float:
    """Returns the limit for connecting; the first NCCL communicator takes seconds to load and detect the topology."""
    return max(EDGE_KINDS[kind].connect_s, operation_timeout_s)


def buffer_device(kind: str, device: torch.device) -> torch.device:
    """Returns the device of staging buffers; `device` is that of the blocks."""
    return device if EDGE_KINDS[kind].beside_kv else torch.device("cpu")
