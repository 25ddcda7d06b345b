"""A cluster in one TOML file: nodes, the coordinator, prefill and decode workers, the model, shared options.

    model = "/models/m"

    [options]                     # of the coordinator and of every worker that has such an option
    dtype = "bfloat16"

    [[nodes]]
    name = "a"
    address = "10.0.0.1"          # at which other nodes reach it; Slurm fills in a missing one
    cores = 8                     # a number; or a list, "0-7", to which workers are pinned
    gpus = 2                      # a number; or a list, as in CUDA_VISIBLE_DEVICES: "0,3", "GPU-5f..,MIG-1a.."

    [coordinator]
    node = "a"
    host = "0.0.0.0"              # for clients; the node's address if left out

    [batches]                     # files and batches, on the coordinator's node; without this table there are none
    data_dir = "/var/lib/baton"

    [[prefill]]
    nodes = ["b", "c"]            # one job over both
    tensor_parallel = 2
    base_port = 9000              # rendezvous port; a decode worker also uses 9001 (link) and 9002 (store)

    [[decode]]
    node = "a"

Every other option of a process is allowed in its table. An unknown key is an error that suggests the
nearest name. Nothing here inspects the machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from baton.core.commands import Role
from baton.core.cores import parse_cores
from baton.core.errors import StartupError
from baton.core.names import address_error, model_name_error, name_error, unbracketed
from baton.core.reshard import MAX_TENSOR_PARALLEL
from baton.runtime.config import BatchesConfig, CoordinatorConfig, WorkerConfig, from_table, nearest, option

ROLES: tuple[Role, ...] = ("prefill", "decode")
_GPU = re.compile(r"[0-9]{1,4}|(GPU|MIG)-[0-9A-Za-z/-]+")
_OF_THE_PLAN = (
    *("model", "served_model_name", "worker_id", "coordinator", "control_host", "ready_file", "api_key"),
    *("batches_address", "batches_host", "coordinator_url"),
)
"""Not for a topology. A key would be in scripts and on command lines: a topology names a file of keys."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine. `cores` are those that workers are pinned to; `core_count` is how many they share, pinned or not (0:
    not given). `gpus` are the devices as CUDA_VISIBLE_DEVICES names them."""

    name: str
    address: str
    cores: tuple[int, ...] = ()
    core_count: int = 0
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CoordinatorPlace:
    """The coordinator's node. `options` are the given options of its command line, and the host of HTTP."""

    node: str
    options: Mapping[str, Any]

    @property
    def config(self) -> CoordinatorConfig:
        """The options of its command line, with defaults for those not given."""
        return CoordinatorConfig(**self.options)


@dataclass(frozen=True, slots=True)
class BatchesPlace:
    """The batches process, on the coordinator's node. `options` are the given options of its command line."""

    options: Mapping[str, Any]

    @property
    def config(self) -> BatchesConfig:
        """The options of its command line, with defaults for those not given."""
        return BatchesConfig(**self.options)


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """A worker, its ranks divided evenly over `nodes`, with the leader on the first. `options` are the given options of
    its command line. Port 0: any free one."""

    name: str
    role: Role
    nodes: tuple[str, ...]
    tensor_parallel: int = 1
    devices: tuple[str, ...] = ()
    rendezvous_port: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> WorkerConfig:
        """The options of its command line, with defaults for those not given."""
        return WorkerConfig(**self.options)

    @property
    def ranks_per_node(self) -> int:
        return self.tensor_parallel // len(self.nodes)

    def with_option(self, **options: object) -> WorkerPlace:
        return replace(self, options={**self.options, **options})


@dataclass(frozen=True, slots=True)
class Topology:
    model: str
    served_model_name: str
    nodes: tuple[Node, ...]
    coordinator: CoordinatorPlace
    workers: tuple[WorkerPlace, ...]
    batches: BatchesPlace | None = None

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    @property
    def front(self) -> Node:
        """The coordinator's node."""
        return self.node(self.coordinator.node)


@dataclass(frozen=True, slots=True)
class _TopTable:
    model: str = option("auto", "")
    served_model_name: str = option("", "", check=model_name_error)


@dataclass(frozen=True, slots=True)
class _NodeTable:
    name: str
    address: str = option("", "")
    cores: int | str = option(0, "", low=0, high=4096)
    gpus: int | str = option(0, "", low=0, high=64)


@dataclass(frozen=True, slots=True)
class _CoordinatorTable(CoordinatorConfig):
    node: str = option("", "")


