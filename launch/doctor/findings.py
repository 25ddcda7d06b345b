"""What a check found: on a node before a process starts there, and later of workers and hand-overs; and the table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape

from baton.core.cores import ranges
from baton.core.errors import StartupError
from baton.runtime.ports import check_free
from launch.members import is_own
from launch.plan import Plan
from launch.plan_checks import check_files
from launch.tables import make_table, show

_ADVICE = {
    "no reply": "does a firewall drop the coordinator's control port, is its address on the right interface?",
    "hand-over": "between both nodes the decode worker's link port, its store port and all other ports must be open: "
    "firewall, interface of the address, MTU if short prompts pass and long ones do not",
}
"""What to check after a failure, by the check."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; `error` is what is wrong, empty if nothing is. `seconds` and `num_bytes` are 0 if
    nothing was measured."""

    check: str
    where: str
    error: str = ""
    seconds: float = 0.0
    num_bytes: int = 0


def check_node(plan: Plan, name: str) -> list[Finding]:
    """Checks what a node provides: its address, the model and other files, cores, and ports."""
    node, where = plan.topology.node(name), f"node {name}"
    pinned = {core for part in plan.parts if part.node.name == name for core in part.placement.cores}
    findings = [
        Finding("address", where, "" if is_own(node.address) else f"{node.address} is not an address of this host"),
        Finding("files", where, _files(plan, name)),
        Finding("cores", where, _cores(pinned, node.core_count)),
    ]
    for listener in plan.listeners():
        if listener.node == name and listener.port:
            error = ""
            try:
                check_free(listener.host, listener.port, str(listener))
            except StartupError as taken:
                error = taken.message
            if error and listener.key == "control_port":
                error += f"; a cluster may be running there, see `baton ps {plan.url}`: check before starting one"
            findings.append(Finding(f"port {listener.port}", where, error))
    return findings


def _files(plan: Plan, name: str) -> str:
    try:
        check_files(plan, {name})
    except (StartupError, OSError) as error:
        return error.message if isinstance(error, StartupError) else f"{error.strerror}: {error.filename}"
    return ""


def _cores(pinned: set[int], count: int) -> str:
    """Returns what is wrong with the cores; empty if nothing is."""
    here = os.sched_getaffinity(0)
    if not pinned <= here:
        return f"this process may not run on core {ranges(tuple(sorted(pinned - here)))}"
    return f"the topology has {count} cores, but this process may use {len(here)}" if count > len(here) else ""


def print_verdict(findings: Sequence[Finding], console: Console | None = None) -> int:
    """Prints the table of checks, then each failure with what to check. Returns 1 when something failed, else 0."""
    console = console or Console(highlight=False)
    numbers = ("time", "KV")
    table = make_table(("check", "where", "result", *numbers), right=numbers)
    for finding in findings:
        time = f"{finding.seconds:.1f} s" if finding.seconds >= 1 else f"{finding.seconds * 1e3:.0f} ms"
        size = f"{finding.num_bytes / 1e6:,.1f} MB" if finding.num_bytes else ""
        result = "[red]FAILED[/]" if finding.error else "[green]ok[/]"
        table.add_row(finding.check, escape(finding.where), result, time if finding.seconds else "", size)
    show(table, console)
    failed = [finding for finding in findings if finding.error]
    for finding in failed:
        failure = escape(f"{finding.check} {finding.where}")
        console.print(f"\n[red]{failure}[/]: {escape(finding.error)}", soft_wrap=True)
        if advice := _ADVICE.get(finding.check):
            console.print(f"  check: {advice}", soft_wrap=True)
    total = len(findings)
    console.print(f"\n{len(failed)} of {total} checks failed" if failed else f"\nall {total} checks passed")
    return int(bool(failed))
