"""The options of `baton bench`."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from baton.core.errors import StartupError
from baton.runtime.options import NumberRange
from baton.runtime.paths import open_written
from launch.bench.load import WORKLOADS, LoadPlan
from sim.scale.workload import parse_lengths
from sim.stats import Slo, parse_slo
from sim.trace import MOST_ROWS, TRACES, TraceRow, read_trace, trace_path

DEFAULT_REPEATS = 3


class _Parsed(click.ParamType[Any]):
    """An option that `parse` converts; `form` is the expected form, for the error message."""

    def __init__(self, name: str, parse: Callable[[str], object], form: str) -> None:
        self.name, self._parse, self._form = name, parse, form

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(f"{value!r}: {error}; expected {self._form}", param, ctx)


LENGTHS = _Parsed("N|LO-HI", parse_lengths, "a length, or a range such as 128-1024")
SLO = _Parsed("ttft=S,tpot=S", parse_slo, "limits such as ttft=0.5,tpot=50ms")

_FILE = click.Path(dir_okay=False, writable=True)


def trace_rows(trace: str) -> tuple[TraceRow, ...]:
    """Reads the trace of --trace; says so on stderr if only its beginning was read. Raises StartupError."""
    try:
        rows = read_trace(trace_path(trace), open_written)
    except (OSError, ValueError) as error:
        raise StartupError(f"--trace {trace}: {error}") from None
    if len(rows) == MOST_ROWS:
        seconds = rows[-1].at_s - rows[0].at_s
        click.echo(f"--trace {trace}: only its first {MOST_ROWS} rows were read, {seconds:.0f} s", err=True)
    return rows


@click.command("bench")
@click.argument("url", default="http://127.0.0.1:8100")
@click.option("--model", default="", help="Model to request; default the first of /v1/models.")
@click.option("--concurrency", type=click.IntRange(1), default=8, show_default=True, help="Clients in a closed loop.")
@click.option("--requests", type=click.IntRange(1), default=None, help="Number of requests; default 8 per client.")
@click.option("--input-len", type=LENGTHS, default="512", show_default=True, help="Prompt length.")
@click.option("--output-len", type=LENGTHS, default="64", show_default=True, help="Output tokens.")
@click.option(
    "--prompts",
    "workload",
    type=click.Choice(WORKLOADS),
    default="tokens",
    show_default=True,
    help="Token ids; words (lengths count words); conversations of --turns; tool calls; JSON-schema output.",
)
@click.option("--turns", type=click.IntRange(1, 100), default=4, show_default=True, help="Requests per conversation.")
@click.option("--shared-len", type=click.IntRange(0), default=0, help="Tokens that all conversations begin with.")
@click.option("--token-ids", type=LENGTHS, default="300-3999", show_default=True, help="Ids that prompts are made of.")
@click.option("--rate", type=NumberRange(1e-6), default=None, help="Open loop: requests per second, Poisson arrivals.")
@click.option("--trace", default="", metavar="FILE", help=f"Open loop: a recorded trace; also {', '.join(TRACES)}.")
@click.option("--scale", type=NumberRange(1e-6), default=1.0, show_default=True, help="Speed-up factor of the trace.")
@click.option("--slo", type=SLO, default=None, help="Latency limits; goodput counts requests within.")
@click.option(
    "--slo-share",
    type=NumberRange(0.01, 1.0),
    default=0.9,
    show_default=True,
    help="Fraction of requests that must meet --slo.",
)
@click.option("--sweep", is_flag=True, help="Search for the highest rate that meets --slo, from --rate or 1 on.")
@click.option("--against", default="", metavar="URL", help="A second server; runs alternate between both.")
@click.option("--repeats", type=click.IntRange(1, 100), default=None, help="Runs; default 1, with --against 3 of each.")
@click.option("--seed", type=int, default=None, help="Same seed, same requests; default another one each time.")
@click.option("--warmup", type=click.IntRange(0), default=None, help="Uncounted first requests; default 1 per client.")
@click.option("--timeout-s", type=NumberRange(0.1), default=600.0, show_default=True, help="Time limit for a request.")
@click.option("--api-key", default="", envvar="OPENAI_API_KEY", help="Sent as a bearer token.")
@click.option("--json", "json_path", type=_FILE, help="Write all data as JSON.")
@click.option("--markdown", "markdown_path", type=_FILE, help="Write the tables as Markdown.")
@click.option("--html", "html_path", type=_FILE, help="Write an HTML page with plots.")
def bench_command(
    url: str,
    model: str,
    concurrency: int,
    requests: int | None,
    rate: float | None,
    trace: str,
    slo: Slo | None,
    slo_share: float,
    sweep: bool,
    against: str,
    repeats: int | None,
    warmup: int | None,
    timeout_s: float,
    api_key: str,
    seed: int | None,
    json_path: str | None,
    markdown_path: str | None,
    html_path: str | None,
    **work: Any,  # the options that are fields of LoadPlan
) -> int:
    """Measure TTFT, TPOT, ITL and throughput of any OpenAI-compatible server at URL."""
    from launch.bench.run import BenchOptions, bench

    if min(work["input_len"].low, work["output_len"].low) < 1:
        raise StartupError("--input-len and --output-len must be at least 1")
    if work["token_ids"].p95:
        raise StartupError("--token-ids must be an id, or a range such as 300-3999")
    if sweep and (slo is None or against or trace):
        raise StartupError("--sweep needs --slo, and cannot be combined with --against or --trace")
    if rate and trace:
        raise StartupError("--rate and --trace both set arrival times; give only one")
    if trace and work["workload"] != "tokens":
        raise StartupError("--trace sends token ids, as many as each row has; it cannot be combined with --prompts")
    rows = trace_rows(trace) if trace else ()
    seed = secrets.randbelow(1 << 31) if seed is None else seed  # the prompts of an earlier command may be cached
    load = LoadPlan(**work, seed=seed, rate=0.0 if sweep else rate or 0.0, trace=rows)
    default = len(rows) if rows else 8 * concurrency
    options = BenchOptions(
        load=load,
        concurrency=0 if load.is_open else concurrency,
        requests=default if requests is None else requests,
        warmup=concurrency if warmup is None else warmup,
        repeats=repeats or (DEFAULT_REPEATS if against else 1),
        slo=None if slo is None else replace(slo, share=slo_share),
        sweep_from=(rate or 1.0) if sweep else 0.0,
    )
    files = {"json": json_path, "markdown": markdown_path, "html": html_path}
    servers = [(each, model, api_key, timeout_s) for each in (url, *filter(None, [against]))]
    return bench(servers, options, {kind: Path(path) for kind, path in files.items() if path})