@dataclass(frozen=True, slots=True)
class _WorkerTable(WorkerConfig):
    name: str = option("", "")
    node: str = option("", "")
    nodes: tuple[str, ...] = option((), "")
    nnodes: int = option(0, "", low=0, high=64)
    tensor_parallel: int = option(1, "", low=1, high=MAX_TENSOR_PARALLEL)
    devices: tuple[int | str, ...] = option((), "", low=0)
    base_port: int = option(0, "", low=0, high=65533)
    rendezvous_port: int = option(0, "", low=0, high=65535)


_PLACING = {f.name for f in fields(_WorkerTable)} - {f.name for f in fields(WorkerConfig)}
_PORTS = {"port", "grpc_port", "control_port", "batches_port", "host", "node"}
_TABLES = ("options", "nodes", "coordinator", "batches", *ROLES)


def parse_topology(file: Mapping[str, object]) -> Topology:
    """Returns the topology in a parsed TOML file.

    Raises:
        StartupError: names the table and the key, and for an unknown key the nearest one.
    """
    top = {name: value for name, value in file.items() if name not in _TABLES}
    for name in top:
        if name not in (known := {f.name for f in fields(_TopTable)} | set(_TABLES)):
            raise StartupError(f"topology: unknown key {name!r}{nearest(name, known)}")
    settings = from_table(_TopTable, top, "topology")
    nodes = tuple(_node(table, where) for table, where in _list_of_tables(file, "nodes"))
    if not nodes:
        raise StartupError("topology: no [[nodes]] table")
    names = [node.name for node in nodes]
    _reject_duplicates(names, "node")
    shared = _shared(file)
    coordinator = _coordinator(_table(file, "coordinator"), shared, nodes)
    batches = _batches(_table(file, "batches"), shared) if "batches" in file else None
    workers = [
        _worker(role, index, table, where, shared, names)
        for role in ROLES
        for index, (table, where) in enumerate(_list_of_tables(file, role))
    ]
    parts = [part_name(worker.name, rank) for worker in workers for rank in range(len(worker.nodes))]
    _reject_duplicates(["coordinator", "batches", *parts], "member")
    if not workers:
        raise StartupError("topology: no [[prefill]] and no [[decode]] worker; a cluster needs at least one")
    placed = tuple(_on_gpus(worker, nodes) for worker in workers)
    return Topology(settings.model, settings.served_model_name, nodes, coordinator, placed, batches)


def _node(table: Mapping[str, object], where: str) -> Node:
    node = from_table(_NodeTable, table, where)
    _check(name_error(node.name), f"{where}: 'name'")
    if node.address:  # a missing address may be filled in later
        _check(address_error(node.address), f"{where}: 'address'")
    cores = parse_cores(node.cores, f"{where}: 'cores'") if isinstance(node.cores, str) else ()
    count = len(cores) or int(node.cores or 0)
    if isinstance(node.gpus, str):
        gpus = tuple(_gpu(part.strip(), f"{where}: 'gpus'") for part in node.gpus.split(",") if part.strip())
        _reject_duplicates(gpus, f"{where}: GPU")
    else:
        gpus = tuple(map(str, range(node.gpus)))
    return Node(node.name, unbracketed(node.address), cores, count, gpus)


def _coordinator(
    table: Mapping[str, object], shared: Mapping[str, object], nodes: tuple[Node, ...]
) -> CoordinatorPlace:
    own = {f.name for f in fields(CoordinatorConfig)}
    table = {**{name: value for name, value in shared.items() if name in own}, **table}
    place = from_table(_CoordinatorTable, table, "coordinator", _OF_THE_PLAN)
    name = place.node or nodes[0].name
    node = next((node for node in nodes if node.name == name), None)
    if node is None:
        raise StartupError(f"coordinator: unknown node {name!r}{nearest(name, [n.name for n in nodes])}")
    for key in ("port", "grpc_port", "control_port"):
        if getattr(place, key) == 0:
            raise StartupError(f"coordinator: {key!r} must be a fixed port, not 0: workers and clients need it")
    if place.data_dir and not place.store and "data_dir" not in shared:
        raise StartupError("coordinator: 'data_dir' is for 'store'; files and batches have their own table, [batches]")
    host = place.host if "host" in table else node.address
    if "host" in table:
        _check(address_error(host), "coordinator: 'host'")
    return CoordinatorPlace(name, {key: value for key, value in table.items() if key != "node"} | {"host": host})


def _batches(table: Mapping[str, object], shared: Mapping[str, object]) -> BatchesPlace:
    own = {f.name for f in fields(BatchesConfig)}
    table = {**{name: value for name, value in shared.items() if name in own}, **table}
    config = from_table(BatchesConfig, table, "batches", _OF_THE_PLAN)
    if not config.data_dir:
        raise StartupError("batches: 'data_dir' is missing, the directory for files and batches")
    if not config.batches_port:
        raise StartupError("batches: 'batches_port' must be a fixed port, not 0: the coordinator needs it")
    return BatchesPlace(table)


