"""The paged KV cache of one rank, and how many blocks fit in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.core.errors import StartupError
from baton.core.kv_layout import KVLayout
from baton.engine.device import default_kv_bytes
from baton.engine.draft_share import DraftShare
from baton.engine.pages_ahead import PagesAhead

DEFAULT_SEQUENCES = 256  # without a given KV memory, no more than this many sequences of full length


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
        self.num_blocks = num_blocks
        self.zero_block = num_blocks
        self.storage: list[tuple[Tensor, Tensor]] = []
        for layer in layout.layers:
            shape = (num_blocks + 1, layout.block_size, layer.num_kv_heads, layer.head_dim)
            dtype = getattr(torch, layer.dtype)
            try:
                pair = (torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
            except RuntimeError:  # torch's way to say that memory is out, on every device
                gib = num_blocks * layout.bytes_per_block / (1 << 30)
                raise StartupError(f"{device} has no {gib:.4g} GiB for KV; give less with --kv-memory-gib") from None
            for tensor in pair:
                tensor[self.zero_block].zero_()
            self.storage.append(pair)
        self.layers = [(keys[:num_blocks], values[:num_blocks]) for keys, values in self.storage]
        tensors = [tensor for pair in self.storage for tensor in pair]
        self.pages = PagesAhead(tensors, num_blocks) if device.type == "cpu" else None

    def expect(self, block_ids: Sequence[int], *, ahead: bool = True) -> None:
        """These blocks are in use or will be soon: they, and with `ahead` a head of those behind them, get their pages
        meanwhile. Does not wait."""
        if self.pages is not None and block_ids:
            self.pages.expect(max(block_ids), ahead=ahead)


def default_budget(
    layout: KVLayout,
    longest: int,
    device: torch.device,
    local_size: int,
    draft: DraftShare | None,
    gpu_share: float = 0.0,
) -> int:
    """Bytes for a rank's KV when nobody says how many; `layout` is the rank's, `local_size` counts the worker's ranks
    on this machine, `gpu_share` is as of `default_kv_bytes`. A `draft` that comes later has its share of a GPU; on CPU
    its pages are taken as they are used."""
    enough = layout.blocks_for(longest) * layout.bytes_per_block * DEFAULT_SEQUENCES
    free = default_kv_bytes(device, local_size, gpu_share)
    if draft is not None and device.type == "cuda":
        free = draft.left_of(free, layout.bytes_per_block)
    return min(free, enough)


def plan_blocks(layout: KVLayout, kv_memory_bytes: int, max_model_len: int | None) -> int:
    """How many blocks fit in `kv_memory_bytes`. Raises StartupError if that is less than `max_model_len` tokens."""
    num_blocks = kv_memory_bytes // layout.bytes_per_block
    needed = layout.blocks_for(max_model_len or 1)
    if num_blocks < needed:
        need_mib, have_mib = needed * layout.bytes_per_block / 2**20, kv_memory_bytes / 2**20
        raise StartupError(
            f"KV memory of {have_mib:.1f} MiB is too small: {max_model_len or 1} tokens need {need_mib:.1f} MiB"
        )
    return num_blocks
