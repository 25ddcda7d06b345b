"""Chooses the device and dtype that this machine computes with."""

from __future__ import annotations

import os
import subprocess
from typing import Literal, cast

import torch

from baton.core.errors import StartupError
from baton.engine.kernels.build import level_of

ComputeDType = Literal["float32", "bfloat16"]
LEAST_CAPABILITY = (8, 0)
"""Of a GPU: from A100 on."""


def choose_device(device_option: str, local_rank: int = 0) -> torch.device:
    """ "auto" is CUDA if there is one; the ranks of a machine use its GPUs round-robin. Raises StartupError for CUDA
    without a GPU."""
    if device_option not in ("auto", "cpu", "cuda"):
        raise StartupError(f"device must be auto, cpu or cuda, not {device_option!r:.60}")
    if device_option == "cuda" and not torch.cuda.is_available():
        raise StartupError("device cuda: torch finds no CUDA device")
    if device_option == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def check_triton() -> None:
    """Makes Triton build and load what launches its kernels on a GPU, as the first launch would: a C file, compiled
    once per machine. Raises StartupError."""
    try:
        from triton.runtime import driver  # only CUDA builds of torch include Triton

        _ = driver.active.utils  # built at first access
        return
    except subprocess.CalledProcessError as error:
        reason = f"{error.cmd[0]} ended with exit code {error.returncode}"
    except (ImportError, RuntimeError, AssertionError, OSError) as error:
        reason = (str(error) or repr(error)).splitlines()[0]
    raise StartupError(
        f"device cuda: Triton cannot launch kernels: {reason:.300}; it needs a C compiler (gcc, or CC), the headers of"
        " this Python, libcuda.so.1 as ldconfig lists it, and a cache directory that can be written (TRITON_CACHE_DIR)"
    )


def check_capability(device: torch.device) -> None:
    """Raises StartupError for a GPU whose shared memory is too small for the attention kernel: a tile takes 80 KiB
    where copies are not asynchronous, and one that old has 64."""
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        needed, has = (".".join(map(str, numbers)) for numbers in (LEAST_CAPABILITY, capability))
        raise StartupError(f"{device}: attention needs compute capability {needed}, this GPU has {has}; use device cpu")


def gpu_uuids(device_option: str, local_size: int) -> list[str]:
    """The UUIDs, as NVML writes them, of the GPUs or MIG instances that a worker's ranks on this machine compute on;
    none on CPU. torch does not tell the two apart, but only UUIDs name MIG instances in CUDA_VISIBLE_DEVICES."""
    if choose_device(device_option).type != "cuda":
        return []
    used = range(min(local_size, torch.cuda.device_count()))
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if named[0].startswith("MIG-"):
        return named[: len(used)]
    return [f"GPU-{torch.cuda.get_device_properties(number).uuid}" for number in used]


def choose_dtype(dtype_option: str, device: torch.device, exact: bool, kernels: str = "auto") -> ComputeDType:
    """ "auto" is bfloat16 on CUDA, on CPUs that multiply it in hardware, and with compiled kernels for AVX2 or AVX-512
    (if `kernels` selects them); else, and always in exact mode, float32."""
    if dtype_option not in ("auto", "bfloat16", "float32"):
        raise StartupError(f"dtype must be auto, bfloat16 or float32, not {dtype_option!r:.60}")
    if dtype_option == "auto":
        if exact:
            return "float32"
        fast = device.type == "cuda" or cpu_multiplies_bfloat16() or kernels_widen_bfloat16(kernels)
        return "bfloat16" if fast else "float32"
    return cast(ComputeDType, dtype_option)


def cpu_multiplies_bfloat16() -> bool:
    """Whether the CPU has avx512_bf16 or AMX."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def kernels_widen_bfloat16(kernels: str) -> bool:
    """Whether the kernels will be compiled ones that read bfloat16, half the bytes of float32, and multiply in float32
    at the same speed (decision 0014). On such processors torch's bfloat16 is slower than its float32."""
    return level_of(kernels) in ("avx2", "avx512")
