"""The doctor's verdict: findings on nodes and between ranks, as a table; for what failed, what to check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from launch.doctor.node_checks import Finding
from launch.doctor.tasks import STEPS, Rank, Task, exited_key
from launch.tables import make_table, show

_ADVICE = {
    "rendezvous": "is MASTER_ADDR the leader's own private address, and does a firewall drop its rendezvous port?",
    "all-reduce": "ranks of a worker need every port of each other's address: firewall, interface, routing",
    "link": "does a firewall drop the decode worker's link port, is its node's address the right interface's?",
    "edge": "edges need the decode worker's store port and every other port between both addresses: firewall, "
    "interface that the address belongs to, MTU where small transfers pass and large ones do not",
}

_UNTRIED = "why the probe is missing; nothing was tried between these, so this says nothing about the network"


def read_results(values: Mapping[str, Any], tasks: Sequence[Task], limit_s: float) -> list[Finding]:
    """The results on the board, in the order of the steps; a result that is missing is an error too.

    A measured error is kept when the probe at the other end has exited, and that is added to it.
    """

    def absent(ranks: Sequence[Rank]) -> list[str]:
        """Why results of these ranks cannot come."""
        exited = [rank for rank in ranks if exited_key(rank.key) in values]
        unseen = [str(rank) for rank in ranks if f"here/{rank.key}" not in values and rank not in exited]
        reasons = [f"the probe of {rank} {values[exited_key(rank.key)]}" for rank in exited]
        return reasons + ([f"no probe came up for {', '.join(unseen)}"] if unseen else [])

    found: list[Finding] = []
    for step in STEPS:
        for task in tasks if step != "edge" else (task for task in tasks if task.role == "prefill"):
            for name, other in task.expected(step).items():
                alone = other == task.me
                result, missing = values.get(name), absent(task.ranks if alone else (task.me, other))
                error = "" if result is None else result.get("error", "")
                if other_end := values.get(f"end/{other.key}/{task.me.key}", {}).get("error"):
                    error = "; ".join(filter(None, (error, f"at the other end: {other_end}")))
                if error or result is None:
                    error = "; ".join(filter(None, (error, *missing))) or f"no result within {limit_s:g} s"
                between = str(task.me) if alone else f"{task.me} → {other}"
                untried = result is None and bool(missing)
                found.append(Finding(step, between, **{**(result or {}), "error": error, "untried": untried}))
    return found


def print_verdict(findings: Sequence[Finding], console: Console | None = None) -> int:
    """The table of checks, then what failed, each with what to look at. Returns 1 when something failed, else 0."""
    console = console or Console(highlight=False)
    numbers = ("latency", "bandwidth")
    table = make_table(("check", "where", "result", *numbers), right=numbers)
    for found in findings:
        latency = f"{found.seconds * 1e3:.2f} ms" if found.seconds else ""
        bandwidth = f"{found.bytes_per_s / 1e6:,.0f} MB/s" if found.bytes_per_s else ""
        result = "[red]FAILED[/]" if found.error else "[green]ok[/]"
        table.add_row(found.check, escape(found.where), result, latency, bandwidth)
    show(table, console)
    failed = [found for found in findings if found.error]
    for found in failed:
        what = found.where if found.where.startswith("node ") else f"{found.check} {found.where}"
        console.print(f"\n[red]{escape(what)}[/]: {escape(found.error)}", soft_wrap=True)
        if advice := _UNTRIED if found.untried else _ADVICE.get(found.check):
            console.print(f"  check: {advice}", soft_wrap=True)
    total = len(findings)
    console.print(f"\n{len(failed)} of {total} checks failed" if failed else f"\nall {total} checks passed")
    return int(bool(failed))
