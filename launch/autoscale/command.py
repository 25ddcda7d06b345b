"""The options of `baton autoscale`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import click

from baton.core.errors import StartupError
from baton.core.names import host_port_error
from baton.runtime.options import NumberRange
from launch.autoscale.flip import FLIP_WINDOW_S
from launch.autoscale.law import MOST_WORKERS, Policy
from launch.capacity.command import FILE, load_options, load_rows, read_calibration, write_file
from launch.control_options import FLIP_S, control_options
from sim.scale.planner import Size
from sim.stats import Slo


@click.command("autoscale")
@click.argument("url", default="http://127.0.0.1:8100")
@click.option("--calibration", required=True, metavar="FILE", help="Costs of the workers, from `baton calibrate`.")
@click.option(
    "--min",
    "least",
    type=click.IntRange(0, MOST_WORKERS),
    default=1,
    show_default=True,
    help="Workers of each role that are kept; 0: none while idle.",
)
@click.option(
    "--max-prefill", type=click.IntRange(0, MOST_WORKERS), default=16, show_default=True, help="Prefill workers."
)
@click.option(
    "--max-decode",
    type=click.IntRange(0, MOST_WORKERS),
    default=16,
    show_default=True,
    help="Decode workers; 0 for a model that only pools.",
)
@click.option(
    "--down-s",
    type=NumberRange(1.0),
    default=600.0,
    show_default=True,
    help="Time for which workers that are not needed any more are kept.",
)
@click.option(
    "--idle-s",
    type=NumberRange(1.0),
    default=600.0,
    show_default=True,
    help="Time without a request until --min 0 ends all workers.",
)
@click.option(
    "--every-s", type=NumberRange(0.1, 60.0), default=1.0, show_default=True, help="Time between two decisions."
)
@click.option(
    "--listen",
    default="127.0.0.1:8105",
    show_default=True,
    metavar="HOST:PORT",
    help="Where KEDA's operator dials (external-push).",
)
@click.option(
    "--flip",
    is_flag=True,
    help="Keep the number of workers: change the role of one at a time where the other role keeps too many busy.",
)
@control_options
@click.option("--dry-run", is_flag=True, help="Decide for a simulated cluster with --trace or --rate; act on nothing.")
@click.option("--json", "json_path", type=FILE, help="Write the outcome of --dry-run as JSON.")
@load_options
def autoscale_command(
    url: str,
    calibration: str,
    least: int,
    max_prefill: int,
    max_decode: int,
    down_s: float,
    idle_s: float,
    every_s: float,
    listen: str,
    flip: bool,
    coordinator: str,
    cluster_token_file: str,
    cluster_tls_dir: str,
    dry_run: bool,
    json_path: str | None,
    slo: Slo | None,
    slo_share: float,
    **load: Any,  # the other options of a load
) -> int:
    """Decide how many workers the cluster at URL should have, and answer KEDA, or with --flip change their roles.
    `baton up --autoscale` starts and drains them itself."""
    if slo is None:
        raise StartupError("--slo is required, for example --slo ttft=1,tpot=50ms")
    if not max_prefill:
        raise StartupError(
            "--max-prefill 0: prompts that decode workers compute are not counted, prefill workers are needed"
        )
    kind = read_calibration(calibration)
    limit = Size(max_prefill, max_decode)
    for option, largest in (("--max-prefill", max_prefill), ("--max-decode", max_decode)):
        if 0 < largest < least:
            raise StartupError(f"--min {least} is above {option} {largest}")
    policy = Policy(
        replace(slo, share=slo_share),
        kind,
        kind,
        Size(min(least, limit.prefill), min(least, limit.decode)),
        limit,
        down_s,
        idle_s,
    )
    if flip and (dry_run or not limit.decode):
        raise StartupError("--flip acts on a running cluster with both roles: without --dry-run and --max-decode 0")
    if dry_run:
        return _dry_run(policy, json_path, every_s, load)
    if load["trace"] or load["rate"]:
        raise StartupError("--trace and --rate need --dry-run")
    if wrong := host_port_error(listen):
        raise StartupError(f"--listen {wrong}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # without a handler, process 1 of a container ignores it
    if flip:
        return _flip(
            replace(policy, window_s=FLIP_WINDOW_S), url, every_s, coordinator, cluster_token_file, cluster_tls_dir
        )
    return _serve(policy, url, listen, every_s)


def _serve(policy: Policy, url: str, listen: str, every_s: float) -> int:
    from launch.autoscale.keda import serve
    from launch.autoscale.observe import Autoscaler
    from launch.console import Console

    console = Console()

    def log(line: str) -> None:
        console.stage("autoscale", line)

    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    opened: Callable[[int], None] = lambda bound: log(f"cluster {url}   KEDA external-push {host}:{bound}")  # noqa: E731
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(Autoscaler(policy, url, log), host, int(port), every_s, opened))
    return 0


def _flip(policy: Policy, url: str, every_s: float, *control: str) -> int:
    from launch.autoscale.flip import next_flip
    from launch.autoscale.observe import Autoscaler
    from launch.console import Console
    from launch.drain import credentials, drain

    credentials(url, *control)
    console = Console()
    autoscaler = Autoscaler(policy, url, lambda line: console.stage("autoscale", line))
    problem = ""  # the last one, so that it is logged once
    with contextlib.suppress(KeyboardInterrupt):
        while True:  # until Ctrl-C
            autoscaler.look()
            if (decision := autoscaler.decision) is not None and (sample := autoscaler.sample) is not None:
                flip = next_flip(sample, decision.busy, autoscaler.present)
                if flip is not None:
                    if not problem:
                        busy = f"{decision.busy[0]:.2f} prefill and {decision.busy[1]:.2f} decode busy"
                        console.stage("autoscale", busy)
                    try:
                        drain(flip.worker, url, FLIP_S[flip.role], flip.role, *control)
                        problem = ""
                    except StartupError as error:  # the next look decides again
                        line = f"{flip.worker} did not become a {flip.role} worker: {error.message}"
                        if line != problem:
                            console.stage("autoscale", line)
                        problem = line
            time.sleep(every_s)
    return 0


def _dry_run(policy: Policy, json_path: str | None, every_s: float, load: dict[str, Any]) -> int:
    import gc

    from launch.autoscale.simulate import dry_run
    from sim.scale.workload import fitting

    longest = min(policy.prefill.max_model_len, policy.decode.max_model_len)
    rows, too_long = fitting(load_rows(**load), longest)
    if not rows:
        raise StartupError(f"no request of the load fits into {longest} tokens, the context of the calibrated model")
    if not policy.limit.decode and any(row.output_len > 1 for row in rows):
        raise StartupError("--max-decode 0: the load generates tokens after the first one, which decode workers do")
    gc.disable()  # as in `baton simulate`
    made = dry_run(policy, rows, every_s=every_s)
    began = rows[0].at_s
    for change in made.changes:
        click.echo(f"{change.at_s - began:8.0f} s  {change.decision}")
    click.echo(
        f"{made.outcome.requests} requests ({too_long} too long, {sum(made.outcome.refused.values())} refused):"
        f" first token in time for {made.met_ttft:.1%}, for {made.warm_met_ttft:.1%} of the {made.warm_requests} that"
        f" were not sent while workers started; {made.outcome.met_share:.1%} met all limits;"
        f" {made.prefill_hours:.2f} prefill + {made.decode_hours:.2f} decode worker-hours,"
        f" {made.reversals_per_hour:.1f} reversals per hour"
    )
    write_file(json_path, "--json", lambda: json.dumps(asdict(made), indent=1) + "\n")
    return 0
