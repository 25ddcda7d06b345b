"""How much memory each rank of a plan will take, before anything is loaded: parameters, KV, buffers of edges, a draft.

Parameters follow from the checkpoint's config alone. What a topology leaves to the machine (device, dtype, KV memory)
is taken as this machine would decide it. That there are GPUs where the plan says `cuda` is believed: it may be made
where there are none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from baton.core.config import WorkerConfig
from baton.core.errors import StartupError
from baton.core.kv_layout import DTYPE_BYTES
from baton.core.model_config import ModelConfig
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
from launch.plan_checks import check_divides

CHANNEL_BYTES = 4 << 20
"""NCCL's buffer of one channel (NCCL_BUFFSIZE), unless the environment says otherwise."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank. `kv_blocks` is 0 where only the running worker can tell (a share of a GPU's free memory).
    `edge_bytes` is what NCCL keeps for its edges, 0 on Gloo; `staging_bytes` the most for KV on its way,
    with the buffers kept for more of it; `draft_bytes` a draft model's parameters and KV, of which the KV is left out
    where `kv_blocks` is 0."""

    parameter_bytes: int
    kv_bytes: int
    kv_blocks: int
    edges: int
    edge_bytes: int
    staging_bytes: int
    draft_bytes: int = 0


def rank_memory(
    plan: Plan, part: Part, config: ModelConfig, local_rank: int = 0, draft: ModelConfig | None = None
) -> RankMemory:
    """What the `local_rank`-th rank of a part will take; `draft` is the model that guesses for the part's worker.

    Raises:
        StartupError: the model's sizes cannot be divided over the ranks, with the numbers; or memory for KV, or for
            KV on its way, is too small.
    """
    options, size = part.worker.options, part.worker.tensor_parallel
    check_divides(config, size)
    rank = part.node_rank * part.ranks + local_rank
    exact = bool(options.get("exact", False))
    wanted = str(options.get("device", "auto"))
    planned = wanted == "cuda" and not exact
    device = torch.device("cuda", local_rank) if planned else choose_device(wanted, exact, local_rank)
    dtype = choose_dtype(str(options.get("dtype", "auto")), device, exact, str(options.get("kernels", "auto")))
    quantize = str(options.get("quantize", "none"))
    check_quantize(quantize, device)
    layout = config.kv_layout(_number(options.get("block_size", 16)), dtype)
    mine = local_layout(layout, size, rank)
    longest = config.longest(_number(options.get("max_model_len", 0)))
    given = float(str(options.get("kv_memory_gib", 0)))
    if given:
        budget = round(given * (1 << 30)) // size
    elif device.type == "cpu":
        budget = default_budget(mine, longest, device, part.ranks, None)
    else:
        budget = 0
    blocks = budget // mine.bytes_per_block
    if budget and blocks < mine.blocks_for(_number(options.get("max_model_len", 0)) or 1):
        raise StartupError(f"{part.name}: KV memory of {budget / 2**20:.1f} MiB a rank is too small for one sequence")
    draft_bytes = 0
    if draft is not None and part.role == "decode" and rank == 0:
        usable = min(longest, blocks * layout.block_size) if blocks else longest
        running = _number(options.get("max_running", WorkerConfig().max_running))
        share = draft_share(draft, usable, layout.block_size, dtype, running)
        draft_bytes = share.parameter_bytes + (share.kv_bytes(blocks) if blocks else 0)
    edges = _edges(plan, part, config, rank)
    kind = choose_edges(str(options.get("edge_kind", "auto")), device)
    channel_bytes = MAX_CTAS * CHANNEL_BYTES if kind == "nccl" else 0
    staging = round(float(str(options.get("staging_mib", WorkerConfig().staging_mib))) * (1 << 20))
    try:
        check_staging(staging, layout)
    except StartupError as error:
        raise StartupError(f"{part.name}: {error.message}") from None
    return RankMemory(
        parameter_bytes(config, size, rank, DTYPE_BYTES[dtype], quantize == "int8"),
        (blocks + 1) * mine.bytes_per_block if budget else 0,
        blocks,
        edges,
        edges * channel_bytes,
        staging // size + kept_limit(staging, size),
        draft_bytes,
    )


def model_config(model_dir: Path) -> ModelConfig:
    """Raises StartupError for a directory that cannot be served."""
    return read_model_config(model_dir)


def draft_config(part: Part, model_dir: Path) -> ModelConfig | None:
    """The model that guesses for a part's worker: decode workers alone have one, and not all. Raises StartupError for
    one that is not here."""
    if part.role != "decode":
        return None
    found = resolve_draft(str(part.worker.options.get("draft", WorkerConfig().draft)), model_dir)
    return None if found is None else read_model_config(found)


def _edges(plan: Plan, part: Part, config: ModelConfig, rank: int) -> int:
    """Edges of a rank to the workers of the other role, if all of them exchange KV."""
    heads, count = [config.num_kv_heads] * config.num_layers, 0
    for other in plan.topology.workers:
        if other.role != part.role:
            prefill, decode = (part.worker, other) if part.role == "prefill" else (other, part.worker)
            for edge in reshard(heads, prefill.tensor_parallel, decode.tensor_parallel):
                count += rank == (edge.prefill_rank if part.role == "prefill" else edge.decode_rank)
    return count


def _number(value: object) -> int:
    return int(str(value))
