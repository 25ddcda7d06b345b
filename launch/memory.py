"""How much memory each rank of a plan will take, before anything is loaded: parameters, KV, buffers of edges, a draft.

Parameters follow from the checkpoint's config alone. What a topology leaves to the machine (device, dtype, KV memory)
is taken as this machine would decide it. That there are GPUs where the plan says `cuda` is believed: it may be made
where there are none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from baton.core.errors import StartupError
from baton.core.kv_layout import DTYPE_BYTES
from baton.core.model_config import DType, ModelConfig
from baton.core.reshard import local_layout, reshard
from baton.engine.checkpoint import read_model_config
from baton.engine.device import choose_device, choose_dtype
from baton.engine.memory import default_budget, draft_share
from baton.engine.quantize import check_quantize
from baton.engine.weights import parameter_bytes
from baton.model_source import resolve_draft
from baton.transfer.edge_kinds import choose_edges
from baton.transfer.nccl import MAX_CTAS
from baton.transfer.staging_buffers import kept_limit
from baton.transfer.staging_room import check_staging
from launch.plan import Part, Plan
from launch.plan_checks import naming

CHANNEL_BYTES = 4 << 20
"""NCCL's buffer of one channel (NCCL_BUFFSIZE), unless the environment says otherwise."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank. `kv_blocks` is 0 where only the running worker can tell (a share of a GPU's free memory).
    `edge_bytes` is what NCCL keeps for its edges, 0 on Gloo; `staging_bytes` the most for KV on its way,
    with the buffers kept for more of it; `draft_bytes` a draft model's parameters and KV, of which the KV is left out
    where `kv_blocks` is 0, and None where that model is not on this host."""

    parameter_bytes: int
    kv_bytes: int
    kv_blocks: int
    edges: int
    edge_bytes: int
    staging_bytes: int
    draft_bytes: int | None


def rank_memory(plan: Plan, part: Part, config: ModelConfig, model_dir: Path) -> RankMemory:
    """What the first rank of a part of a checked plan will take.

    Raises:
        StartupError: memory for KV, or for KV on its way, is too small.
    """
    options, size = part.worker.config, part.worker.tensor_parallel
    rank = part.node_rank * part.ranks
    planned = options.device == "cuda" and not options.exact
    device = torch.device("cuda", 0) if planned else choose_device(options.device, options.exact, 0)
    dtype = choose_dtype(options.dtype, device, options.exact, options.kernels)
    check_quantize(options.quantize, device)
    layout = config.kv_layout(options.block_size, dtype)
    mine = local_layout(layout, size, rank)
    longest = config.longest(options.max_model_len)
    if options.kv_memory_gib:
        budget = round(options.kv_memory_gib * (1 << 30)) // size
    elif device.type == "cpu":
        budget = default_budget(mine, longest, device, part.ranks, None)
    else:
        budget = 0
    blocks = budget // mine.bytes_per_block
    if budget and blocks < mine.blocks_for(options.max_model_len or 1):
        raise StartupError(f"{part.name}: KV memory of {budget / 2**20:.1f} MiB a rank is too small for one sequence")
    edges = _edges(plan, part, config, rank)
    kind = choose_edges(options.edge_kind, device)
    channel_bytes = MAX_CTAS * CHANNEL_BYTES if kind == "nccl" else 0
    staging = round(options.staging_mib * (1 << 20))
    with naming(part.name):
        check_staging(staging, layout)
    return RankMemory(
        parameter_bytes(config, size, rank, DTYPE_BYTES[dtype], options.quantize == "int8"),
        (blocks + 1) * mine.bytes_per_block if budget else 0,
        blocks,
        edges,
        edges * channel_bytes,
        staging // size + kept_limit(staging, size),
        _draft_bytes(part, model_dir, longest, blocks, dtype),
    )


def _draft_bytes(part: Part, model_dir: Path, longest: int, blocks: int, dtype: DType) -> int | None:
    """What a draft model takes; only the leader of a decode worker has one, and not each. None where it is not on this
    host."""
    if part.role != "decode" or part.node_rank > 0:
        return 0
    options = part.worker.config
    try:
        found = resolve_draft(options.draft, model_dir)
        draft = None if found is None else read_model_config(found)
    except StartupError:
        return None
    if draft is None:
        return 0
    usable = min(longest, blocks * options.block_size) if blocks else longest
    share = draft_share(draft, usable, options.block_size, dtype, options.max_running)
    return share.parameter_bytes + (share.kv_bytes(blocks) if blocks else 0)


def _edges(plan: Plan, part: Part, config: ModelConfig, rank: int) -> int:
    """Edges of a rank to the workers of the other role, if all of them exchange KV."""
    heads, count = [config.num_kv_heads] * config.num_layers, 0
    for other in plan.topology.workers:
        if other.role != part.role:
            sizes = {worker.role: worker.tensor_parallel for worker in (part.worker, other)}
            edges = reshard(heads, sizes["prefill"], sizes["decode"])
            count += sum(getattr(edge, f"{part.role}_rank") == rank for edge in edges)
    return count
