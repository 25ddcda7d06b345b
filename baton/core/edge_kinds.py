"""The backends that move the bytes of a worker's edges: the only list of them, read by the options, the plan of a
cluster and the workers. Free of torch; baton.transfer.edge loads the chosen backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.core.errors import StartupError


@dataclass(frozen=True, slots=True)
class EdgeKind:
    """`edge` names the class of one end, as module:name (see baton.transfer.edge.Edge). `beside_kv`: staging buffers
    are on the device of the blocks, not in host memory; `allocate` names the function that allocates them, (bytes,
    device) -> Tensor. `needs_gpu`: it only moves device memory; `one_host`: it only works within a host. Connecting
    takes at most `connect_s`, or the time limit of an operation if that is longer."""

    edge: str
    beside_kv: bool
    needs_gpu: bool = False
    one_host: bool = False
    allocate: str = "baton.transfer.streams:empty_on_staging_stream"
    connect_s: float = 0.0


EDGE_KINDS: Mapping[str, EdgeKind] = {
    "gloo": EdgeKind("baton.transfer.gloo:GlooEdge", beside_kv=False),
    "nccl": EdgeKind("baton.transfer.nccl:NcclEdge", beside_kv=True, needs_gpu=True, connect_s=15.0),
    "ipc": EdgeKind(
        "baton.transfer.ipc:IpcEdge",
        beside_kv=True,
        one_host=True,
        allocate="baton.transfer.shared_buffers:allocate_shared",
    ),
}


def choose_edges(name: str, device: str) -> str:
    """Resolves "auto" to NCCL for KV on a GPU (`device` is "cuda"), else to Gloo, which copies KV on a GPU through host
    memory. Raises StartupError for an unknown kind, or for one that needs a GPU when KV is not on one."""
    if name == "auto":
        return "nccl" if device == "cuda" else "gloo"
    if name not in EDGE_KINDS:
        raise StartupError(f"edge-kind must be auto, {', '.join(EDGE_KINDS)}, not {name!r:.60}")
    if EDGE_KINDS[name].needs_gpu and device != "cuda":
        raise StartupError(f"edge-kind {name} needs KV on a GPU, not on {device}; use gloo")
    return name
