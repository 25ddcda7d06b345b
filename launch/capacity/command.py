"""The options of `baton calibrate`, `baton simulate` and `baton plan`."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from baton.core.errors import BatonError, StartupError
from baton.runtime.options import NumberRange
from baton.runtime.paths import read_text, write_text
from coordinator.policy.split import Split
from launch.bench.command import LENGTHS, SLO, trace_rows
from launch.console import shown_command
from sim.scale.costs import Calibration, parse_calibration
from sim.scale.workload import Lengths, first_seconds, poisson, scaled
from sim.stats import Slo
from sim.trace import TRACES, TraceRow

MOST_REQUESTS = 5_000_000


class _NewFile(click.Path):
    """A file to write. That it cannot be written is known before what is written to it has been computed."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.exists() and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
            self.fail(f"{str(path)!r}: no file can be made in {str(path.parent)!r}.", param, ctx)
        return str(path)


FILE = _NewFile(dir_okay=False, writable=True)


def load_options(command: Callable[..., int]) -> Callable[..., int]:
    """Adds the options that describe a load."""
    options = (
        click.option("--trace", default="", metavar="FILE", help=f"A recorded trace; also {', '.join(TRACES)}."),
        click.option(
            "--rate", type=NumberRange(1e-6), default=None, help="In place of a trace: Poisson arrivals per second."
        ),
        click.option("--input-len", type=LENGTHS, default="512", show_default=True, help="Prompt length, with --rate."),
        click.option(
            "--output-len", type=LENGTHS, default="128", show_default=True, help="Output tokens, with --rate."
        ),
        click.option(
            "--duration-s", type=NumberRange(1.0), default=None, help="First seconds of the trace; with --rate 600 s."
        ),
        click.option(
            "--scale",
            type=NumberRange(1e-3, 1e4),
            default=1.0,
            show_default=True,
            help="Times as many requests, in the same time.",
        ),
        click.option("--seed", type=int, default=1, show_default=True, help="Same seed, same requests."),
        click.option("--slo", type=SLO, default=None, help="Latency limits; goodput counts requests within."),
        click.option(
            "--slo-share",
            type=NumberRange(0.01, 1.0),
            default=0.9,
            show_default=True,
            help="Fraction that must meet --slo.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def load_rows(
    trace: str,
    rate: float | None,
    input_len: Lengths,
    output_len: Lengths,
    duration_s: float | None,
    scale: float,
    seed: int,
) -> tuple[TraceRow, ...]:
    if bool(trace) == bool(rate):
        raise StartupError("give either --trace or --rate")
    if min(input_len.low, output_len.low) < 1:
        raise StartupError("--input-len and --output-len must be at least 1")
    if rate:
        if rate * scale * (duration_s or 600.0) > MOST_REQUESTS:
            raise StartupError(f"--rate, --scale and --duration-s make more than {MOST_REQUESTS} requests")
        return poisson(rate * scale, duration_s or 600.0, input_len, output_len, seed)
    rows = trace_rows(trace)
    if len(rows) * scale > MOST_REQUESTS:
        raise StartupError(f"--trace and --scale make more than {MOST_REQUESTS} requests")
    return scaled(first_seconds(rows, duration_s or float("inf")), scale, seed)


def read_calibration(path: str, option: str = "--calibration") -> Calibration:
    """Raises StartupError with the file and the field that is wrong."""
    try:
        return parse_calibration(json.loads(read_text(path)))
    except OSError as error:
        raise StartupError(f"{option} {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{option} {path}: not JSON ({error})") from None
    except BatonError as error:
        raise StartupError(f"{option} {path}: {error.message}") from None


def write_file(path: str | None, option: str, text: Callable[[], str]) -> None:
    if path:
        try:
            write_text(path, text())
        except OSError as error:
            raise StartupError(f"{option} {path} cannot be written: {error.strerror or error}") from None


def _settings(**values: object) -> dict[str, str]:
    named = {name: str(value) for name, value in values.items() if value not in (None, "", 1.0)}
    return {**named, "command": shown_command()}


@click.command("calibrate")
@click.argument("url", default="http://127.0.0.1:8100")
@click.option("--out", default="calibration.json", show_default=True, type=FILE, help="The file to write.")
@click.option("--name", default="worker", show_default=True, help="Names this kind of worker, for prices and plans.")
@click.option(
    "--shared-host",
    is_flag=True,
    help="Workers, coordinator and this command share the cores of this host: measure processor time.",
)
@click.option("--model", default="", help="Model to request; default the first of /v1/models.")
@click.option("--timeout-s", type=NumberRange(0.1), default=600.0, show_default=True, help="Time limit for a request.")
@click.option("--api-key", default="", envvar="OPENAI_API_KEY", help="Sent as a bearer token.")
@click.option("--admin-url", default="", help="With API keys or TLS: the URL of --admin-port; default URL.")
def calibrate_command(
    url: str, out: str, name: str, shared_host: bool, model: str, timeout_s: float, api_key: str, admin_url: str
) -> int:
    """Measure the costs of the idle cluster at URL, one prefill and one decode worker, for `baton plan`."""
    from launch.bench.run import find_target
    from launch.capacity.calibrate import calibrate
    from launch.capacity.loads import LoadClient

    target = find_target(url, model, api_key, timeout_s)
    cluster = LoadClient(admin_url or url, target, secrets.randbelow(1 << 31))
    measured = calibrate(cluster, name, shared_host=shared_host, progress=lambda line: click.echo(line, err=True))
    write_file(out, "--out", lambda: json.dumps(measured.as_json(), indent=1) + "\n")
    for fit, residual in measured.residuals.items():
        click.echo(f"{fit:<14} {residual}")
    click.echo(f"written to {out}")
    return 0


@click.command("simulate")
@load_options
@click.option("--calibration", required=True, metavar="FILE", help="Costs of the workers, from `baton calibrate`.")
@click.option("--prefill", type=click.IntRange(0, 1 << 14), default=1, show_default=True, help="Prefill workers.")
@click.option("--decode", type=click.IntRange(1, 1 << 14), default=1, show_default=True, help="Decode workers.")
@click.option(
    "--split",
    type=click.Choice(["always", "auto", "never"]),
    default="always",
    show_default=True,
    help="Where prompts are computed, as for the coordinator; without prefill workers always by decode workers.",
)
@click.option("--json", "json_path", type=FILE, help="Write the outcome as JSON.")
def simulate_command(
    trace: str,
    calibration: str,
    prefill: int,
    decode: int,
    split: Split,
    json_path: str | None,
    slo: Slo | None,
    slo_share: float,
    **load: Any,  # the other options of a load
) -> int:
    """Replay a load on a simulated cluster: latencies, goodput, utilisation, and where requests waited."""
    import gc
    import time

    from rich.console import Console

    from launch.capacity.report import outcome_tables, show_tables
    from sim.scale.members import ClusterShape
    from sim.scale.replay import Replay

    kind, rows = read_calibration(calibration), load_rows(trace, **load)
    if not rows:
        raise StartupError("the load has no requests")
    limits = replace(slo or Slo(), share=slo_share)
    began = time.process_time()
    gc.disable()  # a replay makes no cycles worth collecting, and millions of objects to look through
    shape = ClusterShape(kind, prefill, kind, decode, split=split if prefill else "never")
    replay = Replay(shape, rows)
    outcome = replay.run(limits)
    if not outcome.e2e.count:
        refused = ", ".join(f"{count} {code}" for code, count in outcome.refused.items())
        raise StartupError(f"--calibration {calibration}: these workers can serve no request of the load ({refused})")
    seconds = time.process_time() - began
    write_file(json_path, "--json", lambda: json.dumps(asdict(outcome), indent=1) + "\n")
    console = Console(markup=False, emoji=False, highlight=False)
    show_tables(console, outcome_tables(outcome, limits, (kind,)))
    console.print(
        f"{outcome.requests} requests, {outcome.steps} steps ({outcome.steps_at_once} of them many at once),"
        f" {outcome.events} events in {seconds:.1f} s of processor time"
    )
    return 0


@click.command("plan")
@load_options
@click.option(
    "--calibration",
    "calibrations",
    required=True,
    multiple=True,
    metavar="FILE",
    help="From `baton calibrate`; may be repeated.",
)
@click.option(
    "--price",
    "prices",
    multiple=True,
    metavar="NAME=PRICE",
    help="Price per hour of a worker of a calibration; default 1.",
)
@click.option("--headroom/--no-headroom", default=True, help="Also search for the workers at 2 and 5 times the rate.")
@click.option("--json", "json_path", type=FILE, help="Write the plan as JSON.")
@click.option("--html", "html_path", type=FILE, help="Write the plan as an HTML page with plots.")
def plan_command(
    trace: str,
    calibrations: Sequence[str],
    prices: Sequence[str],
    headroom: bool,
    json_path: str | None,
    html_path: str | None,
    slo: Slo | None,
    slo_share: float,
    **load: Any,  # the other options of a load
) -> int:
    """Find the cheapest numbers of prefill and decode workers that meet --slo. Returns 1 if none does."""
    import gc

    from rich.console import Console

    from launch.capacity.plan import make_plan
    from launch.capacity.report import plan_html, show_plan

    if slo is None:
        raise StartupError("--slo is required, for example --slo ttft=0.5,tpot=50ms")
    kinds = [read_calibration(path) for path in calibrations]
    names = [kind.name for kind in kinds]
    if len(set(names)) < len(names):
        raise StartupError("--calibration: two of them have the same name; calibrate with --name")
    rows, limits = load_rows(trace, **load), replace(slo, share=slo_share)
    if not rows:
        raise StartupError("the load has no requests")
    described = {k: v for k, v in load.items() if not (trace and k in ("input_len", "output_len"))}
    settings = _settings(trace=trace, slo=slo, share=slo_share, **described)
    gc.disable()  # as in `simulate`; each replay's objects are freed by their reference counts
    report = make_plan(
        *(rows, limits, kinds, _prices(prices, names), settings),
        headroom=headroom,
        progress=lambda line: click.echo(line, err=True),
    )
    write_file(json_path, "--json", lambda: json.dumps(report.as_json(), indent=1) + "\n")
    write_file(html_path, "--html", lambda: plan_html(report))
    show_plan(report, Console(markup=False, emoji=False, highlight=False))
    return int(report.infeasible)


def _prices(given: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    by_name = dict[str, float]()
    for text in given:
        name, _, price = text.partition("=")
        if name in by_name:
            raise StartupError(f"--price {text}: {name!r} has a price already")
        try:
            by_name[name] = float(price)
        except ValueError:
            raise StartupError(f"--price {text}: expected NAME=PRICE") from None
        if name not in names:
            raise StartupError(f"--price {text}: there is no calibration {name!r}; there are {', '.join(names)}")
        if not 0 < by_name[name] < 1e9:
            raise StartupError(f"--price {text}: must be above 0 and below 1e9")
    return by_name
