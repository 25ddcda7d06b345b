"""How many KV blocks fit into a rank's memory.

On a GPU a draft model is loaded after its target, whose KV would otherwise take the memory that the draft needs: so the
draft's memory (`DraftShare`) is computed before either is loaded.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.core.errors import StartupError
from baton.core.kv_layout import DTYPE_BYTES, DType, KVLayout, stored_dtype, stored_layers
from baton.core.ranks import Ranks
from baton.core.window import Window
from baton.engine.checkpoint import Checkpoint, read_model_config
from baton.engine.kernels.build import BLOCK_LEVELS
from baton.engine.options import EngineOptions
from baton.engine.safetensors_files import has_safetensors
from baton.engine.transformers_path import transformers_model
from baton.engine.weights import parameter_bytes
from baton.models.model_config import AnyConfig, GeneralConfig

DEFAULT_SEQUENCES = 256  # without a configured KV memory, at most this many sequences of full length
_CPU_KV_BYTES = 4 << 30
_CPU_KV_SHARE = 0.125
_CUDA_KV_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class DraftShare:
    """A draft model's memory; its sequences, of up to `max_model_len` tokens, use at most `most_blocks` blocks."""

    parameter_bytes: int
    layout: KVLayout
    most_blocks: int
    max_model_len: int

    def num_blocks(self, target_blocks: int) -> int:
        """The number of the draft's blocks beside a target with `target_blocks`."""
        return min(target_blocks, self.most_blocks)

    def kv_bytes(self, target_blocks: int) -> int:
        """The bytes of these blocks and the extra block of zeros of a pool."""
        return (self.num_blocks(target_blocks) + 1) * self.layout.bytes_per_block

    def left_of(self, budget: int, target_block_bytes: int) -> int:
        """The bytes of `budget` left for the target's KV, in blocks of `target_block_bytes`, beside the draft."""
        beside_one = self.layout.bytes_per_block
        after_parameters = budget - self.parameter_bytes - beside_one
        if_all_blocks = after_parameters - self.most_blocks * beside_one
        as_many_each = after_parameters // (target_block_bytes + beside_one) * target_block_bytes
        return max(if_all_blocks, as_many_each, 0)


def unread_sizes(
    model_dir: Path,
    config: AnyConfig,
    block_size: int,
    dtype: DType,
    size: int = 1,
    rank: int = 0,
    *,
    kv_dtype: str = "auto",
    quantize: str = "none",
    level: str | None = None,
) -> tuple[KVLayout, int]:
    """Returns the KV layout of the whole model and the bytes of the weights of `rank` of `size`, before they are read.
    `level` is that of the compiled kernels (None: torch's), which decides what stays quantised as it is published.
    Raises StartupError for a model that transformers cannot serve."""
    if not isinstance(config, GeneralConfig):
        in_blocks = level in BLOCK_LEVELS and dtype == "bfloat16" and quantize != "int8"
        # A plan may be made where only config.json is.
        checkpoint = Checkpoint(model_dir) if in_blocks and has_safetensors(model_dir) else None
        parameters = parameter_bytes(config, size, rank, DTYPE_BYTES[dtype], quantize, checkpoint)
        return config.kv_layout(block_size, stored_dtype(kv_dtype, dtype)), parameters
    longest = config.max_position_embeddings
    recorded, parameters = transformers_model().probe(model_dir, longest, dtype, size, rank, level=level)
    if recorded is None:
        raise StartupError(f"{model_dir.name}: its KV layout is only known when it is loaded")
    return KVLayout(block_size, stored_layers(recorded.storages, kv_dtype)), parameters


def draft_share(
    model_dir: Path,
    config: AnyConfig,
    target_longest: int,
    block_size: int,
    dtype: DType,
    max_running: int,
    kv_dtype: str = "auto",
    level: str | None = None,
) -> DraftShare:
    """`config` is the draft's, `target_longest` the most positions of the target's sequences; both have the same
    `kv_dtype`, and `level` of compiled kernels."""
    longest = min(config.max_position_embeddings, target_longest)
    layout, parameters = unread_sizes(model_dir, config, block_size, dtype, kv_dtype=kv_dtype, level=level)
    return DraftShare(parameters, layout, max_running * layout.blocks_for(longest), longest)


