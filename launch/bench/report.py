"""A benchmark's numbers as tables for the terminal, as Markdown, and as JSON."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console

from coordinator.policy.timeline import SPANS
from launch.bench.stats import Record, Slo, Statistics, Summary, interval, statistics, summarize
from launch.tables import make_table, show

_TIMES = (
    ("TTFT", "ttft", "first text - sent"),
    ("TPOT", "tpot", "(last - first) / (n - 1)"),
    ("ITL", "itl", "gap between texts"),
    ("E2E", "e2e", "end - sent"),
)
_HEADINGS = ("ms", "p50", "p95", "p99", "max", "samples", "formula")
COMPARED: tuple[tuple[str, Callable[[Statistics], float], str], ...] = (
    ("TTFT p50 ms", lambda s: s.ttft.p50 * 1e3, "{:.2f}"),
    ("TTFT p99 ms", lambda s: s.ttft.p99 * 1e3, "{:.2f}"),
    ("TPOT p50 ms", lambda s: s.tpot.p50 * 1e3, "{:.2f}"),
    ("ITL p99 ms", lambda s: s.itl.p99 * 1e3, "{:.2f}"),
    ("output tokens/s", lambda s: s.output_tokens_per_s, "{:.1f}"),
    ("requests/s", lambda s: s.requests_per_s, "{:.2f}"),
)


@dataclass
class Run:
    """One measurement of one server; `rate` of an open loop, 0.0 of a closed one."""

    base: str
    records: list[Record]
    rate: float = 0.0


@dataclass
class Report:
    """All runs of one command. `best_rate` is what a sweep has found, None without one."""

    settings: dict[str, Any]
    slo: Slo | None = None
    runs: list[Run] = field(default_factory=list)
    best_rate: float | None = None

    @property
    def servers(self) -> list[str]:
        """By the order of the command line."""
        return list(dict.fromkeys(run.base for run in self.runs))

    def records(self, base: str) -> list[Record]:
        return [record for run in self.runs if run.base == base for record in run.records]

    def each(self, base: str) -> list[Statistics]:
        """Of each run of a server."""
        return [statistics(run.records, self.slo) for run in self.runs if run.base == base]

    def whole(self, base: str) -> Statistics:
        """Of all runs of a server together; rates are means over the runs, since there is time between them."""
        whole, each = statistics(self.records(base), self.slo), self.each(base)
        return Statistics(**{**_fields(whole), "duration_s": sum(one.duration_s for one in each)})


def _fields(stats: Statistics) -> dict[str, Any]:
    return {name: getattr(stats, name) for name in Statistics.__dataclass_fields__}


def rows(stats: Statistics) -> list[tuple[str, ...]]:
    """One row per kind of time, in milliseconds."""
    return [(name, *_numbers(getattr(stats, key)), formula) for name, key, formula in _TIMES]


def stage_rows(stats: Statistics) -> list[tuple[str, ...]]:
    """One row per part of the server's own timeline, and what the client saw besides."""
    order = {name: number for number, name in enumerate(SPANS)}
    found = sorted(stats.stages.items(), key=lambda item: order.get(item[0], len(order)))
    return [(name, *_numbers(summary)) for name, summary in found]


def outside(records: Iterable[Record]) -> Summary:
    """What of a request's time is not in the server's timeline: the way there and back, and parsing."""
    return summarize(r.e2e_s - sum(r.stages.values()) for r in records if r.stages and r.error is None)


def totals(stats: Statistics, slo: Slo | None = None) -> list[tuple[str, str]]:
    """What is not a distribution."""
    good = stats.requests - stats.failed
    lines = [
        ("requests", f"{good} of {stats.requests} succeeded in {stats.duration_s:.2f} s"),
        ("output", f"{stats.output_tokens_per_s:.1f} tokens/s ({stats.output_tokens} tokens)"),
        ("prompt", f"{stats.prompt_tokens_per_s:.1f} tokens/s ({stats.prompt_tokens} tokens)"),
        ("rate", f"{stats.requests_per_s:.2f} requests/s"),
    ]
    if slo is not None:
        kept = f"{stats.met} of {stats.requests} within {slo}"
        lines.append(("goodput", f"{stats.goodput_per_s:.2f} requests/s ({stats.met_share:.1%}: {kept})"))
    if stats.uncounted:
        lines.append(("no usage", f"{stats.uncounted} answers; their tokens are counted by events"))
    return lines + [("failed", f"{count} x {error}") for error, count in stats.errors.items()]


def sweep_rows(report: Report) -> list[tuple[str, ...]]:
    """One row per rate, rising."""
    found = []
    for run in sorted(report.runs, key=lambda run: run.rate):
        stats = statistics(run.records, report.slo)
        times = (f"{value * 1e3:.1f}" for value in (stats.ttft.p50, stats.ttft.p95, stats.tpot.p50, stats.tpot.p95))
        kept = report.slo is not None and stats.met_share >= report.slo.share
        rates = f"{run.rate:.3g}", f"{stats.goodput_per_s:.2f}", f"{stats.met_share:.0%}", "yes" if kept else "no"
        found.append((*rates, *times, str(stats.failed)))
    return found


SWEEP_HEADINGS = ("requests/s", "goodput", "within", "kept", "TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95", "failed")


