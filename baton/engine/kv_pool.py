"""The paged KV cache of one rank, and taking its pages from the operating system ahead of their use.

A pool's memory has no pages before it is first written, and blocks are handed out in rising order until the whole pool
has been used once. So for a long time every sequence would meet fresh pages: on a virtual machine 2 to 10 us for each
4 KiB, which is 6 to 40 ms for 512 tokens of a 135 M model, all of it in the middle of a hand-over or a step. Here a
short-lived thread takes them before: at the start a head of `ahead_bytes`, then as much again in front of the highest
block that anybody has named. Beyond that nothing is taken, so an idle worker stays small.

It is done by madvise(MADV_POPULATE_WRITE) (Linux 5.14), which changes no byte: blocks may be written meanwhile.
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
_SLICE_BYTES = 1 << 20  # a call holds up whoever maps or unmaps memory meanwhile
_POPULATE_WRITE = 23


class KVPool:
    """K and V of every layer, in blocks: `layers[i]` is (K, V), each [num_blocks, block_size, kv_heads, head_dim].

    Blocks 0..num_blocks-1 belong to the scheduler. One more block of zeros lies behind them in the same storage; padded
    block tables point at it (`zero_block`), and `storage[i]` shows the tensors with it. Memory is not initialised (the
    operating system hands out pages as blocks are first used, or shortly before: `expect`); attention never reads
    positions that were not written.

    Raises StartupError when there is not that much memory.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self.num_blocks = num_blocks
        self.zero_block = num_blocks
        self.storage: list[tuple[Tensor, Tensor]] = []
        for layer in layout.layers:
            shape = (num_blocks + 1, layout.block_size, layer.num_kv_heads, layer.head_dim)
            dtype = getattr(torch, layer.dtype)
            try:
                keys, values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
            except RuntimeError:  # torch's way to say that memory is out, on every device
                gib = num_blocks * layout.bytes_per_block / (1 << 30)
                raise StartupError(f"{device} has no {gib:.4g} GiB for KV; give less with --kv-memory-gib") from None
            keys[self.zero_block], values[self.zero_block] = 0, 0
            self.storage.append((keys, values))
        self.layers = [(keys[:num_blocks], values[:num_blocks]) for keys, values in self.storage]
        tensors = [tensor for pair in self.storage for tensor in pair]
        self.pages = PagesAhead(tensors, num_blocks) if device.type == "cpu" else None

    def expect(self, block_ids: Sequence[int], *, ahead: bool = True) -> None:
        """These blocks are in use or will be soon: they, and with `ahead` a head of those behind them, get their pages
        meanwhile. Does not wait."""
        if self.pages is not None and block_ids:
            self.pages.expect(max(block_ids), ahead=ahead)


class PagesAhead:
    """Complete state: how far pages are taken (`blocks_warm`), how far they are wanted, and the thread that is at it.

    `tensors` are those of a pool on CPU, each contiguous with blocks in its first dimension; the first `num_blocks` are
    handed out, in rising order.
    """

    def __init__(self, tensors: Sequence[Tensor], num_blocks: int, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._tensors, self._num_blocks = tuple(tensors), num_blocks
        self._block_bytes = [t.stride(0) * t.element_size() for t in self._tensors]
        self.ahead_blocks = max(ahead_bytes // sum(self._block_bytes), 1)
        self.blocks_warm = 0
        self._wanted = 0
        self._failed = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def expect(self, block: int, *, ahead: bool = True) -> None:
        """Blocks up to this one are in use, or will be soon; with `ahead` a head of more is to lie in front of them.
        From any thread; does not wait. A thread starts only when a quarter of the head is used up."""
        head = self.ahead_blocks if ahead else 0
        with self._lock:
            self._wanted = max(self._wanted, min(block + 1 + head, self._num_blocks))
            needed = min(block + 1 + head - head // 4, self._num_blocks)
            if needed <= self.blocks_warm or self._failed or self._thread is not None:
                return
            self._thread = threading.Thread(target=self._take, name="pages ahead", daemon=True)
            self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Whether all that is wanted is there by then."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return self._thread is None

    def _take(self) -> None:
        while True:
            with self._lock:
                start, end = self.blocks_warm, self._wanted
                if self._failed or start >= end:
                    self._thread = None
                    return
            end = min(end, start + max(_SLICE_BYTES * len(self._tensors) // sum(self._block_bytes), 1))
            try:
                for first, size in self._spans(start, end):
                    _populate(first, size)
            except OSError as error:
                self._failed = True
                log.warning("pages of KV blocks are taken as they are first used, at a cost then: %s", error)
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
    """Raises OSError: not Linux 5.14, or no memory left."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _POPULATE_WRITE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"madvise of {size} bytes: {os.strerror(number)}")
