"""Buffers that another process on the same host can map: device memory by CUDA's IPC handles, host memory by the file
descriptor of an anonymous file, which ends with the processes that have it.
"""

from __future__ import annotations

import json
import os
import socket
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.core.errors import HandoffError

_FILES: dict[int, tuple[int, int]] = {}  # by the address of a host buffer: its file descriptor and its size


def allocate_shared(num_bytes: int, device: torch.device) -> Tensor:
    """A buffer (uint8 [num_bytes]) that `export` takes."""
    if device.type == "cuda":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    descriptor = os.memfd_create("baton-kv", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, num_bytes)
    buffer = _from_file(os.getpid(), descriptor, num_bytes)
    address = buffer.data_ptr()
    _FILES[address] = (descriptor, num_bytes)
    weakref.finalize(buffer, _forget, address)
    return buffer


def export(buf: Tensor) -> bytes:
    """How another process finds `buf`, the beginning of what `allocate_shared` gave or all of it. Raises
    HandoffError."""
    if buf.device.type == "cuda":
        storage: Any = buf.untyped_storage()
        _, *handle = storage._share_cuda_()
        return _encoded([buf.numel(), buf.storage_offset(), *handle])
    found = _FILES.get(buf.data_ptr())
    if found is None:
        raise HandoffError("the buffer is not in shared memory")
    return _encoded([buf.numel(), os.getpid(), *found])


def map_exported(handle: bytes, device: torch.device) -> Tensor:
    """The buffer that another process exported. Raises HandoffError where this process cannot map it."""
    try:
        size, *where = _decoded(handle)
        if device.type == "cuda":
            offset, *rest = where
            storages: Any = torch.UntypedStorage
            mapped: Any = torch.empty(0, dtype=torch.uint8, device=device)
            found: Tensor = mapped.set_(storages._new_shared_cuda(device.index or 0, *rest), offset, (size,))
            return found
        pid, descriptor, whole = where
        return _from_file(pid, descriptor, whole)[:size]
    except (RuntimeError, ValueError, TypeError, OSError) as e:
        raise HandoffError(f"the peer's buffer cannot be mapped: {str(e).splitlines()[0]}") from None


def host_identity(device: torch.device) -> bytes:
    """The same for processes of one host and one kind of memory; a boot and a network name space of it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {socket.gethostname()} {device.type}".encode()


def _from_file(pid: int, descriptor: int, size: int) -> Tensor:
    made: Any = torch.from_file(f"/proc/{pid}/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8)
    return made  # type: ignore[no-any-return]


def _encoded(values: list[Any]) -> bytes:
    return json.dumps([{"hex": v.hex()} if isinstance(v, bytes) else v for v in values]).encode()


def _decoded(text: bytes) -> list[Any]:
    return [bytes.fromhex(v["hex"]) if isinstance(v, dict) else v for v in json.loads(text)]


def _forget(address: int) -> None:
    descriptor, _ = _FILES.pop(address)
    os.close(descriptor)
