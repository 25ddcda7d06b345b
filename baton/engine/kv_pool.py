"""The paged KV cache of one rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.core.errors import StartupError
from baton.core.kv_layout import KVLayout
from baton.engine.pages_ahead import PagesAhead


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
