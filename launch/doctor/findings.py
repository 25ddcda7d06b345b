"""The doctor's findings: on one node before anything is sent (address, versions, model and token, cores, ports), and
between ranks, from the results on the board. Also the verdict: a table, with what to check after a failure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from baton.core.errors import StartupError
from baton.runtime.model_source import resolve_model
from baton.runtime.ports import check_free
from launch.console import versions
from launch.doctor.tasks import STEPS, Rank, Task, exited_key
from launch.members import is_own
from launch.plan import Plan
from launch.plan_checks import check_files
from launch.tables import make_table, show

_EQUAL = ("baton-serve", "torch", "grpcio", "xxhash")
"""Packages that must be the same on every node."""

_ADVICE = {
    "rendezvous": "is MASTER_ADDR the leader's own private address, and does a firewall drop its rendezvous port?",
    "all-reduce": "ranks of a worker need all ports between their addresses: firewall, interface, routing",
    "link": "does a firewall drop the decode worker's link port, is its node's address on the right interface?",
    "edge": "edges need the decode worker's store port and all other ports between both addresses: firewall, "
    "interface of the address, MTU if small transfers pass and large ones do not",
}

_UNTRIED = "why the probe is missing; the network between these ranks was not tested"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, on a node or between two ranks; `error` is what is wrong, empty if nothing is. `seconds`
    and `bytes_per_s` are 0 if nothing was measured. `untried`: a probe was missing and there is no result, so the check
    says nothing about the network between them."""

    check: str
    where: str
    error: str = ""
    seconds: float = 0.0
    bytes_per_s: float = 0.0
    untried: bool = False


def on_node(check: str, name: str, error: str = "") -> Finding:
    return Finding(check, f"node {name}", error)


def check_node(plan: Plan, name: str, full_digest: bool) -> tuple[list[Finding], dict[str, str]]:
    """Returns the findings on this node, and the facts that must be equal on all nodes."""
    node = plan.topology.node(name)
    address = "" if is_own(node.address) else f"{node.address} is not an address of this host"
    facts, files = versions(*_EQUAL), ""
    try:
        check_files(plan, {name})
        facts["model digest"] = _digest(resolve_model(plan.model), full_digest)
    except (StartupError, OSError) as error:
        files = error.message if isinstance(error, StartupError) else f"{error.strerror}: {error.filename}"
    pinned = {core for part in plan.parts if part.node.name == name for core in part.placement.cores}
    findings = [
        on_node("address", name, address),
        on_node("files", name, files),
        on_node("cores", name, _cores(pinned, node.core_count)),
    ]
    for listener in plan.listeners():
        if listener.node == name and listener.port:
            taken = ""
            try:
                check_free(listener.host, listener.port, str(listener))
            except StartupError as error:
                taken = error.message
            findings.append(on_node(f"port {listener.port}", name, taken))
    return findings, facts


def compare(facts: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Checks that the facts of all nodes are equal: each node is compared with the first by name."""
    findings, first = [], min(facts, default="")
    for name, theirs in facts.items():
        both = ((key, theirs[key], value) for key, value in facts[first].items() if key in theirs)
        wrong = [f"{key} is {own}, but {value} on node {first}" for key, own, value in both if own != value]
        findings.append(on_node("versions", name, "; ".join(wrong)))
    return findings


def _digest(model: Path, full: bool) -> str:
    """Returns a digest of all bytes; or of names, sizes and each file's first MiB, which holds the headers."""
    from baton.engine.checkpoint import model_digest, weight_files

    if full:
        return model_digest(model)
    import hashlib

    digest = hashlib.sha256()
    for path in (model / "config.json", *weight_files(model)):
        with path.open("rb") as stream:
            digest.update(f"{path.name}:{path.stat().st_size}\n".encode() + stream.read(1 << 20))
    return digest.hexdigest()


def _cores(pinned: set[int], wanted: int) -> str:
    """Returns what is wrong with the cores; empty if nothing is."""
    here = os.sched_getaffinity(0)
    if not pinned <= here:
        return f"this process may not run on core {', '.join(map(str, sorted(pinned - here)))}"
    if wanted > len(here):
        return f"the topology has {wanted} cores, but this process may use {len(here)}"
    return ""


def read_results(values: Mapping[str, Any], tasks: Sequence[Task], limit_s: float) -> list[Finding]:
    """Returns the results on the board, in the order of the steps; a missing result is an error too.

    If the probe at the other end has exited, that is added to a measured error and does not replace it.
    """

    def absent(ranks: Sequence[Rank]) -> list[str]:
        """Returns the reasons why results of these ranks cannot come."""
        exited = [rank for rank in ranks if exited_key(rank.key) in values]
        unseen = [str(rank) for rank in ranks if f"here/{rank.key}" not in values and rank not in exited]
        reasons = [f"the probe of {rank} {values[exited_key(rank.key)]}" for rank in exited]
        return reasons + ([f"no probe connected for {', '.join(unseen)}"] if unseen else [])

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
    """Prints the table of checks, then each failure with what to check. Returns 1 when something failed, else 0."""
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
