"""A benchmark's results: the tables, the same in the terminal, Markdown and the HTML page, and all data as JSON."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console

from coordinator.policy.timeline import SPANS
from launch.bench.stats import RequestRecord, RunStatistics, interval, statistics
from launch.console import versions
from launch.tables import make_table, show
from sim.stats import Slo, Summary, summarize

_TIMES = (
    ("TTFT", "ttft", "first text - sent"),
    ("TPOT", "tpot", "(last - first) / (n - 1)"),
    ("ITL", "itl", "gap between texts"),
    ("E2E", "e2e", "end - sent"),
)
_HEADINGS = ("p50", "p95", "p99", "max", "samples")
_SWEEP = ("requests/s", "goodput", "within", "met", "TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95", "failed")
_REVISIONS = ("revision", "requests", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99")
_NOTE = "n: output tokens by the server's own count (usage); percentiles are linear between the nearest ranks"
PACKAGES = ("baton-serve", "aiohttp")
"""The client's packages whose versions a report lists."""
COMPARED: tuple[tuple[str, Callable[[RunStatistics], float], str], ...] = (
    ("TTFT p50 ms", lambda s: s.ttft.p50 * 1e3, "{:.2f}"),
    ("TTFT p99 ms", lambda s: s.ttft.p99 * 1e3, "{:.2f}"),
    ("TPOT p50 ms", lambda s: s.tpot.p50 * 1e3, "{:.2f}"),
    ("ITL p99 ms", lambda s: s.itl.p99 * 1e3, "{:.2f}"),
    ("output tokens/s", lambda s: s.output_tokens_per_s, "{:.1f}"),
    ("requests/s", lambda s: s.requests_per_s, "{:.2f}"),
)


@dataclass
class Run:
    """One measurement of one server. `rate` is that of random arrivals, 0.0 in a closed loop or with a trace."""

    base: str
    records: list[RequestRecord]
    rate: float = 0.0


@dataclass
class Report:
    """All runs of one command. `best_rate` is the result of a sweep, None without one."""

    settings: dict[str, Any]
    slo: Slo | None = None
    runs: list[Run] = field(default_factory=list)
    best_rate: float | None = None

    @property
    def servers(self) -> list[str]:
        """The servers in the order of the command line."""
        return list(dict.fromkeys(run.base for run in self.runs))

    def records(self, base: str) -> list[RequestRecord]:
        return [record for run in self.runs if run.base == base for record in run.records]

    def each(self, base: str) -> list[RunStatistics]:
        """Returns the statistics of each run of a server."""
        return [statistics(run.records, self.slo) for run in self.runs if run.base == base]

    def whole(self, base: str) -> RunStatistics:
        """Returns the statistics of all runs of a server. Rates are over the sum of the runs' durations, without the
        time between."""
        return statistics(self.records(base), self.slo, sum(one.duration_s for one in self.each(base)))

    def by_rate(self) -> list[tuple[float, RunStatistics]]:
        """Returns the runs of a sweep, by ascending rate."""
        return sorted(((run.rate, statistics(run.records, self.slo)) for run in self.runs), key=lambda run: run[0])


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of a name and numbers, and `notes` below them. The last column is text if `has_text`."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    has_text: bool = False


def tables(report: Report) -> list[Table]:
    """Returns the result of a sweep; or the times of each server, their stages, and how runs and servers compare."""
    if report.best_rate is not None:
        return [Table("", _SWEEP, _sweep_rows(report), (best(report), "times in ms"))]
    sections = []
    for base in report.servers:
        stats = report.whole(base)
        title = base if len(report.servers) > 1 else ""
        rows = [(name, *_numbers(getattr(stats, key)), formula) for name, key, formula in _TIMES]
        sections.append(Table(title, ("ms", *_HEADINGS, "formula"), rows, (*_totals(stats, report.slo), _NOTE), True))
        if stats.stages:
            stages = [(name, *_numbers(summary)) for name, summary in stage_times(report, base).items()]
            sections.append(Table("", ("in the server", *_HEADINGS), stages))
        if len(revisions := by_revision(report, base)) > 1:
            sections.append(Table("", _REVISIONS, [_revision_row(*each) for each in revisions.items()]))
    if len(report.runs) > 1:
        names = tuple(report.servers)
        headings = ("mean ± 95 %", *names, *(("second / first",) if len(names) > 1 else ()))
        sections.append(Table("", headings, _compared(report)))
    return sections


def stage_times(report: Report, base: str) -> dict[str, Summary]:
    """Returns the times of each stage of the server's own timeline, and of the rest of a request (network, parsing) as
    `outside`."""
    stages = report.whole(base).stages
    order = [name for name in SPANS if name in stages]
    traced = [record for record in report.records(base) if record.stages and record.error is None]
    outside = summarize(record.e2e_s - sum(record.stages.values()) for record in traced)
    return {name: stages[name] for name in dict.fromkeys((*order, *stages))} | {"outside": outside}


def by_revision(report: Report, base: str) -> dict[str, RunStatistics]:
    """Returns the statistics of the requests of each revision that the server named; failed ones name none."""
    records = [record for record in report.records(base) if record.stages]
    names = sorted({record.revision for record in records})
    return {name: statistics([r for r in records if r.revision == name], report.slo) for name in names}


