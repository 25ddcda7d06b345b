"""Which backend moves the bytes of a worker's edges. The only place that knows them all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from baton.core.errors import StartupError
from baton.transfer.edge import MakeEdge
from baton.transfer.gloo import GlooEdge
from baton.transfer.nccl import NcclEdge

EdgeKind = Literal["gloo", "nccl"]
EDGES: Mapping[EdgeKind, MakeEdge] = {"gloo": GlooEdge, "nccl": NcclEdge}


def choose_edges(wanted: str, device: torch.device) -> EdgeKind:
    """ "auto" is NCCL for KV on a GPU, else Gloo, which takes KV on a GPU through host memory. Raises StartupError for
    NCCL without a GPU."""
    if wanted == "nccl" and device.type != "cuda":
        raise StartupError(f"edge-kind nccl: KV on {device.type} goes over gloo")
    if wanted == "gloo" or (wanted == "auto" and device.type != "cuda"):
        return "gloo"
    if wanted in ("auto", "nccl"):
        return "nccl"
    raise StartupError(f"edge-kind must be auto, gloo or nccl, not {wanted!r:.60}")


def buffer_device(kind: EdgeKind, device: torch.device) -> torch.device:
    """Where packed and received KV lies before it is sent or scattered; `device` is where the blocks are."""
    return device if kind == "nccl" else torch.device("cpu")
