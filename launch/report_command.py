"""The options of `baton report`."""

from __future__ import annotations

import json
import time

import click

from baton.core.errors import BatonError, StartupError
from baton.runtime.options import NumberRange
from launch.bench.command import SLO
from sim.stats import Slo


@click.command("report")
@click.argument("url", default="http://127.0.0.1:8100")
@click.option("--slo", type=SLO, default=None, help="latency limits; goodput counts requests within both")
@click.option(
    "--price",
    default="",
    metavar="PRICE",
    help="of a worker-hour: 2.5, or prefill=1.5,decode=2.5; the currency is yours",
)
@click.option("--for", "for_s", type=NumberRange(min=0.1, max=86400.0), metavar="SECONDS", help="wait for this window")
@click.option("--since", default="", metavar="FILE", help="the window began when --save wrote FILE")
@click.option("--save", default="", metavar="FILE", help="write the metrics of now, for a later --since")
@click.option("--json", "as_json", is_flag=True, help="print the report as JSON")
def report_command(
    url: str, slo: Slo | None, price: str, for_s: float | None, since: str, save: str, as_json: bool
) -> int:
    """Report on the cluster at URL over a window, by default since its coordinator started: goodput at latency limits,
    utilisation of each role, wasted prefill, and cost per million tokens."""
    from launch.report import counted_limits, load, made_of, parse_prices, save_scrape, scrape, text_of

    if since and for_s is not None:
        raise StartupError("--since and --for both set the window; give only one")
    try:
        prices = parse_prices(price)
    except ValueError as error:
        raise StartupError(f"--price {price}: {error}") from None
    try:
        limits = counted_limits(slo)
    except BatonError as error:
        raise StartupError(f"--slo {slo}: {error.message}") from None
    before = load(since) if since else None
    if for_s is not None:
        before = scrape(url)
        time.sleep(for_s)
    after = scrape(url)
    if save:
        save_scrape(after, save)
    made = made_of(before, after, limits, prices)
    if as_json:
        click.echo(json.dumps(made.as_json(), indent=2))
    else:
        for line in text_of(made):
            click.echo(line)
    return 0
