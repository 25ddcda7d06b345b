"""Memory that all ranks reach: when it is used, what else happens, and how many kernels a sum is."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from baton.core.errors import StartupError
from baton.core.ranks import Ranks
from baton.engine.parallel import TPGroup

pytest.importorskip("triton")
from baton.engine import symmetric_memory
from baton.engine.kernels import symmetric_sum as kernel
from baton.engine.kernels.symmetric_sum import SymmetricMemory

CPU = torch.device("cpu")
RANKS = Ranks(0, 2, 0, 2)
Minimum = Callable[[int, str], int]


class Machine:
    """A node with two GPUs that reach each other, and torch's symmetric memory, without either."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch, self.mapped, self.agreed = patch, 0, []
        self.store = torch.distributed.HashStore()
        torch._C._distributed_c10d._unregister_process_group("baton-tp")  # a process maps once, these tests often
        patch.delenv("NCCL_P2P_DISABLE", raising=False)
        patch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")  # else what the code sets would remain
        patch.setenv("TMPDIR", "/tmp")
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: True)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, query=lambda: True))
        patch.setattr(symmetric_memory, "symmetric_sum", lambda partial, memory, shared: partial * 0 + 3)

    def set_group_info(self, name: str, rank: int, size: int, store: object) -> None: ...

    def empty_strided_p2p(self, size: Any, stride: Any, dtype: torch.dtype, device: object, name: str) -> Tensor:
        return torch.full(size, 7, dtype=dtype)

    def rendezvous(self, block: Tensor) -> Any:
        assert not block.any(), "flags are zero before others may write them"
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1", "torch reads it when it maps"
        group = torch._C._distributed_c10d._resolve_process_group("baton-tp")  # as torch's own mapping does
        assert (group.rank(), group.size()) == (0, 2) and group.get_group_store() is not None
        self.mapped += 1
        return SimpleNamespace(buffer_ptrs=[block.data_ptr(), 4096])

    def minimum(self, others: int = 1) -> Minimum:
        def agree(value: int, what: str) -> int:
            self.agreed.append(what)
            return min(value, others)

        return agree


def test_ranks_that_reach_each_other_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    memory = symmetric_memory.share_memory(machine, machine.store, RANKS, CPU, machine.minimum())
    assert memory is not None and memory.addresses.tolist()[1] == 4096 and memory.ranks == 2
    assert machine.mapped == 1 and len(machine.agreed) == 3


@pytest.mark.parametrize("why", ["two nodes", "one GPU", "no peer access", "turned off", "long path", "another rank"])
def test_ranks_that_do_not_reach_each_other_map_nothing(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, ranks, others = Machine(monkeypatch), RANKS, 1
    match why:
        case "two nodes":
            ranks = Ranks(0, 2, 0, 1)
        case "one GPU":
            monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        case "no peer access":
            monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: False)
        case "turned off":
            monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
        case "long path":
            monkeypatch.setenv("TMPDIR", "/tmp/" + "x" * 100)
        case "another rank":
            others = 0
    assert symmetric_memory.share_memory(machine, machine.store, ranks, CPU, machine.minimum(others)) is None
    assert machine.mapped == 0 and len(machine.agreed) == 1


@pytest.mark.parametrize("error", [RuntimeError("CUDA driver error"), AttributeError("set_group_info")])
def test_ranks_decide_together_when_mapping_fails(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)

    def fail(block: Tensor) -> Any:
        raise error

    monkeypatch.setattr(machine, "rendezvous", fail)
    assert symmetric_memory.share_memory(machine, machine.store, RANKS, CPU, machine.minimum()) is None
    assert len(machine.agreed) == 2, "the other ranks wait for this decision"


def test_memory_with_a_wrong_first_sum_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    monkeypatch.setattr(symmetric_memory, "symmetric_sum", lambda partial, memory, shared: partial)
    assert symmetric_memory.share_memory(machine, machine.store, RANKS, CPU, machine.minimum()) is None
    assert len(machine.agreed) == 3


def test_first_sum_that_never_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    monkeypatch.setattr(symmetric_memory, "FIRST_SUM_LIMIT_S", 0.05)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, query=lambda: False))
    with pytest.raises(StartupError, match=r"did not end within 0.05 s; set NCCL_P2P_DISABLE=1"):
        symmetric_memory.share_memory(machine, machine.store, RANKS, CPU, machine.minimum())


class Operations(TorchDispatchMode):
    """Records torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Launches:
    """In place of a kernel."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, grid: Any) -> Any:
        self.count += 1
        return lambda *arguments, **constants: None


@pytest.mark.parametrize("rows", [1, 40])
def test_sum_over_ranks_is_one_kernel(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches, group = Launches(), TPGroup(0, 4)
    monkeypatch.setattr(kernel, "_sum", launches)
    group.memory = SymmetricMemory(0, torch.zeros(4).long(), torch.zeros(2).long(), 1 << 16)
    partial = torch.randn(rows, 2048)
    with Operations() as operations:
        total = group.all_reduce(partial)
    assert total.shape == partial.shape and launches.count == 1
    assert operations.names == ["aten.empty_like.default"], "no other kernel"


class Exchange:
    """A process group of which this rank sees only itself."""

    def _allgather_base(self, out: Tensor, mine: Tensor, options: object) -> Any:
        return self._done(out, mine)

    def alltoall_base(self, out: Tensor, mine: Tensor, a: object, b: object, options: object) -> Any:
        return self._done(out, mine)

    def _done(self, out: Tensor, mine: Tensor) -> Any:
        return SimpleNamespace(wait=lambda *_: True)


def test_large_sum_over_a_process_group_copies_nothing_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except where the ranks do not divide it."""
    for count, copies in ((1 << 16, False), ((1 << 16) + 1, True)):
        with Operations() as operations:
            TPGroup(0, 4, Exchange()).all_reduce(torch.ones(count))
        moved = {"aten.copy_.default", "aten.fill_.Scalar", "aten.constant_pad_nd.default", "aten.new_zeros.default"}
        assert bool(moved & set(operations.names)) == copies, operations.names