def _revision_row(name: str, stats: RunStatistics) -> tuple[str, ...]:
    times = (stats.ttft.p50, stats.ttft.p99, stats.tpot.p50, stats.tpot.p99)
    return (name or "-", str(stats.requests), *(f"{seconds * 1e3:.2f}" for seconds in times))


def best(report: Report) -> str:
    """Returns the result of a sweep in one sentence."""
    share = 0.9 if report.slo is None else report.slo.share
    kept = f"at which {share:.0%} of the requests meet {report.slo}"
    if not report.best_rate:
        return f"no rate was found {kept}"
    return f"{report.best_rate:.3g} requests/s: the highest rate {kept}"


def _totals(stats: RunStatistics, slo: Slo | None) -> list[str]:
    """Returns the numbers that are not distributions."""
    good = stats.requests - stats.failed
    lines = [
        f"requests: {good} of {stats.requests} succeeded in {stats.duration_s:.2f} s",
        f"output: {stats.output_tokens_per_s:.1f} tokens/s ({stats.output_tokens} tokens)",
        f"prompt: {stats.prompt_tokens_per_s:.1f} tokens/s ({stats.prompt_tokens} tokens{_cached(stats)})",
        f"rate: {stats.requests_per_s:.2f} requests/s",
    ]
    if slo is not None:
        kept = f"{stats.met} of {stats.requests} within {slo}"
        lines.append(f"goodput: {stats.goodput_per_s:.2f} requests/s ({stats.met_share:.1%}: {kept})")
    if stats.uncounted:
        lines.append(f"no usage: {stats.uncounted} responses; their tokens are counted by events")
    return lines + [f"failed: {count} x {error}" for error, count in stats.errors.items()]


def _cached(stats: RunStatistics) -> str:
    if stats.cached_tokens is None:
        return ""
    share = stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
    return f", {stats.cached_tokens} of them ({share:.1%}) from the server's prefix cache"


def _sweep_rows(report: Report) -> list[tuple[str, ...]]:
    """Returns one row per rate, ascending."""
    rows = []
    for rate, stats in report.by_rate():
        times = (f"{value * 1e3:.1f}" for value in (stats.ttft.p50, stats.ttft.p95, stats.tpot.p50, stats.tpot.p95))
        kept = report.slo is not None and stats.met_share >= report.slo.share
        rates = f"{rate:.3g}", f"{stats.goodput_per_s:.2f}", f"{stats.met_share:.0%}", "yes" if kept else "no"
        rows.append((*rates, *times, str(stats.failed)))
    return rows


def _compared(report: Report) -> list[tuple[str, ...]]:
    """Returns the mean of each number over the runs of each server with its 95 % interval, and for two servers the
    ratio: the geometric mean over pairs of consecutive runs."""
    servers = [report.each(base) for base in report.servers]
    rows = []
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
        rows.append(tuple(row))
    return rows


def print_report(report: Report, console: Console) -> None:
    """Prints the report; `console` must have markup off."""
    for table in tables(report):
        if table.title:
            console.print(table.title, style="bold")
        drawn = make_table(table.headings, right=table.headings[1 : -1 if table.has_text else None])
        for row in table.rows:
            drawn.add_row(*row)
        show(drawn, console)
        for note in table.notes:
            console.print(f"  {note}", style="red" if note.startswith("failed: ") else "default")


def as_markdown(report: Report) -> str:
    lines: list[str] = []
    for table in tables(report):
        lines += [f"{table.title}:", ""] if table.title else []
        lines += [f"| {' | '.join(table.headings)} |", "|" + "---|" * len(table.headings)]
        lines += [f"| {' | '.join(row)} |" for row in table.rows]
        lines += ["", *(f"- {note}" for note in table.notes), ""]
    lines += [f"- machine: {machine_line()}", f"- date: {_date()}"]
    lines += ["- settings: " + ", ".join(f"{key} {value}" for key, value in report.settings.items())]
    return "\n".join(lines) + "\n"


def as_json(report: Report) -> dict[str, Any]:
    """Returns all data, with times in seconds. `per_request` holds the data behind all statistics; `statistics` at the
    top level covers all runs of the first server."""
    first = report.servers[0] if report.servers else ""
    return {
        "settings": report.settings,
        "machine": _machine(),
        "versions": versions(*PACKAGES),
        "date": _date(),
        "formulas": {name: formula for name, _, formula in _TIMES},
        "percentile": "linear between the nearest ranks, at position p/100 (m - 1)",
        "statistics": asdict(report.whole(first)),
        "best_rate": report.best_rate,
        "runs": [
            {"server": run.base, "rate": run.rate, "statistics": asdict(statistics(run.records, report.slo))}
            for run in report.runs
        ],
        "per_request": [_request(number, record) for number, run in enumerate(report.runs) for record in run.records],
    }


def _request(run: int, record: RequestRecord) -> dict[str, Any]:
    return {
        "run": run,
        "error": record.error,
        "ttft_s": record.ttft_s,
        "tpot_s": record.tpot_s,
        "e2e_s": record.e2e_s if record.error is None else None,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "gaps_s": [round(gap, 6) for gap in record.gaps_s],
        "stages_s": {name: round(seconds, 6) for name, seconds in record.stages.items()},
        "revision": record.revision,
    }


def _numbers(summary: Summary) -> tuple[str, ...]:
    if not summary.count:
        return ("-", "-", "-", "-", "0")
    values = (summary.p50, summary.p95, summary.p99, summary.max)
    return (*(f"{value * 1000:.2f}" for value in values), str(summary.count))


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
