"""The paged KV cache of one rank, and the allocation of its pages by the operating system ahead of their use.

A pool's memory has no pages before it is first written, and blocks are allocated in rising order until the whole pool
has been used once. So for a long time every sequence would cause page faults: on a virtual machine 2 to 10 us for each
4 KiB, which is 6 to 40 ms for 512 tokens of a 135 M model, all of it during a hand-over or a step. Here a short-lived
thread faults pages in before their use, up to `ahead_bytes` beyond the highest block given to `expect`. It goes no
further, so an idle worker stays small.

It calls madvise(MADV_POPULATE_WRITE) (Linux 5.14), which changes no byte: blocks may be written meanwhile.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from baton.core.errors import StartupError
from baton.core.kv_layout import KVLayout

log = logging.getLogger("baton.engine")
AHEAD_BYTES = 64 << 20
_SLICE_BYTES = 1 << 20  # per call: it blocks threads that map or unmap memory meanwhile
_POPULATE_WRITE = 23

FP8_MAX = 448.0
"""The largest number of float8_e4m3fn."""


def store(cache: Tensor, slots: Tensor, new: Tensor) -> None:
    """Writes new [n, K, D] into slots [n] (block * block_size + offset) of a cache [blocks, block_size, K, D]. In FP8
    they are rounded to the nearest, ties to even, and what is beyond its range becomes the largest number."""
    rows = cache.view(-1, *cache.shape[2:])
    if cache.dtype == torch.float8_e4m3fn:  # torch copies it only as bytes
        rows, new = rows.view(torch.uint8), new.clamp(-FP8_MAX, FP8_MAX).to(cache.dtype).view(torch.uint8)
    rows.index_copy_(0, slots, new)


def load(cache: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the rows `index` [n] of a cache's first dimension, in `dtype` if they are stored in FP8."""
    if cache.dtype == torch.float8_e4m3fn:
        return cache.view(torch.uint8).index_select(0, index).view(cache.dtype).to(dtype)
    return cache.index_select(0, index)


class KVPool:
    """K and V of every layer, in blocks: `layers[i]` is (K, V), [num_blocks, block_size, kv_heads, head_dim] and
    [..., value_dim]. Layers with the same place in their groups have the same tensors, and different blocks of these.

    Blocks 0..num_blocks-1 belong to the scheduler. One more block, initially zeros, follows them in the same storage;
    padded block tables point to it (`zero_block`), as do those of sequences for blocks that they have given back, and
    `storage[i]` includes it. Other memory is not initialised (the operating system allocates pages when blocks are
    first used, or shortly before: `expect`); attention never reads positions that were not written.

    Raises StartupError when there is not that much memory.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self.num_blocks = num_blocks
        self.zero_block = num_blocks
        at_places: dict[int, tuple[Tensor, Tensor]] = {}
        for (_, place), layer in zip(layout.places, layout.layers, strict=True):
            if place in at_places:
                continue
            shape, dtype = (num_blocks + 1, layout.block_size, layer.num_kv_heads), getattr(torch, layer.dtype)
            try:
                keys, values = (
                    torch.empty((*shape, size), dtype=dtype, device=device)
                    for size in (layer.head_dim, layer.value_dim)
                )
            except RuntimeError:  # how torch reports out of memory, on every device
                gib = num_blocks * layout.bytes_per_block / (1 << 30)
                raise StartupError(f"{device}: cannot allocate {gib:.4g} GiB for KV; lower --kv-memory-gib") from None
            keys[self.zero_block], values[self.zero_block] = 0, 0
            at_places[place] = keys, values
        self.storage = [at_places[place] for _, place in layout.places]
        self.layers = [(keys[:num_blocks], values[:num_blocks]) for keys, values in self.storage]
        tensors = [tensor for pair in at_places.values() for tensor in pair]
        self.pages = PagePrefaulter(tensors, num_blocks) if device.type == "cpu" else None

    def expect(self, block_ids: Sequence[int], *, ahead: bool = True) -> None:
        """Announces blocks in use now or soon: a thread faults in the pages of all blocks up to them and, with `ahead`,
        of `ahead_blocks` more. Does not wait."""
        own = [block for block in block_ids if block != self.zero_block]
        if self.pages is not None and own:
            self.pages.expect(max(own), ahead=ahead)


class PagePrefaulter:
    """Populates the pages of KV blocks ahead of their use.

    `tensors` are those of a pool on CPU, each contiguous with blocks in its first dimension; the first `num_blocks` are
    allocated, in rising order.
    """

    def __init__(self, tensors: Sequence[Tensor], num_blocks: int, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._tensors, self._num_blocks = tuple(tensors), num_blocks
        self._block_bytes = [t.stride(0) * t.element_size() for t in self._tensors]
        self.ahead_blocks = max(ahead_bytes // sum(self._block_bytes), 1)
        self.blocks_warm = 0  # with pages
        self._expected_blocks = 0  # that should have pages
        self._failed = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def expect(self, block: int, *, ahead: bool = True) -> None:
        """Requests the pages of blocks up to this one and, with `ahead`, of `ahead_blocks` more. May be called from any
        thread; does not wait. A thread starts only when a quarter of `ahead_blocks` is used up."""
        head = self.ahead_blocks if ahead else 0
        with self._lock:
            self._expected_blocks = max(self._expected_blocks, min(block + 1 + head, self._num_blocks))
            needed = min(block + 1 + head - head // 4, self._num_blocks)
            if needed <= self.blocks_warm or self._failed or self._thread is not None:
                return
            self._thread = threading.Thread(target=self._take, name="pages ahead", daemon=True)
            self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` for the thread; returns whether it has ended."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return self._thread is None

    def _take(self) -> None:
        while True:
            with self._lock:
                start, end = self.blocks_warm, self._expected_blocks
                if self._failed or start >= end:
                    self._thread = None
                    return
            end = min(end, start + max(_SLICE_BYTES * len(self._tensors) // sum(self._block_bytes), 1))
            try:
                for first, size in self._spans(start, end):
                    _populate(first, size)
            except OSError as error:
                self._failed = True
                log.warning("cannot pre-fault the pages of KV blocks, their first use will be slower: %s", error)
            else:
                self.blocks_warm = end

    def _spans(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Address and size of blocks [start, end) of each tensor, in whole pages."""
        page = mmap.PAGESIZE
        for tensor, size in zip(self._tensors, self._block_bytes, strict=True):
            first = (tensor.data_ptr() + start * size) // page * page
            last = -(-(tensor.data_ptr() + end * size) // page) * page
            yield first, last - first


def _populate(address: int, size: int) -> None:
    """Faults pages in. Raises OSError: Linux is older than 5.14, or out of memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _POPULATE_WRITE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"madvise of {size} bytes: {os.strerror(number)}")
