"""What this machine computes on: device, dtype, and how much memory the KV cache may take by default."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from baton.core.errors import StartupError
from baton.engine.kernels.build import can_compile, fastest_level

ComputeDType = Literal["float32", "bfloat16"]

_CPU_KV_BYTES = 4 << 30
_CPU_KV_SHARE = 0.125
_CUDA_KV_SHARE = 0.85


def choose_device(wanted: str, exact: bool, local_rank: int = 0) -> torch.device:
    """ "auto" is CUDA if there is one, except in exact mode; the ranks of a machine take its GPUs in turn. Raises
    StartupError for CUDA without a GPU."""
    if wanted not in ("auto", "cpu", "cuda"):
        raise StartupError(f"device must be auto, cpu or cuda, not {wanted!r:.60}")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise StartupError("device cuda: torch finds no CUDA device")
    if exact and wanted == "cuda":
        raise StartupError("exact mode runs on CPU only")
    if wanted == "cpu" or exact or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def gpu_uuids(wanted: str, exact: bool, local_size: int) -> list[str]:
    """Of the GPUs that a worker's ranks on this machine compute on, as NVML names them; none on CPU."""
    if choose_device(wanted, exact).type != "cuda":
        return []
    used = range(min(local_size, torch.cuda.device_count()))
    return [f"GPU-{torch.cuda.get_device_properties(number).uuid}" for number in used]


def choose_dtype(wanted: str, device: torch.device, exact: bool, kernels: str = "auto") -> ComputeDType:
    """ "auto" is bfloat16 on CUDA, on CPUs that multiply it in hardware, and where compiled kernels for AVX2 or
    AVX-512 compute (of the `kernels` asked for), else float32, as in exact mode."""
    if wanted not in ("auto", "bfloat16", "float32"):
        raise StartupError(f"dtype must be auto, bfloat16 or float32, not {wanted!r:.60}")
    if wanted == "auto":
        if exact:
            return "float32"
        fast = device.type == "cuda" or cpu_multiplies_bfloat16() or kernels_widen_bfloat16(kernels)
        return "bfloat16" if fast else "float32"
    return cast(ComputeDType, wanted)


def cpu_multiplies_bfloat16() -> bool:
    """Whether the CPU has avx512_bf16 or AMX."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def kernels_widen_bfloat16(kernels: str) -> bool:
    """Whether compiled kernels will compute that read bfloat16, half of what float32 takes, and multiply in float32 at
    the same speed (decisions 0029, 0042). torch's bfloat16 is slower than its float32 on processors with no more."""
    level = fastest_level() if kernels == "auto" else kernels
    return level in ("avx2", "avx512") and can_compile(level)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device, its copy queued behind what is computed there: from pageable memory the host would
    wait for that first. On CPU the tensor itself."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, queued behind what is computed on the tensor's device: there once an event behind it has
    come. On CPU the tensor itself."""
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class Mark(Protocol):
    """A place in what a device has been given to compute, as torch.cuda.Event."""

    def record(self, /) -> None: ...

    def synchronize(self) -> None:
        """Waits until the device has come there."""
        ...

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from here to a later mark, both of which the device has passed."""
        ...


NewMark = Callable[[], Mark]


class HostMark:
    """Of a device that has computed whatever it was given: the CPU."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: HostMark) -> float:
        return (end._at - self._at) * 1e3


def marks_of(device: torch.device) -> NewMark:
    if device.type != "cuda":
        return HostMark
    return lambda: cast(Mark, torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]


def default_kv_bytes(device: torch.device, local_size: int = 1, gpu_share: float = 0.0) -> int:
    """For one of a worker's `local_size` ranks on this machine. CPU: its part of an eighth of the machine's memory, or
    of 4 GiB if that is less (pages are taken from the system only as blocks are used). CUDA: 85 % of what is free; of a
    `gpu_share` below 1 also at most 85 % of the share less what this process has there already. A share of 0 is even
    parts for the worker's ranks on the same GPU. Raises StartupError where weights fill a share below 1."""
    if device.type != "cuda":
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min(_CPU_KV_BYTES, int(physical * _CPU_KV_SHARE)) // local_size
    share = gpu_share or 1.0 / -(-local_size // torch.cuda.device_count())
    free, total = torch.cuda.mem_get_info(device)
    if share == 1.0:
        return int(free * _CUDA_KV_SHARE)
    mine = torch.cuda.memory_reserved(device)
    left = int(total * share * _CUDA_KV_SHARE) - mine
    if left <= 0:
        raise StartupError(
            f"{device}: weights take {mine / 2**30:.1f} GiB of this rank's share of {total * share / 2**30:.1f} GiB;"
            " give it more with --gpu-share, or a GPU of its own"
        )
    return min(left, int(free * _CUDA_KV_SHARE))
