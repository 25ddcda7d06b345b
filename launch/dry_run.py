"""`baton up --dry-run`: what would be started, where, with how much memory, and the exact commands.

Memory of a rank is that of parameters, KV, edge buffers, and a draft model. Parameters follow from the checkpoint's
config, and where they stay quantised also from a few rows of each matrix. What a topology leaves to a machine (device,
dtype, KV memory) is resolved as on this machine. A plan that says `cuda` is trusted to have GPUs: the dry run may be
made on a machine without any.
"""

from __future__ import annotations

import shlex
import socket
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from baton.core.edge_kinds import choose_edges
from baton.core.errors import StartupError
from baton.core.kv_layout import DType, KVLayout
from baton.core.reshard import local_layout, reshard_layout
from baton.core.window import STEPS_AHEAD, Window
from baton.engine.checkpoint import read_model_config
from baton.engine.device import choose_device, choose_dtype
from baton.engine.kernels.build import level_of
from baton.engine.memory import default_budget, draft_share, unread_sizes
from baton.engine.quantize import check_quantize
from baton.engine.selftest import check_exact
from baton.models.model_config import AnyConfig
from baton.runtime.config import WorkerConfig
from baton.runtime.model_source import resolve_draft, resolve_model
from baton.transfer.nccl import MAX_CTAS
from baton.transfer.staging_buffers import check_staging, kept_limit
from launch.members import Programs
from launch.plan import BATCHES, COORDINATOR, LOOPBACK, Plan, WorkerPart
from launch.plan_checks import naming
from launch.tables import make_table, show

CHANNEL_BYTES = 4 << 20
"""Size of NCCL's buffer of one channel (NCCL_BUFFSIZE), unless the environment sets another."""


def dry_run(plan: Plan, programs: Programs, console: Console | None = None) -> int:
    """Prints the plan; returns the exit code.

    Raises:
        StartupError: memory is too small for the model, a node's address does not resolve here, or two nodes have the
            same.
    """
    console = console or Console(soft_wrap=True)
    _check_addresses(plan)
    memory = _memory(plan)  # first, so that an error does not follow half a plan
    console.print(f"model {plan.served_name}   {plan.model}")
    for title, section in (("placement", _placement(plan)), ("ports", _ports(plan)), ("memory of each rank", memory)):
        console.print(f"\n[bold]{title}[/]")
        if isinstance(section, str):
            console.print(section, highlight=False)
        else:
            show(section, console)
    console.print("\n[bold]commands[/]")
    if not plan.topology.coordinator.config.control_port:
        console.print("# workers get the control port that the coordinator binds instead of 0")
    console.print(f"# {COORDINATOR}   node {plan.topology.front.name}")
    console.out(shlex.join([*programs.coordinator, *plan.coordinator_command()]), highlight=False)
    if plan.topology.batches is not None:
        console.print(f"# {BATCHES}   node {plan.topology.front.name}")
        console.out(shlex.join([*programs.batches, *plan.batches_command()]), highlight=False)
    for part in plan.parts:
        words = [f"{key}={value}" for key, value in part.environment.items()]
        console.print(f"# {part.name}   node {part.node.name}")
        console.out(shlex.join([*words, *programs.of_part(plan, part)]), highlight=False)
    return 0


def _check_addresses(plan: Plan) -> None:
    """Raises StartupError for a node whose address does not resolve, or is that of another node: the plan would count
    the cores and GPUs of one machine twice, and its members would compete for ports."""
    nodes: dict[str, str] = {}
    for node in (node for node in plan.topology.nodes if node.address):
        try:
            address = str(socket.getaddrinfo(node.address, None)[0][4][0])
        except OSError as error:
            reason = f"its address {node.address} does not resolve here ({error.strerror or error})"
            raise StartupError(f"node {node.name}: {reason}") from None
        if address in nodes:
            reason = f"its address {node.address} is that of node {nodes[address]}: {address}"
            raise StartupError(f"node {node.name}: {reason}")
        nodes[address] = node.name


def _placement(plan: Plan) -> Table:
    table = make_table(("member", "node", "address", "ranks", "cores", "gpus"))
    node = plan.topology.front
    table.add_row(COORDINATOR, node.name, node.address, "", "not pinned", "")
    if plan.topology.batches is not None:
        table.add_row(BATCHES, node.name, LOOPBACK, "", "not pinned", "")
    for part in plan.parts:
        first = part.node_rank * part.ranks
        last = first + part.ranks - 1
        ranks = f"{first}-{last}" if last > first else str(first)
        ranks += f" of {part.worker.tensor_parallel}"
        table.add_row(part.name, part.node.name, part.node.address, ranks, str(part.placement), part.gpus or "none")
    return table


def _ports(plan: Plan) -> Table:
    table = make_table(("member", "what", "address", "port"))
    for listener in plan.listeners():
        use = listener.key.removesuffix("_port").removesuffix("port") or "http"
        table.add_row(listener.member, use, listener.host, str(listener.port or "any"))
    return table


