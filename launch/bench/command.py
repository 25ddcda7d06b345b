"""`baton bench`: the options, and what they come to: one run, several, two servers in turns, or a search for a rate."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from baton.core.errors import StartupError
from baton.options import NumberRange
from baton.rpc.status import printable
from launch.bench.load import WORKLOADS, Lengths, Load, Workload, parse_lengths, read_trace
from launch.bench.stats import Slo, parse_slo

if TYPE_CHECKING:
    from launch.bench.client import Target
    from launch.bench.report import Report, Run
    from launch.bench.stats import Record

SWEEP_S = 20.0
DEFAULT_REPEATS = 3


class _LengthsType(click.ParamType[Lengths]):
    name = "N|LO-HI"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Lengths:
        if isinstance(value, Lengths):
            return value
        try:
            return parse_lengths(value)
        except ValueError:
            self.fail(f"{value!r} is neither a length nor a range such as 128-1024", param, ctx)


class _SloType(click.ParamType[Slo]):
    name = "ttft=S,tpot=S"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Slo:
        if isinstance(value, Slo):
            return value
        try:
            return parse_slo(value)
        except ValueError as error:
            self.fail(f"{value!r}: {error}; write ttft=0.5,tpot=50ms", param, ctx)


_LENGTHS = _LengthsType()
_FILE = click.Path(dir_okay=False, writable=True)


@dataclass(frozen=True)
class Options:
    """What the command line said, but for the server."""

    concurrency: int
    requests: int
    warmup: int
    repeats: int
    slo: Slo | None
    load: Load


@click.command("bench")
@click.argument("url", default="http://127.0.0.1:8100")
@click.option("--model", default="", help="Model to ask for; default the first of /v1/models.")
@click.option("--concurrency", type=click.IntRange(1), default=8, show_default=True, help="Clients in a closed loop.")
@click.option("--requests", type=click.IntRange(1), default=None, help="How many; default 8 per client.")
@click.option("--input-len", type=_LENGTHS, default="512", show_default=True, help="Prompt length.")
@click.option("--output-len", type=_LENGTHS, default="64", show_default=True, help="Output tokens.")
@click.option(
    "--prompts",
    type=click.Choice(WORKLOADS),
    default="tokens",
    show_default=True,
    help="Token ids; words (lengths then count words); conversations of --turns; calls of a tool; answers to a schema.",
)
@click.option("--turns", type=click.IntRange(1, 100), default=4, show_default=True, help="Requests of a conversation.")
@click.option("--shared-len", type=click.IntRange(0), default=0, help="Tokens that all conversations begin with.")
@click.option("--token-ids", type=_LENGTHS, default="300-3999", show_default=True, help="Ids that prompts are made of.")
@click.option("--rate", type=NumberRange(1e-6), default=None, help="Open loop: so many requests a second, at random.")
@click.option(
    "--trace", "trace_path", type=click.Path(exists=True, dir_okay=False), help="Open loop: a recorded trace."
)
@click.option(
    "--scale", type=NumberRange(1e-6), default=1.0, show_default=True, help="The trace so many times as fast."
)
@click.option("--slo", type=_SloType(), default=None, help="Limits of a good request; goodput counts those.")
@click.option(
    "--slo-share", type=NumberRange(0.01, 1.0), default=0.9, show_default=True, help="Part of them that has to be good."
)
@click.option("--sweep", is_flag=True, help="Search for the highest rate that keeps to --slo, from --rate or 1 on.")
@click.option("--against", default="", metavar="URL", help="A second server, measured in turns with the first.")
@click.option("--repeats", type=click.IntRange(1, 100), default=None, help="Runs; default 1, with --against 3 of each.")
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same requests.")
@click.option("--warmup", type=click.IntRange(0), default=None, help="Uncounted requests before; default 1 per client.")
@click.option(
    "--timeout-s", type=NumberRange(0.1), default=600.0, show_default=True, help="Longest a request may take."
)
@click.option("--api-key", default="", envvar="OPENAI_API_KEY", help="Sent as a bearer token.")
@click.option("--json", "json_path", type=_FILE, help="Write everything as JSON.")
@click.option("--markdown", "markdown_path", type=_FILE, help="Write the table.")
@click.option("--html", "html_path", type=_FILE, help="Write a page with plots.")
def bench_command(
    url: str,
    model: str,
    concurrency: int,
    requests: int | None,
    input_len: Lengths,
    output_len: Lengths,
    prompts: Workload,
    turns: int,
    shared_len: int,
    token_ids: Lengths,
    rate: float | None,
    trace_path: str | None,
    scale: float,
    slo: Slo | None,
    slo_share: float,
    sweep: bool,
    against: str,
    repeats: int | None,
    seed: int,
    warmup: int | None,
    timeout_s: float,
    api_key: str,
    json_path: str | None,
    markdown_path: str | None,
    html_path: str | None,
) -> int:
    """Measure TTFT, TPOT, ITL and throughput of any OpenAI-compatible server at URL."""
    from launch.bench.report import Report

    if min(input_len.low, output_len.low) < 1:
        raise StartupError("--input-len and --output-len must be at least 1")
    if sweep and (slo is None or against or trace_path):
        raise StartupError("--sweep needs --slo, and goes neither with --against nor with --trace")
    if rate and trace_path:
        raise StartupError("--rate and --trace both say when requests are due; give one of them")
    try:
        trace = read_trace(Path(trace_path)) if trace_path else ()
    except (OSError, ValueError) as error:
        raise StartupError(f"--trace {trace_path}: {error}") from None
    load = Load(
        seed, input_len, output_len, prompts, token_ids, turns if prompts == "turns" else 1, shared_len,
        0.0 if sweep else rate or 0.0, trace, scale,
    )  # fmt: skip
    clients = 0 if load.is_open else concurrency
    default = len(trace) if trace else 8 * concurrency
    options = Options(
        concurrency=clients,
        requests=default if requests is None else requests,
        warmup=concurrency if warmup is None else warmup,
        repeats=repeats or (DEFAULT_REPEATS if against else 1),
        slo=None if slo is None else replace(slo, share=slo_share),
        load=load,
    )
    targets = [_target(each, model, api_key, timeout_s) for each in (url, against) if each]
    for path in filter(None, (json_path, markdown_path, html_path)):
        _check_writable(Path(path))
    settings = _settings(options, targets, "sweep" if sweep else "open loop" if load.is_open else "closed loop")
    report = Report(settings, options.slo)
    if sweep:
        _sweep(targets[0], options, rate or 1.0, report)
    else:
        for number in range(options.repeats):
            # A B A B: what drifts on the machine meets both.
            for target in targets:
                report.runs.append(_run(target, options, number))
    return _write(report, json_path, markdown_path, html_path)


def _target(url: str, model: str, api_key: str, timeout_s: float) -> Target:
    from launch.bench.client import Target, base_url, first_model, speaks_baton

    try:
        base = base_url(url)
        model = model or first_model(base, api_key)
    except ValueError as error:
        raise StartupError(str(error)) from None
    except OSError as error:
        raise StartupError(f"no server answers: {error}") from None
    extra = {"return_timeline": True} if speaks_baton(base, api_key) else {}
    return Target(base, model, api_key, timeout_s, extra)


def _settings(options: Options, targets: list[Target], loop: str) -> dict[str, Any]:
    from launch.bench.client import server_version

    load = options.load
    named = {"server": targets[0].base, "model": printable(targets[0].model, 200), "loop": loop}
    if version := server_version(targets[0].base, targets[0].api_key):
        named["version"] = version
    if len(targets) > 1:
        named |= {"against": targets[1].base}
    lengths = {} if load.trace else {"input_len": str(load.input_len), "output_len": str(load.output_len)}
    when = (
        {"rate": load.rate} if load.rate else {"trace_rows": len(load.trace), "scale": load.scale} if load.trace else {}
    )
    clients = {"concurrency": options.concurrency} if loop == "closed loop" else {}
    slo = {"slo": str(options.slo), "slo_share": options.slo.share} if options.slo else {}
    turns = {"turns": load.turns, "shared_len": load.shared_len} if load.workload == "turns" else {}
    count = {} if loop == "sweep" else {"requests": options.requests}
    rest = {**count, "warmup": options.warmup, "repeats": options.repeats, "seed": load.seed}
    command = {"command": shlex.join(["baton", *_without_secrets(sys.argv[1:])])}
    return {**named, **clients, **when, "prompts": load.workload, **turns, **lengths, **slo, **rest, **command}


def _without_secrets(words: list[str]) -> list[str]:
    """The command line without the API key."""
    shown = list(words)
    for number, word in enumerate(shown):
        if word.startswith("--api-key="):
            shown[number] = "--api-key=..."
        elif number and shown[number - 1] == "--api-key":
            shown[number] = "..."
    return shown


def _run(target: Target, options: Options, number: int, label: str = "measuring") -> Run:
    """Run `number`; each has requests of its own, so that none finds what another left in a cache."""
    import asyncio

    from launch.bench.report import Run

    # A conversation counts once for all of its requests: sessions of a run are fewer than its requests.
    first = number * (options.warmup + options.requests)
    warm = replace(options.load, rate=0.0, trace=())
    sessions = warm.sessions(first + options.requests, options.warmup), options.load.sessions(first, options.requests)
    records = asyncio.run(_measure(target, options, sessions, label))
    return Run(target.base, records, rate=options.load.rate)


async def _measure(target: Target, options: Options, sessions: Any, label: str) -> list[Record]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from launch.bench.client import run_load

    warmup, measured = sessions
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Two refreshes a second: the bar must not take the processor from what is measured.
    with Progress(
        *columns, TextColumn("{task.fields[failed]}"), console=Console(stderr=True), refresh_per_second=2
    ) as bar:
        warming = bar.add_task("warm-up", total=options.warmup, failed="", visible=options.warmup > 0)
        await run_load(target, warmup, max(1, options.concurrency or 8), lambda record: bar.advance(warming))
        running = bar.add_task(label, total=options.requests, failed="")
        failures = 0

        def done(record: Record) -> None:
            nonlocal failures
            failures += record.error is not None
            bar.update(running, advance=1, failed=f"[red]{failures} failed" if failures else "")

        return await run_load(target, measured, options.concurrency, done)


def _sweep(target: Target, options: Options, first: float, report: Report) -> None:
    """Runs of SWEEP_S each at rising rates, kept in the report."""
    from launch.bench.stats import statistics
    from launch.bench.sweep import Search

    if options.slo is None:
        raise StartupError("--sweep needs --slo")
    search, number = Search(first), 0
    while (rate := search.next()) is not None:
        count = max(20, round(rate * SWEEP_S))
        load = replace(options.load, rate=rate, seed=options.load.seed + number)
        step = replace(options, requests=count, warmup=options.warmup if number == 0 else 0, load=load, concurrency=0)
        run = _run(target, step, 0, f"{rate:.3g} requests/s")
        report.runs.append(run)
        search.tried(rate, kept=statistics(run.records, options.slo).met_share >= options.slo.share)
        if not search.kept and all(record.error is not None and not record.timed_out for record in run.records):
            break  # a lower rate is no use where all is refused
        number += 1
    report.best_rate = search.best


def _check_writable(path: Path) -> None:
    """Before the measurement, which would be lost. Raises StartupError."""
    try:
        path.open("ab").close()
    except OSError as error:
        raise StartupError(f"the report could not be written: {error}") from None


def _write(report: Report, json_path: str | None, markdown_path: str | None, html_path: str | None) -> int:
    import orjson
    from rich.console import Console

    from launch.bench.html import as_html
    from launch.bench.report import as_json, as_markdown, print_report

    try:
        if json_path:
            Path(json_path).write_bytes(orjson.dumps(as_json(report), option=orjson.OPT_INDENT_2) + b"\n")
        if markdown_path:
            Path(markdown_path).write_text(as_markdown(report), encoding="utf-8")
        if html_path:
            Path(html_path).write_text(as_html(report), encoding="utf-8")
    except OSError as error:
        raise StartupError(f"the report could not be written: {error}") from None
    console = Console(markup=False, emoji=False, highlight=False)  # texts of a server's are shown as they are
    console.print("  ".join(f"{key} {value}" for key, value in report.settings.items()), style="dim")
    print_report(report, console)
    records = [record for run in report.runs for record in run.records]
    return 1 if all(record.error is not None for record in records) else 0
