"""The doctor's verdict: what was found on nodes and between ranks, as a table and, for what failed, what to check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape

from launch.doctor_checks import Finding
from launch.probes import Rank, Task, edge_key, gone_key
from launch.tables import make_table, show

_ADVICE = {
    "rendezvous": "is MASTER_ADDR the leader's own private address, and does a firewall drop its rendezvous port?",
    "all-reduce": "ranks of a worker need every port of each other's address: firewall, interface, routing",
    "link": "does a firewall drop the decode worker's link port, is its node's address the right interface's?",
    "edge": "edges need the decode worker's store port and every other port between both addresses: firewall, "
    "interface that the address belongs to, MTU where small transfers pass and large ones do not",
}

_UNTRIED = "why the probe is missing; nothing was tried between these, so this says nothing about the network"


@dataclass(frozen=True, slots=True)
class Measured:
    """One check between ranks. `seconds` and `bytes_per_s` are 0 where nothing was measured; `untried` where a probe
    was missing and no result came, so that nothing is known about the way between them."""

    check: str
    between: str
    error: str = ""
    seconds: float = 0.0
    bytes_per_s: float = 0.0
    untried: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    findings: tuple[Finding, ...]
    measured: tuple[Measured, ...]

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self.findings) and not any(found.error for found in self.measured)

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Verdict:
        findings = tuple(Finding(**finding) for finding in told["findings"])
        return cls(findings, tuple(Measured(**measured) for measured in told["measured"]))


def read_results(values: Mapping[str, Any], tasks: Sequence[Task], limit_s: float) -> tuple[Measured, ...]:
    """What the probes left on the board, in the order of the steps; a result that never came is an error too.

    What a probe measured stands, whatever became of the others: beside an error their ends are told as well.
    """
    came = {task.me.key for task in tasks if f"here/{task.me.key}" in values}

    def missing(ranks: Sequence[Rank]) -> str:
        gone = [f"the probe of {rank} {values[gone_key(rank.key)]}" for rank in ranks if gone_key(rank.key) in values]
        away = [str(rank) for rank in ranks if rank.key not in came and gone_key(rank.key) not in values]
        return "; ".join(gone + ([f"no probe came up for {', '.join(away)}"] if away else []))

    def result(name: str, ranks: Sequence[Rank], other_end: str = "") -> dict[str, Any]:
        absent = missing(ranks)
        if name not in values:
            error = absent or f"no result within {limit_s:g} s"
            return {"error": "; ".join(filter(None, (error, other_end))), "untried": bool(absent)}
        error = "; ".join(filter(None, (values[name].get("error"), other_end)))
        return {**values[name], "error": "; ".join(filter(None, (error, absent))) if error else ""}

    found: list[Measured] = []
    for check in ("rendezvous", "all-reduce"):
        for task in tasks:
            if len(task.ranks) > 1:
                found.append(Measured(check, str(task.me), **result(f"{check}/{task.me.key}", task.ranks)))
    senders = [task for task in tasks if task.role == "prefill"]
    for task in senders:
        for name in task.links:
            leaders = [t.me for t in tasks if t.me.worker == name and t.leads]
            told = result(f"link/{task.me.worker}/{name}", (task.me, *leaders))
            found.append(Measured("link", f"{task.me} → {name}", **told))
    for task in senders:
        for peer in sorted(task.peers, key=lambda rank: (rank.worker, rank.rank)):
            other = values.get(f"end/{peer.key}/{task.me.key}")
            other_end = f"at the other end: {other['error']}" if other else ""
            told = result(edge_key(task.me, peer), (task.me, peer), other_end)
            found.append(Measured("edge", f"{task.me} → {peer}", **told))
    return tuple(found)


def print_verdict(verdict: Verdict, console: Console | None = None) -> None:
    """The table of checks, then what failed, each with what to look at."""
    console = console or Console(highlight=False)
    numbers = ("latency", "bandwidth")
    table = make_table(("check", "where", "result", *numbers), right=numbers)
    for finding in verdict.findings:
        table.add_row(finding.check, f"node {escape(finding.where)}", _result(finding.ok))
    for found in verdict.measured:
        latency = f"{found.seconds * 1e3:.2f} ms" if found.seconds else ""
        bandwidth = f"{found.bytes_per_s / 1e6:,.0f} MB/s" if found.bytes_per_s else ""
        table.add_row(found.check, escape(found.between), _result(not found.error), latency, bandwidth)
    show(table, console)
    for finding in verdict.findings:
        if not finding.ok:
            console.print(f"\n[red]node {escape(finding.where)}[/]: {escape(finding.text)}", soft_wrap=True)
    for found in verdict.measured:
        if found.error:
            console.print(f"\n[red]{found.check} {escape(found.between)}[/]: {escape(found.error)}", soft_wrap=True)
            advice = _UNTRIED if found.untried else _ADVICE[found.check]
            console.print(f"  check: {advice}", soft_wrap=True)
    failed = sum(not finding.ok for finding in verdict.findings) + sum(bool(found.error) for found in verdict.measured)
    total = len(verdict.findings) + len(verdict.measured)
    console.print(f"\n{failed} of {total} checks failed" if failed else f"\nall {total} checks passed")


def _result(ok: bool) -> str:
    return "[green]ok[/]" if ok else "[red]FAILED[/]"