def _memory(plan: Plan) -> Table | str:
    """Returns the table, or the reason why there is none."""
    try:
        model_dir = resolve_model(plan.model)
        configs = [read_model_config(model_dir, part.worker.config.model_impl) for part in plan.parts]
    except StartupError as error:
        return f"unknown: {error.message}"
    head = ("member", "parameters MiB", "KV MiB", "KV blocks", "edges", "edge buffers MiB", "staging MiB", "draft MiB")
    table = make_table(head)
    for part, config in zip(plan.parts, configs, strict=True):
        memory = rank_memory(plan, part, config, model_dir)
        draft = "?" if memory.draft_bytes is None else _mib(memory.draft_bytes)
        if memory.draft_bytes and not memory.kv_blocks:
            draft += " and its KV"
        kv = (_mib(memory.kv_bytes), str(memory.kv_blocks)) if memory.kv_bytes else ("85 % of free memory", "?")
        table.add_row(
            part.name,
            _mib(memory.parameter_bytes),
            *kv,
            str(memory.edges),
            _mib(memory.edge_bytes),
            _mib(memory.staging_bytes),
            draft,
        )
    return table


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f}"


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank. `kv_blocks` is 0 if only the running worker can determine it (a share of a GPU's free memory).
    `edge_bytes` is what NCCL keeps for its edges, 0 on Gloo; `staging_bytes` the most for KV in transit, including the
    buffers kept for reuse; `draft_bytes` a draft model's parameters and KV (without the KV if `kv_blocks` is 0), and
    None if that model is not on this host."""

    parameter_bytes: int
    kv_bytes: int
    kv_blocks: int
    edges: int
    edge_bytes: int
    staging_bytes: int
    draft_bytes: int | None


def rank_memory(plan: Plan, part: WorkerPart, config: AnyConfig, model_dir: Path) -> RankMemory:
    """Returns the memory that the first rank of a part of a checked plan will use.

    Raises:
        StartupError: memory for KV, or for KV in transit, is too small.
    """
    options, size = part.worker.config, part.worker.tensor_parallel
    rank = part.node_rank * part.ranks
    device = torch.device("cuda", 0) if options.device == "cuda" else choose_device(options.device)
    dtype = choose_dtype(options.dtype, device, options.exact, options.kernels)
    check_quantize(options.quantize, device)
    level = _level(options, device)
    if options.exact and device.type == "cpu":
        with naming(part.name):
            check_exact(options.block_size, dtype, level or "torch", compiled=level is not None)
    layout, parameters = unread_sizes(
        model_dir,
        config,
        options.block_size,
        dtype,
        size,
        rank,
        kv_dtype=options.kv_dtype,
        quantize=options.quantize,
        level=level,
    )
    mine = local_layout(layout, size, rank)
    longest = config.longest(options.max_model_len)
    if options.kv_memory_gib:
        budget = round(options.kv_memory_gib * (1 << 30)) // size
    elif device.type == "cpu":
        budget = default_budget(mine, longest, device, part.ranks, None)
    else:
        budget = 0
    blocks = budget // mine.bytes_per_block
    if budget and blocks < Window.of(mine).max_blocks(options.max_model_len or 1, STEPS_AHEAD * options.step_tokens):
        raise StartupError(f"{part.name}: KV memory of {budget / 2**20:.1f} MiB per rank is too small for one sequence")
    edges = _edges(plan, part, layout, rank)
    kind = choose_edges(options.edge_kind, device.type)
    channel_bytes = MAX_CTAS * CHANNEL_BYTES if kind == "nccl" else 0
    staging = round(options.staging_mib * (1 << 20))
    with naming(part.name):
        check_staging(staging, layout)
    return RankMemory(
        parameters,
        (blocks + 1) * mine.bytes_per_block if budget else 0,
        blocks,
        edges,
        edges * channel_bytes,
        staging // size + kept_limit(staging, size),
        _draft_bytes(part, model_dir, longest, blocks, dtype, level),
    )


def _level(options: WorkerConfig, device: torch.device) -> str | None:
    return level_of(options.kernels) if device.type == "cpu" else None


def _draft_bytes(
    part: WorkerPart, model_dir: Path, longest: int, blocks: int, dtype: DType, level: str | None
) -> int | None:
    """Returns the memory of a draft model, which only the leader of a decode worker can have. None if it is not on this
    host."""
    if part.role != "decode" or part.node_rank > 0:
        return 0
    options = part.worker.config
    try:
        draft_dir = resolve_draft(options.draft, model_dir)
        if draft_dir is None:
            return 0
        draft = read_model_config(draft_dir)
    except StartupError:
        return None
    usable = min(longest, blocks * options.block_size) if blocks else longest
    share = draft_share(
        draft_dir, draft, usable, options.block_size, dtype, options.max_running, options.kv_dtype, level
    )
    return share.parameter_bytes + (share.kv_bytes(blocks) if blocks else 0)


def _edges(plan: Plan, part: WorkerPart, layout: KVLayout, rank: int) -> int:
    """Returns the number of edges of a rank to the workers of the other role, if all of them exchange KV."""
    count = 0
    for other in plan.topology.workers:
        if other.role != part.role:
            sizes = {worker.role: worker.tensor_parallel for worker in (part.worker, other)}
            edges = reshard_layout(layout, sizes["prefill"], sizes["decode"])
            count += sum(getattr(edge, f"{part.role}_rank") == rank for edge in edges)
    return count
