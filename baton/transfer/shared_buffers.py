"""Buffers that another process on the same host can map: device memory by CUDA's IPC handles, host memory by the file
descriptor of an anonymous file, which disappears with the processes that have it open.
"""

from __future__ import annotations

import itertools
import json
import logging
import mmap
import os
import re
import socket
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.core.errors import HandoffError, StartupError
from baton.transfer.streams import empty_on_staging_stream

log = logging.getLogger("baton.edges")
_NAME = "baton-kv"
_FILES: dict[int, tuple[int, int, int]] = {}  # by address of a host buffer: serial number, descriptor, size
_SERIAL = itertools.count(1)  # in every handle: descriptors and addresses are reused while receivers keep mappings
_HANDLES: dict[int, list[Any]] = {}  # by address of an exported device buffer: serial number, IPC handle
NO_COUNTER = b"/baton/none"
"""In place of the name of torch's counter in a handle. No counter has it: names of shared memory have one slash."""
_COUNTER = 3  # its place in a handle of torch, before that of its number


def allocate_shared(num_bytes: int, device: torch.device) -> Tensor:
    """Allocates a buffer (uint8 [num_bytes]) that `export` accepts."""
    if device.type == "cuda":
        buffer = empty_on_staging_stream(num_bytes, device)
        weakref.finalize(buffer, _HANDLES.pop, buffer.data_ptr(), None)
        return buffer
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    os.ftruncate(descriptor, num_bytes)
    buffer = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    address = buffer.data_ptr()
    _FILES[address] = (next(_SERIAL), descriptor, num_bytes)
    weakref.finalize(buffer, _forget, address)
    return buffer


def keep_memory_exportable() -> None:
    """Switches torch's expandable segments off for what this process allocates on a GPU from now on, if the environment
    asks for them. Another process takes over their file descriptors with ptrace rights, which containers do not have;
    their handles do not fit into a record of ipc.py; and a receiver may take them for handles of another kind (torch
    2.11; issues 165685 and 179220 of pytorch). Raises StartupError for an allocator whose memory cannot be shared."""
    backend = torch.cuda.memory.get_allocator_backend()
    if backend != "native":  # torch would refuse each export
        raise StartupError(
            f"edge-kind ipc: CUDA's {backend} allocator cannot share memory with other processes; remove backend from"
            " PYTORCH_ALLOC_CONF, or use another edge-kind"
        )
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        settings = os.environ.get(name, "")
        plain = re.sub(r"(expandable_segments\s*:\s*)true", r"\1False", settings, flags=re.IGNORECASE)
        if plain != settings:
            torch._C._accelerator_setAllocatorSettings(plain)
            log.warning("%s: no expandable_segments, since memory is shared with other processes (edge-kind ipc)", name)


def export(buf: Tensor) -> bytes:
    """Returns the handle by which another process maps `buf`, which is a buffer of `allocate_shared` or its beginning.
    Raises HandoffError."""
    if buf.device.type == "cuda":
        address = buf.data_ptr()
        if address not in _HANDLES:
            _HANDLES[address] = [next(_SERIAL), *_share(buf)]
        return _encoded([buf.numel(), buf.storage_offset(), *_HANDLES[address]])
    file = _FILES.get(buf.data_ptr())
    if file is None:
        raise HandoffError("the buffer is not in shared memory")
    return _encoded([buf.numel(), os.getpid(), *file])


def map_exported(handle: bytes, device: torch.device) -> Tensor:
    """Maps the buffer that another process exported. Raises HandoffError when this process cannot map it."""
    try:
        size, *where = _decoded(handle)
        if device.type == "cuda":
            offset, _, *ipc_handle = where
            storages: Any = torch.UntypedStorage
            mapped: Any = torch.empty(0, dtype=torch.uint8, device=device)
            tensor: Tensor = mapped.set_(storages._new_shared_cuda(device.index or 0, *ipc_handle), offset, (size,))
            return tensor
        pid, _, descriptor, whole = where
        return _map_file(f"/proc/{int(pid)}/fd/{int(descriptor)}", int(whole))[:size]
    except (RuntimeError, ValueError, TypeError, OSError) as e:
        raise HandoffError(f"the peer's buffer cannot be mapped: {str(e).splitlines()[0]}") from None


def boot_id() -> str:
    """Returns the same for all processes of one machine, in any container."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def host_identity(device: torch.device) -> bytes:
    """Returns the same for all processes with one host, PID namespace, user and kind of memory."""
    space = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()}, boot {boot_id()}, {space}, user {os.getuid()}, KV on {device.type}".encode()


def _share(buf: Tensor) -> list[Any]:
    """Exports a device buffer, once: torch wraps its storage anew at each call. torch keeps the memory until a counter
    is 0; it is 1 at first, and each receiver that unmaps the memory decrements it. Here the edge's own messages signal
    when the memory may be reused, so the counter is released immediately, and receivers do not get its name: below 0
    it counts as large, since torch reads it as unsigned, and the memory would never be freed (pytorch issue 149187)."""
    storage: Any = buf.untyped_storage()
    storages: Any = torch.UntypedStorage
    handle: list[Any] = list(storage._share_cuda_()[1:])
    storages._release_ipc_counter_cuda(*handle[_COUNTER : _COUNTER + 2])
    handle[_COUNTER] = NO_COUNTER
    return handle


def _map_file(path: str, size: int) -> Tensor:
    """Maps a file of `allocate_shared` of exactly this size and no other. Raises OSError or ValueError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if not name.startswith(f"/memfd:{_NAME}") or os.fstat(descriptor).st_size != size:
            raise ValueError(f"{path} is {name}, not a buffer of {size} bytes")
        return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def _encoded(values: list[Any]) -> bytes:
    return json.dumps([{"hex": v.hex()} if isinstance(v, bytes) else v for v in values]).encode()


def _decoded(text: bytes) -> list[Any]:
    return [bytes.fromhex(v["hex"]) if isinstance(v, dict) else v for v in json.loads(text)]


def _forget(address: int) -> None:
    _, descriptor, _ = _FILES.pop(address)
    os.close(descriptor)
