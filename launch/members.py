"""The members of a cluster on this host as child processes: their commands, logs and environment, from the plan."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from baton.core.cores import ranges
from baton.core.errors import StartupError
from launch.child import ChildSpec
from launch.plan import BATCHES, COORDINATOR, Plan, WorkerPart
from launch.run_directory import BATCHES_READY, READY
from launch.topology import Topology


@dataclass(frozen=True, slots=True)
class Programs:
    """How each process is started: the flags are appended, for a worker after its role. Tests use small fakes here,
    with `agent` empty to leave it out."""

    coordinator: tuple[str, ...] = (sys.executable, "-m", "coordinator")
    agent: tuple[str, ...] = (sys.executable, "-m", "launch.agent")
    worker: tuple[str, ...] = ("-m",)
    batches: tuple[str, ...] = (sys.executable, "-m", "batches")

    def of_part(self, plan: Plan, part: WorkerPart, control: str = "") -> tuple[str, ...]:
        """Returns the whole command of a part."""
        agent = (*self.agent, *plan.agent_flags(part)) if self.agent else ()
        return (*agent, *self.worker, part.role, *plan.worker_command(part, control))


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses that the coordinator bound and wrote to its ready-file."""

    http: str
    grpc: str
    control: str
    admin: str = ""
    scheme: str = "http"

    @property
    def url(self) -> str:
        """The URL for a client on this machine."""
        return f"{self.scheme}://{self._here(self.http)}"

    @property
    def admin_url(self) -> str:
        """The URL for an operator on this machine."""
        return f"http://{self._here(self.admin)}" if self.admin else self.url

    @staticmethod
    def _here(address: str) -> str:
        host, _, port = address.rpartition(":")
        host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "[::1]"}.get(host, host)
        return f"{host}:{port}"

    @property
    def ports(self) -> dict[str, int]:
        """The bound ports, by the options of a coordinator that set them."""
        addresses = {"port": self.http, "grpc_port": self.grpc, "control_port": self.control, "admin_port": self.admin}
        return {name: int(address.rpartition(":")[2]) for name, address in addresses.items() if address}


@dataclass(frozen=True, slots=True)
class Members:
    """The part of a plan that this host runs: the parts on `nodes`, and the coordinator if its node is one of them.
    `environment` is added to that of each member, `coordinator_environment` to the coordinator's."""

    plan: Plan
    nodes: frozenset[str]
    run_dir: Path
    programs: Programs
    start_timeout_s: float
    drain_timeout_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    coordinator_environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_coordinator(self) -> bool:
        return self.plan.topology.coordinator.node in self.nodes

    @property
    def has_batches(self) -> bool:
        return self.has_coordinator and self.plan.topology.batches is not None

    @property
    def parts(self) -> dict[str, WorkerPart]:
        return {part.name: part for part in self.plan.parts if part.node.name in self.nodes}

    def drain_timeout_of(self, name: str) -> float:
        """Returns the time limit of a member's requests when it drains: its own, or the coordinator's if longer."""
        place = self.parts[name].worker if name in self.parts else self.plan.topology.batches
        if name == COORDINATOR or place is None:
            return self.drain_timeout_s
        return max(self.drain_timeout_s, place.config.drain_timeout_s)

    @property
    def ready_file(self) -> Path:
        return self.run_dir / READY

    @property
    def batches_ready_file(self) -> Path:
        return self.run_dir / BATCHES_READY

    @property
    def addresses(self) -> Addresses:
        """The addresses of a coordinator on another host."""
        scheme, _, http = self.plan.url.partition("://")
        return Addresses(http, "", self.plan.control, self.plan.admin, scheme)

    def coordinator(self, bound: Addresses | None = None, *, take_over: bool = False) -> ChildSpec:
        """Returns what to run. `bound` holds the ports of an earlier run, which the next run reuses; with `take_over`
        that run still has them."""
        flags = self.plan.coordinator_command(None if bound is None else bound.ports)
        command = (*self.programs.coordinator, *flags, "--ready-file", str(self.ready_file))
        command += ("--take-over",) if take_over else ()
        note = "on the same ports" if bound is not None else ""
        environment = {**self.environment, **self.coordinator_environment}
        return ChildSpec(COORDINATOR, command, self.run_dir / f"{COORDINATOR}.log", environment, note=note)

    def batches(self, bound: Addresses) -> ChildSpec:
        command = (*self.programs.batches, *self.plan.batches_command(bound.url))
        command = (*command, "--ready-file", str(self.batches_ready_file))
        return ChildSpec(BATCHES, command, self.run_dir / f"{BATCHES}.log", self.environment)

    def worker(self, name: str, bound: Addresses) -> ChildSpec:
        part = self.parts[name]
        command = self.programs.of_part(self.plan, part, bound.control)
        environment = {**self.environment, **part.environment}
        log, where = self.run_dir / f"{name}.log", part.placement
        return ChildSpec(name, command, log, environment, where.cores, note=str(where))


def nodes_here(topology: Topology, chosen: str = "", *, allow_none: bool = False) -> frozenset[str]:
    """Returns the nodes of a topology that are this host: the `chosen` one, else those whose address this host has.

    Raises:
        StartupError: the topology has no `chosen` node; or no node is this host, unless `allow_none`.
    """
    names = [node.name for node in topology.nodes]
    if chosen and chosen not in names:
        raise StartupError(f"--node {chosen}: unknown node; the topology has {', '.join(names)}")
    here = [chosen] if chosen else [node.name for node in topology.nodes if is_own(node.address)]
    if not here and not allow_none:
        reason = "no node of the topology has an address of this host; choose one with --node"
        raise StartupError(f"{reason}: {', '.join(names)}")
    return frozenset(here)


def check_cores(plan: Plan, nodes: frozenset[str]) -> None:
    """Checks, before anything is started, that this process may run on every core to which workers are pinned.

    Raises:
        StartupError: it may not; names the node, its key and the cores.
    """
    here = os.sched_getaffinity(0)
    for name in sorted(nodes):
        asked = {core for part in plan.parts if part.node.name == name for core in part.placement.cores}
        if not asked <= here:
            missing, may = ranges(tuple(sorted(asked - here))), ranges(tuple(sorted(here)))
            raise StartupError(f"node {name}: 'cores' includes {missing}, but this process may run on {may} only")


def is_own(address: str) -> bool:
    """Whether a socket can be bound to `address`."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(where)
    except OSError:
        return False
    return bool(address)
