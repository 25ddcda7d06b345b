"""`baton up --dry-run`: what would be started, where, with how much memory, and the exact commands."""

from __future__ import annotations

import shlex
import socket

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from baton.core.errors import StartupError
from baton.model_source import resolve_model
from launch.members import Programs
from launch.plan import COORDINATOR, Plan
from launch.tables import make_table, show


def dry_run(plan: Plan, programs: Programs, console: Console | None = None) -> int:
    """Prints the plan; returns the exit code.

    Raises:
        StartupError: memory is too small for the model.
    """
    console = console or Console(soft_wrap=True)
    place = plan.topology.coordinator
    memory = _memory(plan)  # first: what it refuses shall not stand below half a plan
    console.print(f"model {plan.served_name}   {plan.model}")
    for title, found in (("placement", _placement(plan)), ("ports", _ports(plan)), ("memory of each rank", memory)):
        console.print(f"\n[bold]{title}[/]")
        if isinstance(found, str):
            console.print(found, highlight=False)
        else:
            show(found, console)
    for node in plan.topology.nodes:
        if node.address and not _resolves(node.address):
            console.print(f"\n[yellow]node {escape(node.name)}: {escape(node.address)} does not resolve here[/]")
    console.print("\n[bold]commands[/]")
    if not place.control_port:
        console.print("# workers get the control port that the coordinator takes in place of 0")
    host = plan.topology.node(place.node)
    console.print(f"# {COORDINATOR}   node {host.name}")
    console.out(shlex.join([*programs.coordinator, *plan.coordinator_command()]), highlight=False)
    for part in plan.parts:
        words = [f"{key}={value}" for key, value in part.environment.items()]
        console.print(f"# {part.name}   node {part.node.name}")
        console.out(shlex.join([*words, *programs.of_part(plan, part)]), highlight=False)
    return 0


def _resolves(address: str) -> bool:
    try:
        socket.getaddrinfo(address, None)
    except OSError:
        return False
    return True


def _placement(plan: Plan) -> Table:
    table = make_table(("member", "node", "address", "ranks", "cores", "gpus"))
    node = plan.topology.node(plan.topology.coordinator.node)
    table.add_row(COORDINATOR, node.name, node.address, "", "not pinned", "")
    for part in plan.parts:
        first = part.node_rank * part.ranks
        last = first + part.ranks - 1
        ranks = f"{first}-{last}" if last > first else str(first)
        ranks += f" of {part.worker.tensor_parallel}"
        table.add_row(part.name, part.node.name, part.node.address, ranks, str(part.placement), part.gpus or "none")
    return table


def _ports(plan: Plan) -> Table:
    table = make_table(("member", "what", "address", "port"))
    for found in plan.listeners():
        what = found.key.removesuffix("_port").removesuffix("port") or "http"
        table.add_row(found.member, what, found.host, str(found.port or "any"))
    return table


def _memory(plan: Plan) -> Table | str:
    """The table, or why there is none."""
    from baton.engine.checkpoint import read_model_config
    from launch.memory import rank_memory

    try:
        model_dir = resolve_model(plan.model)
        config = read_model_config(model_dir)
    except StartupError as error:
        return f"not known here: {error.message}"
    head = ("member", "parameters MiB", "KV MiB", "KV blocks", "edges", "edge buffers MiB", "staging MiB", "draft MiB")
    table = make_table(head)
    for part in plan.parts:
        found = rank_memory(plan, part, config, model_dir)
        draft = "?" if found.draft_bytes is None else _mib(found.draft_bytes)
        if found.draft_bytes and not found.kv_blocks:
            draft += " and its KV"
        kv = (_mib(found.kv_bytes), str(found.kv_blocks)) if found.kv_bytes else ("85 % of what is free", "?")
        table.add_row(
            part.name,
            _mib(found.parameter_bytes),
            *kv,
            str(found.edges),
            _mib(found.edge_bytes),
            _mib(found.staging_bytes),
            draft,
        )
    return table


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f}"
