"""From an UpConfig to the processes of a local cluster: their command lines, cores, environment and log files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from baton.options import as_flags
from launch.child import ChildSpec
from launch.cores import Placement, assign_gpus, place
from launch.up_config import COORDINATOR_FIELDS, WORKER_FIELDS, UpConfig


def torchrun(role: str, ranks: int = 1) -> tuple[str, ...]:
    """The start of a worker's command: torchrun on one node, through our agent."""
    agent = (sys.executable, "-m", "launch.agent", "--nnodes", "1", "--nproc-per-node", str(ranks))
    return (*agent, "--max-restarts", "0", "-m", role)


@dataclass(frozen=True, slots=True)
class Programs:
    """How each process is started: the coordinator, and a worker of a role with so many ranks. The flags come after.
    Tests put small fakes here."""

    coordinator: tuple[str, ...] = (sys.executable, "-m", "coordinator")
    worker: Callable[[str, int], tuple[str, ...]] = torchrun


@dataclass(frozen=True, slots=True)
class Addresses:
    """What the coordinator bound, as it wrote to its ready-file."""

    http: str
    grpc: str
    control: str

    @property
    def url(self) -> str:
        """Where a client on this machine reaches it."""
        host, _, port = self.http.rpartition(":")
        host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "[::1]"}.get(host, host)
        return f"http://{host}:{port}"

    @property
    def ports(self) -> tuple[int, int, int]:
        return tuple(int(address.rpartition(":")[2]) for address in (self.http, self.grpc, self.control))  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about the cluster that is known before its first process starts."""

    config: UpConfig
    model: Path
    served_name: str
    run_dir: Path
    placements: Mapping[str, Placement]
    gpus: Mapping[str, str]
    programs: Programs

    @property
    def ready_file(self) -> Path:
        return self.run_dir / "coordinator.json"

    def coordinator(self, bound: Addresses | None = None) -> ChildSpec:
        """`bound` holds the ports of an earlier life, which the next one takes again."""
        command = [*self.programs.coordinator, "--model", str(self.model), "--served-model-name", self.served_name]
        command += [*as_flags(self.config, COORDINATOR_FIELDS), "--control-host", "127.0.0.1"]
        command += ["--ready-file", str(self.ready_file)]
        if bound is not None:
            for flag, port in zip(("--port", "--grpc-port", "--control-port"), bound.ports, strict=True):
                command += [flag, str(port)]
        return ChildSpec("coordinator", tuple(command), self.run_dir / "coordinator.log", {"PYTHONUNBUFFERED": "1"})

    def worker(self, name: str, bound: Addresses) -> ChildSpec:
        placement, role = self.placements[name], name.rpartition("-")[0]
        ranks = self.config.ranks(role)
        command = [*self.programs.worker(role, ranks), "--model", str(self.model), "--worker-id", name]
        command += ["--coordinator", bound.control, "--host", "127.0.0.1", "--threads", str(placement.threads)]
        command += [*as_flags(self.config, WORKER_FIELDS), "--block-size", str(self.config.blocks_of(role))]
        threads = str(max(placement.threads // ranks, 1))
        environment = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        if self.gpus[name]:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[name]
        return ChildSpec(name, tuple(command), self.run_dir / f"{name}.log", environment, placement.cores)


def make_plan(
    config: UpConfig,
    *,
    model: Path,
    served_name: str,
    run_dir: Path,
    cores: Sequence[int],
    gpus: Sequence[str],
    programs: Programs,
) -> Plan:
    names = [f"prefill-{n}" for n in range(config.prefill)] + [f"decode-{n}" for n in range(config.decode)]
    ranks = [config.ranks(name.rpartition("-")[0]) for name in names]
    placements = place(ranks, cores, config.threads)
    if config.edge_kind == "auto" and 0 < len(gpus) < sum(ranks):
        config = replace(config, edge_kind="gloo")  # NCCL takes no two ranks on one GPU
    devices = assign_gpus(ranks, () if config.device == "cpu" else gpus)
    return Plan(
        config,
        model,
        served_name,
        run_dir,
        dict(zip(names, placements, strict=True)),
        dict(zip(names, devices, strict=True)),
        programs,
    )


def visible_gpus(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The NVIDIA devices a worker may be given, without loading torch."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(part.strip() for part in named.split(",") if part.strip())
    try:
        found = [name.removeprefix("nvidia") for name in os.listdir("/dev") if name.startswith("nvidia")]
    except OSError:
        return ()
    return tuple(sorted((name for name in found if name.isdigit()), key=int))
