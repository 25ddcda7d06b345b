"""The `baton` command. Each subcommand imports what it needs when it runs, so `--help` is fast."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import NoReturn

import click

from baton.core.commands import Role
from baton.core.errors import BatonError, StartupError
from baton.runtime.options import NumberRange, config_command, run_main
from baton.runtime.paths import write_text
from launch.autoscale.command import autoscale_command
from launch.bench.command import bench_command
from launch.capacity.command import calibrate_command, plan_command, simulate_command
from launch.control_options import FLIP_S, control_options
from launch.kubernetes.config import KubernetesConfig
from launch.report_command import report_command
from launch.up_config import DoctorConfig, UpConfig, check_environment

DEFAULT_URL = "http://127.0.0.1:8100"


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
def baton() -> None:
    """Serves large language models with prefill and decode on separate pools."""


@config_command(
    UpConfig,
    name="up",
    positional="model",
    help="Start a cluster on this machine: a coordinator, prefill and decode workers. Ctrl-C drains and ends it.",
)
def up_command(config: UpConfig) -> int:
    from launch.up import up

    check_environment(os.environ)
    return up(config)


@config_command(
    DoctorConfig,
    name="doctor",
    help="Check a cluster before it is started, with the options of `up` or a topology file: what each node provides, "
    "and whether ranks that communicate reach each other. For several nodes run it on each at the same time.",
)
def doctor_command(config: DoctorConfig) -> int:
    # Read when grpc is imported: with its handlers, starting a process beside a server may abort.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    from launch.doctor.run import doctor
    from launch.members import nodes_here
    from launch.plan_checks import check_memory, host_memory_bytes
    from launch.up import autoscale_policy, plan_for

    plan = plan_for(config)
    nodes = nodes_here(plan.topology, config.node)
    check_memory(plan, nodes, host_memory_bytes())
    autoscale_policy(config, plan, nodes)
    return doctor(plan, nodes, config)


@baton.command("models")
@click.argument("model", required=False)
@click.option("--all", "everything", is_flag=True, help="also those that are refused, with the reason")
@click.option(
    "--model-impl", default="auto", show_default=True, type=click.Choice(("auto", "baton", "transformers")), help="path"
)
def models_command(model: str | None, everything: bool, model_impl: str) -> int:
    """List the architectures that are served, by which path, and what is proven; or say how MODEL would be served, or
    why not."""
    from launch.served_models import describe, print_models

    if model is not None:
        click.echo(describe(model, model_impl))
    else:
        print_models(served_only=not everything)
    return 0


@baton.command("ps")
@click.argument("url", default=DEFAULT_URL)
@click.option("--json", "as_json", is_flag=True, help="print GET /workers as JSON")
@click.option(
    "--watch",
    "every_s",
    type=NumberRange(min=0.1, max=3600.0),
    metavar="SECONDS",
    help="repeat at this interval, with tokens and steps per second",
)
def ps_command(url: str, as_json: bool, every_s: float | None) -> int:
    """Show the workers of the cluster at URL."""
    from launch.cluster_api import get_cluster
    from launch.views import print_cluster, watch

    if as_json:
        click.echo(json.dumps(get_cluster(url).document, indent=2))
    elif every_s is not None:
        with contextlib.suppress(KeyboardInterrupt):
            watch(lambda: get_cluster(url), every_s)
    else:
        print_cluster(get_cluster(url))
    return 0


@baton.command("explain")
@click.argument("request_id", metavar="ID")
@click.argument("url", default=DEFAULT_URL)
@click.option("--json", "as_json", is_flag=True, help="print GET /requests/ID as JSON")
def explain_command(request_id: str, url: str, as_json: bool) -> int:
    """Show where the time of a request went: one that runs at URL, or one of the last thousand. ID is its x-request-id
    or the id in its response."""
    from launch.cluster_api import get_requests
    from launch.views import print_request

    if not request_id:
        raise StartupError("the request id must not be empty")
    rows = get_requests(url, request_id)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        print_request(rows)
    return 0


@baton.command("trace")
@click.argument("url", default=DEFAULT_URL)
@click.option("--out", default="baton-trace.json", show_default=True, help="file for ui.perfetto.dev")
def trace_command(url: str, out: str) -> int:
    """Write the last requests of the cluster at URL as a trace: a track for each worker, and arrows from prefill to
    decode."""
    from launch.cluster_api import get_requests
    from launch.views import chrome_trace

    rows = get_requests(url)
    try:
        write_text(out, json.dumps(chrome_trace(rows)))
    except OSError as error:
        raise StartupError(f"--out {out} cannot be written: {error.strerror or error}") from None
    click.echo(f"{len(rows)} requests written to {out}: open it at https://ui.perfetto.dev")
    return 0


@baton.command("top")
@click.argument("url", default=DEFAULT_URL)
@click.option(
    "--every", "every_s", default=1.0, show_default=True, type=NumberRange(min=0.2, max=60.0), metavar="SECONDS"
)
@click.option("--requests", "shown", default=15, show_default=True, type=click.IntRange(0, 100), help="requests shown")
def top_command(url: str, every_s: float, shown: int) -> int:
    """Watch the cluster at URL: workers with rates, and the last requests with the time in each stage."""
    from launch.cluster_api import get_cluster, get_requests
    from launch.views import top

    with contextlib.suppress(KeyboardInterrupt):
        top(lambda: get_cluster(url), lambda: get_requests(url, limit=shown) if shown else [], every_s)
    return 0


@baton.command("drain")
@click.argument("worker")
@click.argument("url", default=DEFAULT_URL)
@click.option(
    "--timeout-s",
    default=30.0,
    show_default=True,
    type=NumberRange(min=0.0, max=86400.0),
    help="time for running requests to finish; then they are rescheduled on other workers",
)
@control_options
def drain_command(
    worker: str, url: str, timeout_s: float, coordinator: str, cluster_token_file: str, cluster_tls_dir: str
) -> int:
    """Take WORKER out of the cluster at URL: no new work, requests finish or are rescheduled, its process ends."""
    from launch.drain import drain

    return drain(worker, url, timeout_s, None, coordinator, cluster_token_file, cluster_tls_dir)


@baton.command("flip")
@click.argument("worker")
@click.argument("role", type=click.Choice(("prefill", "decode")))
@click.argument("url", default=DEFAULT_URL)
@click.option(
    "--timeout-s",
    type=NumberRange(min=0.0, max=86400.0),
    help="time for running requests to finish; then they are rescheduled on other workers; default 0.5 to decode,"
    " 30 to prefill",
)
@control_options
def flip_command(
    worker: str,
    role: Role,
    url: str,
    timeout_s: float | None,
    coordinator: str,
    cluster_token_file: str,
    cluster_tls_dir: str,
) -> int:
    """Change WORKER of the cluster at URL to ROLE while requests run: it drains and joins again, and keeps its weights
    and cached KV."""
    from launch.drain import drain

    timeout_s = FLIP_S[role] if timeout_s is None else timeout_s
    return drain(worker, url, timeout_s, role, coordinator, cluster_token_file, cluster_tls_dir)


@baton.command("traffic")
@click.argument("shares", nargs=-1, metavar="[NAME=PERCENT]...")
@click.option("--url", default=DEFAULT_URL, show_default=True, help="the cluster")
@click.option("--clear", is_flag=True, help="remove all other shares: requests go to every revision, by its room")
@control_options
def traffic_command(
    shares: tuple[str, ...], url: str, clear: bool, coordinator: str, cluster_token_file: str, cluster_tls_dir: str
) -> int:
    """Send a share of new requests to the workers of a revision: `baton traffic v2=5`, and back: `baton traffic v2=0`.
    Running requests stay where they are. Without arguments, show the shares and the revisions."""
    from baton.runtime.admin import set_traffic
    from coordinator.policy.traffic import parse_shares
    from launch.cluster_api import get_cluster
    from launch.drain import control_of
    from launch.views import print_traffic

    try:
        if (given := parse_shares(shares)) or clear:
            _, address, token, tls = control_of(url, coordinator, cluster_token_file, cluster_tls_dir)
            set_traffic(address, given, token, clear=clear, tls=tls)
        print_traffic(get_cluster(url))
    except BatonError as error:
        raise StartupError(error.message) from None
    return 0


@baton.command("roll")
@click.argument("url", default=DEFAULT_URL)
@click.option("--run-dir", default="", metavar="DIR", help="run directory of its `baton up`, if it is not the default")
def roll_command(url: str, run_dir: str) -> int:
    """Replace every process of the cluster at URL, one after the other, while it serves: after an upgrade, for example.
    `baton up` must run on this machine."""
    from launch.console import Console
    from launch.roll import roll
    from launch.run_directory import directory_of

    path = Path(run_dir) if run_dir else directory_of(url)
    if path is None:
        raise StartupError(f"no `baton up` of this user runs the cluster at {url}; name its directory with --run-dir")
    return roll(path, Console())


@baton.command("certs")
@click.argument("directory")
@click.option(
    "--host", "hosts", multiple=True, metavar="NAME", help="name or address of HTTP and gRPC; may be repeated"
)
@click.option("--days", default=365, show_default=True, type=click.IntRange(1, 3650), help="days of validity")
def certs_command(directory: str, hosts: tuple[str, ...], days: int) -> int:
    """Make certificates for a cluster in DIRECTORY, with an authority of its own: one for each role (--cluster-tls-dir)
    and one for HTTP and gRPC (--tls-cert-file, --tls-key-file). Existing files are kept."""
    from launch.certificates import make_certificates

    for path in make_certificates(Path(directory), hosts, days):
        click.echo(path)
    return 0


@baton.group("emit")
def emit_group() -> None:
    """Write what starts the cluster of a topology file without `baton up`."""


@emit_group.command("shell")
@click.argument("topology")
@click.option("--out", default="baton-nodes", show_default=True, help="directory for one script for each node")
def emit_shell_command(topology: str, out: str) -> int:
    """One script for each node: run DIR/NODE.sh there."""
    from launch.emit import emit_shell
    from launch.up import topology_plan

    plan = topology_plan(topology, {})  # its workers will have their own environments
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        for node in plan.topology.nodes:
            text, path = emit_shell(plan, node), Path(out) / f"{node.name}.sh"
            if text:
                path.write_text(text, encoding="utf-8")
                path.chmod(0o755)
                click.echo(path)
    except OSError as error:
        raise StartupError(f"--out {out} cannot be written: {error.strerror or error}") from None
    return 0


@emit_group.command("slurm")
@click.argument("topology")
def emit_slurm_command(topology: str) -> int:
    """One sbatch script, on standard output; hosts and addresses come from the allocation."""
    from launch.emit import emit_slurm
    from launch.up import topology_plan

    click.echo(emit_slurm(topology_plan(topology, {}, addresses=False)), nl=False)
    return 0


@config_command(
    KubernetesConfig,
    name="kubernetes",
    positional="topology",
    help="Objects for Kubernetes in DIR (--out), with a kustomization.yaml: the coordinator, one pool of workers for "
    "each role, and what belongs to them. Needs the LeaderWorkerSet controller there.",
)
def emit_kubernetes_command(config: KubernetesConfig) -> int:
    from launch.kubernetes.command import emit_kubernetes

    return emit_kubernetes(config)


@baton.command("version")
def version_command() -> int:
    """Print the versions of baton and its main dependencies."""
    from launch.console import versions

    for name, version in versions("baton-serve", "torch", "grpcio", "starlette", "tokenizers").items():
        click.echo(f"{name:<12} {version}")
    return 0


emit_group.add_command(emit_kubernetes_command)
baton.add_command(up_command)
baton.add_command(doctor_command)
baton.add_command(bench_command)
baton.add_command(calibrate_command)
baton.add_command(simulate_command)
baton.add_command(plan_command)
baton.add_command(report_command)
baton.add_command(autoscale_command)


def main() -> NoReturn:
    run_main(baton, sys.argv[1:], prog_name="baton")


if __name__ == "__main__":
    main()
