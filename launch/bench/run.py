"""Executes the options of `baton bench`: one run, several, two servers alternately, or a search for a rate."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from baton.core.errors import StartupError
from baton.runtime.paths import write_text
from baton.runtime.status import printable
from launch.bench.client import ServerTarget, base_url, first_model, run_load, server_version, supports_timeline
from launch.bench.html import as_html
from launch.bench.load import LoadPlan, Session
from launch.bench.report import Report, Run, as_json, as_markdown, print_report
from launch.bench.stats import RequestRecord, statistics
from launch.console import shown_command
from sim.stats import Slo

SWEEP_S = 20.0
MOST_STEPS = 16
PRECISION = 0.1
ENOUGH_ALONE = 5
_RENDER: dict[str, Callable[[Report], str]] = {
    "json": lambda report: orjson.dumps(as_json(report), option=orjson.OPT_INDENT_2).decode() + "\n",
    "markdown": as_markdown,
    "html": as_html,
}


@dataclass(frozen=True)
class BenchOptions:
    """The command line, except for the servers. `concurrency` is the number of clients, 0 in an open loop; `requests`
    that of each of `repeats` runs, after `warmup` others; `sweep_from` is the first rate of a search, 0.0: none."""

    load: LoadPlan
    concurrency: int
    requests: int
    warmup: int
    repeats: int
    slo: Slo | None
    sweep_from: float


def bench(servers: Sequence[tuple[str, str, str, float]], options: BenchOptions, files: Mapping[str, Path]) -> int:
    """Measures each of `servers` (URL, model, API key, timeout in seconds), prints the report and writes it to `files`
    (by "json", "markdown" or "html"). Returns 1 when every request failed, else 0.

    Raises:
        StartupError: a server does not reply, or a file cannot be written.
    """
    targets = [find_target(*server) for server in servers]
    try:
        for path in files.values():
            if not path.is_fifo():  # its reader would take the end of this for the end of the report
                path.open("ab").close()  # fails before the measurement and not after it
    except OSError as error:
        raise StartupError(f"the report could not be written: {error}") from None
    report = Report(_settings(options, targets), options.slo)
    if options.slo and options.sweep_from:
        _sweep(targets[0], options, options.slo, report)
    else:
        for number in range(options.repeats):
            # A B A B: drift of the machine affects both.
            for target in targets:
                report.runs.append(_run(target, options, number))
    try:
        for kind, path in files.items():
            write_text(path, _RENDER[kind](report))
    except OSError as error:
        raise StartupError(f"the report could not be written: {error}") from None
    console = Console(markup=False, emoji=False, highlight=False)  # server texts are shown verbatim
    console.print("  ".join(f"{key} {value}" for key, value in report.settings.items()), style="dim")
    print_report(report, console)
    return int(all(record.error is not None for run in report.runs for record in run.records))


def find_target(url: str, model: str, api_key: str, timeout_s: float) -> ServerTarget:
    """Returns a server that replies, with its first model by default. Raises StartupError if it does not."""
    try:
        base = base_url(url)
        model = model or first_model(base, api_key)
    except ValueError as error:
        raise StartupError(str(error)) from None
    except OSError as error:
        raise StartupError(f"the server cannot be queried: {error}") from None
    extra = {"return_timeline": True} if supports_timeline(base, api_key) else {}
    return ServerTarget(base, model, api_key, timeout_s, extra)


def _settings(options: BenchOptions, targets: list[ServerTarget]) -> dict[str, Any]:
    """Returns the settings of the measurement, for every report."""
    load, slo = options.load, options.slo
    loop = "sweep" if options.sweep_from else "open loop" if load.is_open else "closed loop"
    settings: dict[str, Any] = {
        "server": targets[0].base,
        "model": printable(targets[0].model, 200),
        "loop": loop,
        "version": server_version(targets[0].base, targets[0].api_key),
        "against": targets[1].base if len(targets) > 1 else "",
        "concurrency": options.concurrency if loop == "closed loop" else None,
        "rate": load.rate or None,
        "trace_rows": len(load.trace) or None,
        "scale": load.scale if load.trace else None,
        "prompts": load.workload,
        "turns": load.turns if load.workload == "turns" else None,
        "shared_len": load.shared_len if load.workload == "turns" else None,
        "input_len": "" if load.trace else str(load.input_len),
        "output_len": "" if load.trace else str(load.output_len),
        "slo": str(slo or ""),
        "slo_share": slo.share if slo else None,
        "requests": None if loop == "sweep" else options.requests,
        "warmup": options.warmup,
        "repeats": options.repeats,
        "seed": load.seed,
        "command": shown_command(),
    }
    return {name: value for name, value in settings.items() if value not in ("", None)}


def _run(target: ServerTarget, options: BenchOptions, number: int, label: str = "measuring") -> Run:
    """Executes run `number`. Each run has its own requests, so that none hits a cache that another run filled."""
    # A session has at least one request, so a run has at most as many sessions as requests.
    first = number * (options.warmup + options.requests)
    warm = replace(options.load, rate=0.0, trace=())
    warmup = warm.sessions(first + options.requests, options.warmup)
    measured = options.load.sessions(first, options.requests)
    return Run(target.base, asyncio.run(_measure(target, options, warmup, measured, label)), options.load.rate)


async def _measure(
    target: ServerTarget, options: BenchOptions, warmup: Iterable[Session], measured: Iterable[Session], label: str
) -> list[RequestRecord]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[failed]}"),
    )
    # Two refreshes per second: the bar must not take processor time from the measurement.
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as bar:
        warming = bar.add_task("warm-up", total=options.warmup, failed="", visible=options.warmup > 0)
        await run_load(target, warmup, max(1, options.concurrency or 8), lambda record: bar.advance(warming))
        running = bar.add_task(label, total=options.requests, failed="")
        failures = 0

        def done(record: RequestRecord) -> None:
            nonlocal failures
            failures += record.error is not None
            bar.update(running, advance=1, failed=f"[red]{failures} failed" if failures else "")

        return await run_load(target, measured, options.concurrency, done)


@dataclass(slots=True)
class Search:
    """Searches for the highest rate of an open loop at which a server meets its limits. Pure: rates out, verdicts in.

    From `first` on the rate is doubled while the limits are met (halved while they are not). Then the interval between
    the highest rate that met them and the lowest that did not is bisected on a logarithmic scale, until it is less than
    PRECISION. `kept` and `missed` are the rates tried so far, in requests per second.
    """

    first: float
    kept: list[float] = field(default_factory=list)
    missed: list[float] = field(default_factory=list)

    def next(self) -> float | None:
        """Returns the rate to try next; None when the search is over."""
        if len(self.kept) + len(self.missed) >= MOST_STEPS:
            return None
        if not self.kept and not self.missed:
            return self.first
        if not self.missed:
            return max(self.kept) * 2
        if not self.kept:
            lowest = min(self.missed) / 2
            return lowest if lowest > self.first / 1000 else None
        low, high = max(self.kept), min(self.missed)
        return math.sqrt(low * high) if high / low > 1 + PRECISION else None

    def tried(self, rate: float, *, kept: bool) -> None:
        """Records a verdict. A missed rate also discards the kept rates above it: measurements are noisy."""
        if kept:
            self.kept.append(rate)
        else:
            self.missed.append(rate)
            self.kept = [each for each in self.kept if each < rate]

    @property
    def best(self) -> float:
        """The highest rate that was kept; 0.0 if none was."""
        return max(self.kept, default=0.0)


def _sweep(target: ServerTarget, options: BenchOptions, slo: Slo, report: Report) -> None:
    """Measures about SWEEP_S seconds at each rate that the search proposes, and adds the runs to the report."""
    search = Search(options.sweep_from)
    while (rate := search.next()) is not None:
        load = replace(options.load, rate=rate, seed=options.load.seed + len(report.runs))
        count, warmup = max(20, round(rate * SWEEP_S)), 0 if report.runs else options.warmup
        step = replace(options, load=load, concurrency=0, requests=count, warmup=warmup)
        run = _run(target, step, 0, f"{rate:.3g} requests/s")
        report.runs.append(run)
        search.tried(rate, kept=statistics(run.records, slo).met_share >= slo.share)
        if not search.kept and hopeless(run.records, slo):
            break
    report.best_rate = search.best


def hopeless(records: Sequence[RequestRecord], slo: Slo) -> bool:
    """Whether no lower rate can meet the limits: every request was refused, or most of those that ran alone missed
    them. Pure."""
    if all(record.error is not None and not record.timed_out for record in records):
        return True
    ordered = sorted(records, key=lambda record: record.sent)
    met, busy_until = list[bool](), -math.inf
    for record, next_sent in zip(ordered, [*(record.sent for record in ordered[1:]), math.inf], strict=True):
        ended = math.inf if record.timed_out else max(record.sent, record.ended)
        if record.error is None and busy_until <= record.sent and ended <= next_sent:
            met.append(slo.met(record.ttft_s, record.tpot_s))
        busy_until = max(busy_until, ended)
    return len(met) >= ENOUGH_ALONE and sum(met) < len(met) / 2
