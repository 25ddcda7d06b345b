"""Memory of each rank's GPU that all ranks of a worker reach, for sums in one kernel (kernels/symmetric_sum.py).

torch maps it (`torch.distributed._symmetric_memory`). It needs all ranks on one node, each on a GPU of its own, with
peer access between all of them. Elsewhere, or if mapping fails, or if a first sum is wrong, every rank uses NCCL: they
decide together, since a sum of which some ranks take part in another way would never end.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from baton.core.errors import StartupError
from baton.core.ranks import Ranks
from baton.engine.kernels.symmetric_sum import ELEMENTS, SymmetricMemory, flag_bytes, symmetric_sum

log = logging.getLogger("baton.worker")
HALF_BYTES = 8 << 20
"""A half holds a step of 64 tokens of 70 B eight times; larger sums are computed in pieces."""
FIRST_SUM_LIMIT_S = 10.0
_POLL_S = 0.001
_GROUP = "baton-tp"
_SOCKET_DIRECTORIES = "TMPDIR", "TMP", "TEMP", "TEMPDIR"
"""Variables of the directory in which torch opens a socket for mapping: the first that is set, else /tmp."""
_SOCKET_BYTES = 107
"""The longest path of a socket. torch copies it without a check."""
Minimum = Callable[[int, str], int]
"""(value, what) -> the least value of any rank."""


def share_memory(
    torch_memory: Any, store: Any, ranks: Ranks, device: torch.device, minimum: Minimum
) -> SymmetricMemory | None:
    """Returns this rank's view of the ranks' memory, or None on every rank. Collective. `torch_memory` is torch's
    class; None if it has none.

    Raises:
        StartupError: the first sum does not end within FIRST_SUM_LIMIT_S; its kernel occupies the device.
    """
    if not minimum(int(_reachable(ranks, device)), "symmetric memory: reachable"):
        log.info("tensor-parallel sums over NCCL: a GPU is not reachable from all others")
        return None
    memory = None
    try:
        memory = _map(torch_memory, store, ranks, device)
    except (RuntimeError, AttributeError, TypeError) as error:  # a private interface of torch
        log.warning("tensor-parallel sums over NCCL: no symmetric memory: %s", str(error).splitlines()[0])
    if not minimum(int(memory is not None), "symmetric memory: mapping") or memory is None:
        return None
    right = all(_sums_correctly(memory, shared) for shared in (False, True))
    if not right:
        log.warning("tensor-parallel sums over NCCL: a first sum in symmetric memory was wrong")
    return memory if minimum(int(right), "symmetric memory: the first sums") else None


def _reachable(ranks: Ranks, device: torch.device) -> bool:
    """Whether this rank's GPU reaches those of all other ranks, each a GPU of its own on this node. NCCL's variable
    turns peer access off here, too."""
    allowed = os.environ.get("NCCL_P2P_DISABLE", "0") in ("", "0")
    if not allowed or not ranks.on_one_node or ranks.size > torch.cuda.device_count():
        return False
    directory = next((os.environ[name] for name in _SOCKET_DIRECTORIES if name in os.environ), "/tmp")
    if len(os.fsencode(f"{directory}/symm_mem-{os.getpid()}")) > _SOCKET_BYTES:
        log.warning("no symmetric memory: the path %s is too long for its sockets; set TMPDIR", directory)
        return False
    peers = (rank for rank in range(ranks.size) if rank != ranks.local_rank)
    return all(torch.cuda.can_device_access_peer(device, peer) for peer in peers)


def _map(torch_memory: Any, store: Any, ranks: Ranks, device: torch.device) -> SymmetricMemory:
    """Allocates this rank's block and maps all others'. Raises RuntimeError, or AttributeError or TypeError for a torch
    with another interface. Newer torches look up a process group of that name, and use no more of it than its store."""
    # Sums use no multicast. A rank that cannot take part in it would let the others wait for ever (pytorch 195596).
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    group = torch.distributed.ProcessGroup(store, ranks.rank, ranks.size)
    torch._C._distributed_c10d._register_process_group(_GROUP, group)  # type: ignore[arg-type]  # keeps no reference
    torch_memory.set_group_info(_GROUP, ranks.rank, ranks.size, store)
    size = flag_bytes(ranks.size) + 2 * HALF_BYTES
    block: Tensor = torch_memory.empty_strided_p2p((size,), [1], torch.uint8, device, _GROUP)
    block.zero_()
    torch.cuda.synchronize(device)  # before any rank may write a flag
    mapped = torch_memory.rendezvous(block)
    addresses = torch.tensor(list(mapped.buffer_ptrs), dtype=torch.int64).to(device)
    state = torch.zeros(2, dtype=torch.int64, device=device)
    return SymmetricMemory(ranks.rank, addresses, state, HALF_BYTES, (block, mapped, group))


def _sums_correctly(memory: SymmetricMemory, shared: bool) -> bool:
    """Whether this rank's sum of rank + 1 is right, in all tiles of several pieces. Raises StartupError."""
    device, count = memory.addresses.device, HALF_BYTES // 4 + ELEMENTS + 1
    total = symmetric_sum(torch.full((count,), float(memory.rank + 1), device=device), memory, shared)
    expected = memory.ranks * (memory.ranks + 1) / 2
    right = (total == expected).all()
    ended: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ended.record()
    deadline = time.monotonic() + FIRST_SUM_LIMIT_S
    while not ended.query():
        if time.monotonic() > deadline:
            advice = "set NCCL_P2P_DISABLE=1 if the GPUs cannot access each other's memory"
            raise StartupError(f"a sum over this worker's GPUs did not end within {FIRST_SUM_LIMIT_S:g} s; {advice}")
        time.sleep(_POLL_S)
    return bool(right)
