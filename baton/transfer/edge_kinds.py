"""Loads the backend of a worker's edges by its name in baton.core.edge_kinds."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name

import torch
from torch import Tensor

from baton.core.edge_kinds import EDGE_KINDS
from baton.transfer.edge import MakeEdge


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
