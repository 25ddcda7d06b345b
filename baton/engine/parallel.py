"""Tensor parallelism as layers, loader and KV pool use it: the group of ranks that share one model's weights.

The only file of the engine that uses torch.distributed, and only when there is more than one rank. The group is built
from the ranks' common store: Gloo on CPU, on this machine's own address; NCCL on CUDA.

Sums have one fixed order: partial results are gathered and added up by rank, in float32. So all ranks hold the same
bits, and an element's sum does not depend on what else is summed with it, as exact mode requires (in a ring, the order
depends on the element's place in the buffer). Large sums move no more bytes than a ring. Where the GPUs of one node
reach each other's memory, a sum is one kernel (symmetric_memory.py), with the same bits.

One thread at a time calls operations, and none waits forever: on Gloo each has a timeout; on NCCL an operation only
orders streams, and the lockstep channel detects a lost or stuck peer.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from baton.core.errors import InvariantError, RankLost, StartupError
from baton.core.liveness import RANK_SUM_LIMIT_S
from baton.core.ranks import STORE_VARIABLE, Ranks
from baton.core.reshard import even_share, local_heads

if TYPE_CHECKING:
    from baton.engine.kernels.symmetric_sum import SymmetricMemory

CONNECT_TIMEOUT_S = 60.0
_LARGE_SUM = 1 << 16  # elements from which saved bytes outweigh a second exchange
LOAD_TIMEOUT_S = 600.0
"""How long a rank may be behind the others while all are loading."""

_EXIT_BARRIER = "torchelastic/agent/terminal_state"
_NCCL_GROUPS: list[Any] = []
"""Kept until the process ends, which is by `os._exit`. torch ends a group's communicator with the last reference to the
group, and NCCL then waits for all CUDA graphs that captured its operations (NCCL's init.cc, commDestroySync): for ever
if the same thread would have freed them next, as at the end of a rank that drained."""


class TPGroup:
    """A tensor-parallel group; by default, one rank that owns every slice.

    `part`, `kv_part` and `vocabulary_part` return this rank's share of units, even without a process group; the
    operations below are collective: every rank calls the same ones in the same order, with the same shapes.
    """

    def __init__(self, rank: int = 0, size: int = 1, process_group: Any = None, device: str = "cpu") -> None:
        self.rank, self.size = rank, size
        self.memory: SymmetricMemory | None = None  # set once, before the first sum
        self._group = process_group
        self._device = torch.device(device)
        self._in_use = threading.Lock()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def part(self, total: int, dimension: str) -> slice:
        """This rank's share of `total` equal units. Raises StartupError when they cannot be divided evenly."""
        share = even_share(total, self.size, dimension)
        return slice(self.rank * share, (self.rank + 1) * share)

    def kv_part(self, num_kv_heads: int) -> slice:
        """This rank's KV heads; several ranks have the same head when there are more ranks than heads."""
        heads = local_heads(num_kv_heads, self.size, self.rank)
        return slice(heads.start, heads.stop)

    def vocabulary_part(self, vocab_size: int) -> tuple[slice, int]:
        """This rank's token ids, and the number of rows of its shard: the last shards are padded if the ranks do
        not divide the vocabulary evenly."""
        share = -(-vocab_size // self.size)
        return slice(min(self.rank * share, vocab_size), min((self.rank + 1) * share, vocab_size)), share

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum over ranks, in float32 by rising rank, rounded once to the dtype of `partial`."""
        if self.size == 1:
            return partial
        large = self.size > 2 and partial.numel() >= _LARGE_SUM
        if self.memory is not None and partial.numel():
            from baton.engine.kernels.symmetric_sum import symmetric_sum  # only CUDA builds of torch include Triton

            return symmetric_sum(partial.contiguous(), self.memory, large)
        if large:
            return self._all_reduce_by_shares(partial)
        return _sum_by_rank(self._all_gather(partial, "all-reduce", RANK_SUM_LIMIT_S))

    def gather(self, shard: Tensor) -> Tensor | None:
        """Concatenates shards [..., n] in rank order: [..., size * n] on the leader; None on its followers."""
        if self.size == 1:
            return shard
        options = _options("GatherOptions", RANK_SUM_LIMIT_S, rootRank=0)
        shard = shard.contiguous()
        gathered = shard.new_empty((self.size, *shard.shape)) if self.leads else None
        outputs = [] if gathered is None else [list(gathered.unbind())]
        self._run("gather", lambda: self._group.gather(outputs, [shard], options), RANK_SUM_LIMIT_S)
        return None if gathered is None else torch.cat(gathered.unbind(), dim=-1)

    def all_gather(self, shard: Tensor) -> Tensor:
        """Concatenates shards [..., n] in rank order, on every rank: [..., size * n]."""
        if self.size == 1:
            return shard
        return torch.cat(self._all_gather(shard, "all-gather", RANK_SUM_LIMIT_S).unbind(), dim=-1)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Returns the leader's tensor on every rank; followers pass a tensor of its shape, which is overwritten."""
        if self.size == 1:
            return tensor
        options = _options("BroadcastOptions", RANK_SUM_LIMIT_S, rootRank=0, rootTensor=0)
        tensor = tensor.contiguous()
        self._run("broadcast", lambda: self._group.broadcast([tensor], options), RANK_SUM_LIMIT_S)
        return tensor

    def minimum(self, value: int, operation: str) -> int:
        """The least value of any rank; ranks may still be loading. `operation` names the operation in errors."""
        if self.size == 1:
            return value
        mine = torch.tensor([value], dtype=torch.int64, device=self._device)
        return int(self._all_gather(mine, operation, LOAD_TIMEOUT_S).min())

    def barrier(self, operation: str) -> None:
        self.minimum(0, operation)

    def _all_reduce_by_shares(self, partial: Tensor) -> Tensor:
        """Same bits with fewer bytes and one more exchange: each rank sums a share, then all gather the shares."""
        options = _options("AllToAllOptions", RANK_SUM_LIMIT_S)
        count = partial.numel()
        share = -(-count // self.size)
        sent = partial.reshape(-1)
        if count % self.size:
            sent = torch.nn.functional.pad(sent, (0, self.size * share - count))
        received = torch.empty_like(sent)
        self._run("all-reduce", lambda: self._group.alltoall_base(received, sent, [], [], options), RANK_SUM_LIMIT_S)
        mine = _sum_by_rank(received.view(self.size, share))
        return self._all_gather(mine, "all-reduce", RANK_SUM_LIMIT_S).view(-1)[:count].view(partial.shape)

    def _all_gather(self, tensor: Tensor, operation: str, timeout_s: float) -> Tensor:
        """The tensors of all ranks: [size, *shape]."""
        options = _options("AllgatherOptions", timeout_s)
        tensor = tensor.contiguous()
        gathered = tensor.new_empty((self.size, *tensor.shape))
        self._run(
            operation, lambda: self._group._allgather_base(gathered.view(-1), tensor.view(-1), options), timeout_s
        )
        return gathered

    def _run(self, operation: str, launch: Callable[[], Any], timeout_s: float) -> None:
        if not self._in_use.acquire(blocking=False):
            raise InvariantError(f"tensor-parallel {operation}: another thread is using the group")
        try:
            work = launch()
            if self._device.type == "cpu":
                work.wait(timedelta(seconds=timeout_s))
            else:
                work.wait()
        except RuntimeError as error:
            first = str(error).splitlines()[0] if str(error) else repr(error)
            raise RankLost(f"tensor-parallel {operation} of rank {self.rank} failed: {first}") from error
        finally:
            self._in_use.release()


def open_store(env: Mapping[str, str], timeout_s: float = CONNECT_TIMEOUT_S) -> Any:
    """Connects to the common store of this worker's ranks. Rank 0 hosts it, on the socket that its agent opened; with
    plain torchrun, torchrun does. Raises StartupError when there is none."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    host, port, listener = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", ""), env.get(STORE_VARIABLE, "")
    if not host or not port.isdigit():
        raise StartupError("environment: MASTER_ADDR and MASTER_PORT must be the address of the ranks' store")
    limit = timedelta(seconds=timeout_s)
    try:
        if listener.isdigit():
            os.set_inheritable(int(listener), False)
            made = TCPStore(host, int(port), None, True, limit, False, master_listen_fd=int(listener), use_libuv=True)
        else:
            with socket.create_connection((host, int(port)), timeout=timeout_s) as tried:  # torch waits in native code
                if tried.getsockname() == tried.getpeername():  # a free ephemeral port can connect to itself
                    raise OSError("no listener")
            made = TCPStore(host, int(port), None, False, limit, False)
    except (RuntimeError, OSError) as error:
        hint = ""
        if env.get("LOCAL_WORLD_SIZE") != env.get("WORLD_SIZE"):
            hint = (
                "; MASTER_ADDR must be node 0 as this node reaches it (torchrun with c10d: --local-addr on each node)"
            )
        reason = f"{str(error).splitlines()[0]}{hint}"
        raise StartupError(f"cannot connect to the store at {host}:{port}: {reason}") from None
    return PrefixStore(f"baton/tp/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", made)


def leave_exit_barrier(env: Mapping[str, str]) -> None:
    """Takes this node's part in torchrun's exit barrier. A torchrun that receives a signal ends without it, and those
    of the other nodes would wait for it for 300 s. Key and count: torch/distributed/elastic/utils/store.py."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    with contextlib.suppress(RuntimeError):  # the store has ended with its torchrun, and no rank waits
        made = TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), None, False, timedelta(seconds=1), False)
        store = PrefixStore(env["TORCHELASTIC_RUN_ID"], made)
        if store.add(_EXIT_BARRIER + "/num_members", 1) == int(env["GROUP_WORLD_SIZE"]):
            store.set(_EXIT_BARRIER + "/last_member", "")


def connect(store: Any, ranks: Ranks, device: torch.device, host: str) -> TPGroup:
    """Returns the group of this worker's ranks once all are connected. The others reach this machine at `host`.

    Raises StartupError when they do not connect within CONNECT_TIMEOUT_S.
    """
    if ranks.size == 1:
        return TPGroup()
    from torch._C._distributed_c10d import PrefixStore

    make = _gloo if device.type == "cpu" else _nccl
    try:
        group = TPGroup(ranks.rank, ranks.size, make(PrefixStore("group", store), ranks, device, host), str(device))
        group.barrier("connecting")
        if device.type == "cuda":
            from torch._C import _distributed_c10d

            from baton.engine.symmetric_memory import share_memory  # only CUDA builds of torch include Triton

            of_torch = getattr(_distributed_c10d, "_SymmetricMemory", None)
            group.memory = share_memory(of_torch, PrefixStore("symmetric", store), ranks, device, group.minimum)
    except RankLost as error:
        raise StartupError(error.message) from None
    except RuntimeError as error:
        raise StartupError(f"tensor-parallel ranks cannot connect: {str(error).splitlines()[0]}") from None
    return group


def _gloo(store: Any, ranks: Ranks, device: torch.device, host: str) -> Any:
    from torch._C._distributed_c10d import ProcessGroupGloo

    gloo: Any = ProcessGroupGloo  # the stubs lack `_Options`
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._threads = 1
    options._timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
    return gloo(store, ranks.rank, ranks.size, options)


def _nccl(store: Any, ranks: Ranks, device: torch.device, host: str) -> Any:
    """Uses blocking mode: otherwise each collective starts a thread inside NCCL. torch's own timeout never fires
    (transfer/nccl.py explains why); the lockstep channel detects a lost rank."""
    nccl: Any = getattr(torch.distributed, "ProcessGroupNCCL", None)
    if nccl is None:
        raise StartupError("this torch has no NCCL")
    torch.cuda.set_device(device)
    options = nccl.Options(is_high_priority_stream=False)
    options._timeout = timedelta(days=1)
    options.config.blocking = 1
    group = nccl(store, ranks.rank, ranks.size, options)
    _NCCL_GROUPS.append(group)
    return group


def _options(name: str, timeout_s: float, **values: int) -> Any:
    """Returns the options of one of torch's collective operations."""
    from torch._C import _distributed_c10d

    options = getattr(_distributed_c10d, name)()
    options.timeout = timedelta(seconds=timeout_s)
    for key, value in values.items():
        setattr(options, key, value)
    return options


def _sum_by_rank(partials: Tensor) -> Tensor:
    """partials [size, ...] -> [...]: added up in float32 by rising rank, rounded once."""
    if partials.device.type == "cuda":
        from baton.engine.kernels.rank_sum import sum_by_rank  # only CUDA builds of torch include Triton

        return sum_by_rank(partials)
    total = partials[0].float()
    for rank in range(1, len(partials)):
        total += partials[rank]
    return total.to(partials.dtype)