def peak_bytes(device: torch.device, run: Callable[[], None]) -> int:
    """Bytes that torch's allocator reserves on a GPU for `run`, beyond what is allocated before it. What `run` made is
    freed."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device) - before
    gc.collect()  # closures of captured steps
    torch.cuda.empty_cache()
    return peak


def kv_budget(
    options: EngineOptions,
    layout: KVLayout,
    longest: int,
    device: torch.device,
    ranks: Ranks,
    dtype: DType,
    step_bytes: int = 0,
) -> int:
    """Bytes for the KV of one of `ranks`, from the options or by default; `layout` is this rank's own part, `dtype` is
    that of the computation. On a GPU `step_bytes` are left free, for the largest step."""
    if options.kv_memory_bytes is not None:
        return options.kv_memory_bytes // ranks.size
    draft = None
    if options.draft_dir is not None:
        config = read_model_config(options.draft_dir)
        draft = draft_share(
            options.draft_dir, config, longest, options.block_size, dtype, options.max_running, options.kv_dtype
        )
    return default_budget(layout, longest, device, ranks.local_size, draft, options.gpu_share, step_bytes)


def default_budget(
    layout: KVLayout,
    longest: int,
    device: torch.device,
    local_size: int,
    draft: DraftShare | None,
    gpu_share: float = 0.0,
    step_bytes: int = 0,
) -> int:
    """Bytes for a rank's KV when not configured; `layout` is the rank's, `local_size` counts the worker's ranks on this
    machine, `gpu_share` is as in `default_kv_bytes`, `step_bytes` as in `kv_budget`. On a GPU the memory of a `draft`
    that is loaded later is left free; on CPU its pages are allocated as they are used. Raises StartupError if nothing
    is left beside the largest step."""
    enough = layout.blocks_for(longest) * layout.bytes_per_block * DEFAULT_SEQUENCES
    free = default_kv_bytes(device, local_size, gpu_share) - step_bytes
    if step_bytes and free <= 0:
        raise StartupError(
            f"{device}: the largest step takes {step_bytes / 2**30:.1f} GiB, which leaves no memory for KV; lower"
            " --step-tokens, --max-running or --max-model-len, or use a GPU with more memory"
        )
    if draft is not None and device.type == "cuda":
        free = draft.left_of(free, layout.bytes_per_block)
    return min(free, enough)


def plan_blocks(layout: KVLayout, kv_memory_bytes: int, max_model_len: int | None, step_tokens: int = 1) -> int:
    """How many blocks fit in `kv_memory_bytes`. Raises StartupError if that is less than what a sequence of
    `max_model_len` tokens holds at once, computed in steps of `step_tokens`."""
    num_blocks = kv_memory_bytes // layout.bytes_per_block
    needed = Window.of(layout).max_blocks(max_model_len or 1, step_tokens)
    if num_blocks < needed:
        need_mib, have_mib = needed * layout.bytes_per_block / 2**20, kv_memory_bytes / 2**20
        raise StartupError(
            f"KV memory of {have_mib:.1f} MiB is too small: {max_model_len or 1} tokens need {need_mib:.1f} MiB"
        )
    return num_blocks


def default_kv_bytes(device: torch.device, local_size: int = 1, gpu_share: float = 0.0) -> int:
    """The default for one of a worker's `local_size` ranks on this machine. CPU: its part of an eighth of the machine's
    memory, or of 4 GiB if that is less (pages are allocated only as blocks are used). CUDA: 85 % of the free memory;
    with a `gpu_share` below 1 also at most 85 % of the share less what this process already uses. A share of 0 means
    even parts for the worker's ranks on the same GPU. Raises StartupError if weights fill a share below 1."""
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
            " raise --gpu-share, or use a GPU for this rank alone"
        )
    return min(left, int(free * _CUDA_KV_SHARE))