def compared(report: Report) -> list[tuple[str, ...]]:
    """Of each number its mean over the runs of each server with its 95 % interval, and of two servers the ratio: the
    geometric mean over pairs of runs that followed each other."""
    servers = [report.each(base) for base in report.servers]
    found = []
    for name, value, form in COMPARED:
        row = [name]
        for each in servers:
            mean, half = interval([value(stats) for stats in each])
            row.append(form.format(mean) + (f" ± {form.format(half)}" if len(each) > 1 else ""))
        if len(servers) > 1:
            pairs = [(value(a), value(b)) for a, b in zip(*servers, strict=False)]
            logs = [math.log(b / a) for a, b in pairs if a > 0 and b > 0]
            mean, half = interval(logs) if logs else (0.0, 0.0)
            low, high = math.exp(mean - half), math.exp(mean + half)
            row.append(f"{math.exp(mean):.3f} ({low:.3f} to {high:.3f})" if len(logs) > 1 else f"{math.exp(mean):.3f}")
        found.append(tuple(row))
    return found


def compared_headings(report: Report) -> tuple[str, ...]:
    names = tuple(report.servers)
    return ("mean ± 95 %", *names, *(("second / first",) if len(names) > 1 else ()))


def print_report(report: Report, console: Console) -> None:
    """On a console without markup."""
    if report.best_rate is not None:
        table = make_table(SWEEP_HEADINGS, right=SWEEP_HEADINGS, caption="times in ms")
        for row in sweep_rows(report):
            table.add_row(*row)
        show(table, console)
        console.print(f"  {best(report)}")
        return
    for base in report.servers:
        stats = report.whole(base)
        if len(report.servers) > 1:
            console.print(base, style="bold")
        note = "n: output tokens by the server's usage; percentiles linear between ranks"
        table = make_table(_HEADINGS, right=set(_HEADINGS) - {"ms", "formula"}, caption=note)
        for row in rows(stats):
            table.add_row(*row)
        show(table, console)
        if stats.stages:
            table = make_table(("in the server", *_HEADINGS[1:-1]), right=_HEADINGS[1:-1])
            for row in (*stage_rows(stats), ("outside", *_numbers(outside(report.records(base))))):
                table.add_row(*row)
            show(table, console)
        for name, text in totals(stats, report.slo):
            style = "red" if name == "failed" else "default"
            console.print(f"  {name:<9} {text}", style=style)
    if len(report.runs) > 1:
        headings = compared_headings(report)
        table = make_table(headings, right=headings[1:])
        for row in compared(report):
            table.add_row(*row)
        show(table, console)


def best(report: Report) -> str:
    """What a sweep has found, in a sentence."""
    share = 0.9 if report.slo is None else report.slo.share
    if not report.best_rate:
        return f"no rate was found at which {share:.0%} of the requests keep to {report.slo}"
    return (
        f"{report.best_rate:.3g} requests/s: the highest rate at which {share:.0%} of the requests keep to {report.slo}"
    )


def as_markdown(report: Report) -> str:
    lines: list[str] = []
    if report.best_rate is not None:
        lines += [*_markdown(SWEEP_HEADINGS, sweep_rows(report)), "", f"{best(report)}. Times in ms."]
    else:
        for base in report.servers:
            stats = report.whole(base)
            lines += [f"{base}:", ""] if len(report.servers) > 1 else []
            lines += _markdown(_HEADINGS, rows(stats))
            if stats.stages:
                lines += ["", *_markdown(("in the server", *_HEADINGS[1:-1]), stage_rows(stats))]
            lines += ["", *(f"- {name}: {text}" for name, text in totals(stats, report.slo)), ""]
        if len(report.runs) > 1:
            lines += [*_markdown(compared_headings(report), compared(report)), ""]
    lines += ["", f"- machine: {machine_line()}", f"- date: {_date()}"]
    lines += ["- settings: " + ", ".join(f"{key} {value}" for key, value in report.settings.items())]
    lines += ["", "n is the server's own count (usage); percentiles are linear between the nearest ranks."]
    return "\n".join(lines) + "\n"


def _markdown(headings: Sequence[str], cells: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings), *(f"| {' | '.join(row)} |" for row in cells)]


def as_json(report: Report) -> dict[str, Any]:
    """Times in seconds. `per_request` has everything the statistics were made from; those of the first server stand at
    the top, of all runs together."""
    first = report.servers[0] if report.servers else ""
    return {
        "settings": report.settings,
        "machine": _machine(),
        "versions": versions(),
        "date": _date(),
        "formulas": {name: formula for name, _, formula in _TIMES},
        "percentile": "linear between the nearest ranks, at position p/100 (m - 1)",
        "statistics": _statistics(report.whole(first)),
        "best_rate": report.best_rate,
        "runs": [
            {"server": run.base, "rate": run.rate, "statistics": _statistics(statistics(run.records, report.slo))}
            for run in report.runs
        ],
        "per_request": [_request(number, record) for number, run in enumerate(report.runs) for record in run.records],
    }


def _statistics(stats: Statistics) -> dict[str, Any]:
    rates = ("requests_per_s", "output_tokens_per_s", "prompt_tokens_per_s", "goodput_per_s", "met_share")
    return {**asdict(stats), **{rate: getattr(stats, rate) for rate in rates}}


def _request(run: int, record: Record) -> dict[str, Any]:
    return {
        "run": run,
        "error": record.error,
        "ttft_s": record.ttft_s,
        "tpot_s": record.tpot_s,
        "e2e_s": record.e2e_s if record.error is None else None,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "gaps_s": [round(gap, 6) for gap in record.gaps_s],
        "stages_s": {name: round(seconds, 6) for name, seconds in record.stages.items()},
    }


def _numbers(summary: Summary) -> tuple[str, ...]:
    if not summary.count:
        return ("-", "-", "-", "-", "0")
    values = (summary.p50, summary.p95, summary.p99, summary.max)
    return (*(f"{value * 1000:.2f}" for value in values), str(summary.count))


def versions() -> dict[str, str]:
    """Of the client's side."""
    found = {"python": platform.python_version()}
    for package in ("baton-serve", "aiohttp"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def machine_line() -> str:
    return f"{_cpu_name()}, {os.cpu_count()} cores, {platform.system()}"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _date() -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