def _worker(
    role: Role, index: int, table: Mapping[str, object], where: str, shared: Mapping[str, object], nodes: list[str]
) -> WorkerPlace:
    own = {f.name for f in fields(WorkerConfig)}
    table = {**{name: value for name, value in shared.items() if name in own}, **table}
    worker = from_table(_WorkerTable, table, where, (*_OF_THE_PLAN, "host"))
    if bool(worker.node) == bool(worker.nodes):
        raise StartupError(f"{where}: needs either 'node' or 'nodes'")
    on = (worker.node,) if worker.node else worker.nodes
    for name in on:
        if name not in nodes:
            raise StartupError(f"{where}: unknown node {name!r}{nearest(name, nodes)}")
    _reject_duplicates(on, f"{where}: node")
    if worker.nnodes not in (0, len(on)):
        raise StartupError(f"{where}: 'nnodes' is {worker.nnodes}, but {len(on)} nodes are given")
    ranks = worker.tensor_parallel
    if ranks % len(on):
        raise StartupError(f"{where}: tensor_parallel {ranks} cannot be divided over {len(on)} nodes")
    if worker.devices and len(worker.devices) != ranks // len(on):
        reason = f"'devices' lists {len(worker.devices)} GPUs, but each node has {ranks // len(on)} ranks"
        raise StartupError(f"{where}: {reason}")
    devices = tuple(_gpu(device, f"{where}: 'devices'") for device in worker.devices)
    _reject_duplicates(devices, f"{where}: GPU")
    name = worker.name or f"{role}-{index}"
    _check(name_error(name), f"{where}: 'name'")
    base = worker.base_port
    decodes = role == "decode"
    for key in ("link_port", "store_port"):
        if key in table and not decodes:
            raise StartupError(f"{where}: {key!r} is only for decode workers")
    rendezvous = worker.rendezvous_port or (base if len(on) > 1 else 0)
    if len(on) > 1 and not rendezvous:
        raise StartupError(f"{where}: a worker over several nodes needs 'rendezvous_port' or 'base_port'")
    options = {key: value for key, value in table.items() if key not in _PLACING}
    if base and decodes:
        options |= {"link_port": worker.link_port or base + 1, "store_port": worker.store_port or base + 2}
    return WorkerPlace(name, role, on, ranks, devices, rendezvous, options)


def _on_gpus(worker: WorkerPlace, nodes: tuple[Node, ...]) -> WorkerPlace:
    """Changes the device `auto` to `cuda` if the file gives the worker GPUs: `auto` uses the CPU if it finds none."""
    given = worker.devices or all(node.gpus for node in nodes if node.name in worker.nodes)
    if not given or worker.config.device != "auto":
        return worker
    return worker.with_option(device="cuda")


def _shared(file: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the [options] table: fields of the coordinator, of the batches process, or of a worker."""
    table = _table(file, "options")
    placed = {*_OF_THE_PLAN, *_PORTS, "link_port", "store_port"}
    known = {f.name for cls in (BatchesConfig, CoordinatorConfig, WorkerConfig) for f in fields(cls)} - placed
    for name in table:
        if name not in known:
            raise StartupError(f"options: unknown key {name!r}{nearest(name, known)}")
    return table


def _table(file: Mapping[str, object], name: str) -> Mapping[str, object]:
    table = file.get(name, {})
    if not isinstance(table, dict):
        raise StartupError(f"topology: {name!r} must be a table, [{name}]")
    return table


def _list_of_tables(file: Mapping[str, object], name: str) -> list[tuple[Mapping[str, object], str]]:
    tables = file.get(name, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise StartupError(f"topology: {name!r} must be a list of tables, [[{name}]]")
    return [(table, f"{name}[{index}]") for index, table in enumerate(tables)]


def part_name(worker: str, node_rank: int) -> str:
    """Returns the name of a worker's ranks on one of its nodes: the worker's own name on the leader's node."""
    return f"{worker}.{node_rank}" if node_rank else worker


def _check(wrong: str | None, where: str) -> None:
    if wrong:
        raise StartupError(f"{where} {wrong}")


def _gpu(name: int | str, where: str) -> str:
    """Checks a GPU's name in CUDA_VISIBLE_DEVICES: a number, or the UUID of a GPU or of a MIG instance."""
    if not _GPU.fullmatch(str(name)):
        raise StartupError(f"{where} must be numbers or UUIDs (GPU-..., MIG-...), not {name!r:.60}")
    return str(int(name)) if str(name).isdigit() else str(name)


def _reject_duplicates(names: list[str] | tuple[str, ...], kind: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise StartupError(f"topology: {kind} {name!r} is named twice")
