"""From a topology to its processes: where each member runs, on which cores, GPUs and ports, with which command. Pure.

`baton up`, `baton up --dry-run`, `baton emit` and `baton doctor` all use this one plan, so they cannot disagree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

from baton.core.commands import Role
from baton.core.cores import ranges
from baton.core.errors import StartupError
from baton.core.names import host_port
from baton.runtime.options import flags_of
from launch.cores import Placement, place
from launch.topology import BatchesPlace, CoordinatorPlace, Node, Topology, WorkerPlace, part_name
from launch.up_config import BATCHES_FIELDS, COORDINATOR_FIELDS, WORKER_FIELDS, UpConfig

COORDINATOR = "coordinator"
BATCHES = "batches"
_AS_COORDINATOR = ("strict_fields", "request_timeout_s", "drain_timeout_s", "tls_cert_file", "cluster_token_file")
"""Options of the batches process that, if not given, are those of the coordinator."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """The ranks of one worker on one node, under one agent. `gpus` is the value of CUDA_VISIBLE_DEVICES there, empty
    without GPUs; `gpu_ranks` is how many ranks of the cluster share the busiest of them."""

    worker: WorkerPlace
    node: Node
    node_rank: int
    placement: Placement
    gpus: str = ""
    gpu_ranks: int = 1

    @property
    def name(self) -> str:
        """The name of the part: the worker's own on the node of its leader."""
        return part_name(self.worker.name, self.node_rank)

    @property
    def role(self) -> Role:
        return self.worker.role

    @property
    def ranks(self) -> int:
        return self.worker.ranks_per_node

    @property
    def environment(self) -> dict[str, str]:
        threads = str(max(self.placement.threads // self.ranks, 1)) if self.placement.threads else ""
        variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": self.gpus}
        return {name: value for name, value in variables.items() if value}


@dataclass(frozen=True, slots=True)
class Listener:
    """A port that a member opens (0: any free one), and the key of the topology that names it."""

    node: str
    host: str
    port: int
    member: str
    key: str

    def __str__(self) -> str:
        return f"--{self.key.replace('_', '-')} of {self.member}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a cluster that is known before its first process starts. `model` is passed to each process;
    `parts` are in the order of the workers, leaders first."""

    topology: Topology
    model: str
    served_name: str
    parts: tuple[WorkerPart, ...]

    @property
    def control(self) -> str:
        """The address that workers dial."""
        return host_port(self.topology.front.address, self.topology.coordinator.config.control_port)

    @property
    def url(self) -> str:
        """The HTTP URL for the other nodes."""
        config = self.topology.coordinator.config
        host = self.topology.front.address if config.host in ("0.0.0.0", "::") else config.host
        return f"{'https' if config.tls_cert_file else 'http'}://{host_port(host, config.port)}"

    @property
    def has_keys(self) -> bool:
        """Whether clients need API keys."""
        config = self.topology.coordinator.config
        return bool(config.api_key_file or config.api_key)

    @property
    def admin(self) -> str:
        """The operators' address; empty if operators use the same HTTP port as clients."""
        config = self.topology.coordinator.config
        if not self.has_keys and not config.tls_cert_file:
            return ""
        return host_port(self.topology.front.address, config.admin_port)

    def coordinator_command(self, ports: Mapping[str, int] | None = None) -> tuple[str, ...]:
        """Returns the flags of the coordinator; `ports`, by option name, are those of an earlier run. A command line is
        public: API keys are passed in a file."""
        config = self.topology.coordinator.config
        options = {name: getattr(config, name) for name in ("host", "port", "grpc_port")}
        options |= {"control_host": self.topology.front.address, "control_port": config.control_port}
        if self.topology.batches is not None:
            options["batches_address"] = host_port(LOOPBACK, self.topology.batches.config.batches_port)
        given = {name: value for name, value in self.topology.coordinator.options.items() if name != "api_key"}
        named = ("--model", self.model, "--served-model-name", self.served_name)
        return (*named, *flags_of({**options, **given, **(ports or {})}))

    def batches_command(self, url: str = "") -> tuple[str, ...]:
        """Returns the flags of the batches process, for the coordinator at `url` (the plan's, if empty)."""
        if self.topology.batches is None:
            raise AssertionError("the plan has no batches process")
        place, coordinator = self.topology.batches, self.topology.coordinator
        options = {"coordinator_url": url or self.url, "batches_port": place.config.batches_port}
        shared = {name: coordinator.options[name] for name in _AS_COORDINATOR if coordinator.options.get(name)}
        given = {name: value for name, value in place.options.items() if value != ""}
        return tuple(flags_of({**options, **shared, **given}))

    def agent_flags(self, part: WorkerPart) -> tuple[str, ...]:
        """Returns the flags of the agent of a part; torchrun accepts the same."""
        worker = part.worker
        words = ["--nnodes", str(len(worker.nodes))]
        if len(worker.nodes) > 1:
            words += ["--node-rank", str(part.node_rank)]
        words += ["--nproc-per-node", str(part.ranks), "--max-restarts", "0"]
        if worker.rendezvous_port:
            leader = self.topology.node(worker.nodes[0])
            words += ["--master-addr", leader.address, "--master-port", str(worker.rendezvous_port)]
        return tuple(words)

    def worker_command(self, part: WorkerPart, control: str = "") -> tuple[str, ...]:
        """Returns the flags of each rank of a part."""
        worker, config = part.worker, part.worker.config
        share = config.gpu_share or (1 / part.gpu_ranks if part.gpu_ranks > 1 else 0)
        options = {
            "worker_id": worker.name,
            "coordinator": control or self.control,
            "host": part.node.address,
            "threads": part.placement.threads,
            "link_port": config.link_port,
            "store_port": config.store_port,
            "gpu_share": f"{share:.4f}" if share else 0,
            "borrow_cores": self._cores_to_borrow(part),
        }
        placed = {name: value for name, value in options.items() if value}
        chosen = {name: value for name, value in worker.options.items() if name not in options}
        return ("--model", self.model, *flags_of({**placed, **chosen}))

    def _cores_to_borrow(self, part: WorkerPart) -> str:
        """Returns what `others` means for a part; nothing for a worker of several ranks."""
        given = part.worker.config.borrow_cores
        if given != "others":
            return "" if given == "none" else given
        if part.ranks > 1 or len(part.worker.nodes) > 1:
            return ""
        here = {core for other in self.parts if other.node == part.node for core in other.placement.cores}
        return ranges(tuple(sorted(here.difference(part.placement.cores))))

    def listeners(self) -> tuple[Listener, ...]:
        """Returns every port of the cluster that has a key. Edges and channels between ranks use other free ports."""
        front, config = self.topology.front, self.topology.coordinator.config
        hosts = {"port": config.host, "grpc_port": config.host, "control_port": front.address}
        if self.admin:
            hosts["admin_port"] = front.address
        listeners = [Listener(front.name, host, getattr(config, key), COORDINATOR, key) for key, host in hosts.items()]
        if self.topology.batches is not None:
            port = self.topology.batches.config.batches_port
            listeners.append(Listener(front.name, LOOPBACK, port, BATCHES, "batches_port"))
        for worker in self.topology.workers:
            leader, options = self.topology.node(worker.nodes[0]), worker.config
            ports = {"rendezvous_port": worker.rendezvous_port}
            if worker.role == "decode":
                ports |= {"link_port": options.link_port, "store_port": options.store_port}
            if options.health_port:
                ports["health_port"] = options.health_port
            listeners += [Listener(leader.name, leader.address, port, worker.name, key) for key, port in ports.items()]
        return tuple(listeners)


def make_plan(topology: Topology, model: str, served_name: str) -> Plan:
    """Places every worker.

    Raises:
        StartupError: two members use the same port, or several workers share a node without a number of cores.
    """
    topology = _with_split(topology)
    parts = _parts(topology)
    if kind := _kind_on_shared_gpus(parts):
        topology = replace(topology, workers=tuple(_with_edge_kind(worker, kind) for worker in topology.workers))
        parts = _parts(topology)
    plan = Plan(topology, model, served_name, parts)
    _check_collisions(plan)
    return plan


def _with_split(topology: Topology) -> Topology:
    """Returns the topology, in which decode workers compute the prompts if there are no prefill workers."""
    place = topology.coordinator
    if any(worker.role == "prefill" for worker in topology.workers) or place.config.split != "always":
        return topology
    return replace(topology, coordinator=replace(place, options={**place.options, "split": "auto"}))


def local_topology(config: UpConfig, cores: Sequence[int], gpus: Sequence[str]) -> Topology:
    """Returns the topology of `baton up`'s options: one node, this machine, on loopback, with port 0 (any free one)
    except for the public ports."""
    node = Node("local", LOOPBACK, tuple(cores), len(cores), () if config.device == "cpu" else tuple(gpus))
    options = {name: getattr(config, name) for name in COORDINATOR_FIELDS}
    shared = {name: getattr(config, name) for name in WORKER_FIELDS}
    if config.threads:
        shared["threads"] = config.threads
    pools: tuple[tuple[Role, int, int, int], ...] = (
        ("prefill", config.prefill, config.prefill_tp, config.prefill_block_size),
        ("decode", config.decode, config.decode_tp, config.decode_block_size),
    )
    workers = [
        WorkerPlace(
            f"{role}-{index}", role, (node.name,), ranks, options={**shared, "block_size": size or config.block_size}
        )
        for role, count, ranks, size in pools
        for index in range(count)
    ]
    coordinator = CoordinatorPlace(node.name, options)
    batches = BatchesPlace({name: getattr(config, name) for name in BATCHES_FIELDS}) if config.batches else None
    return Topology(config.model, config.served_model_name, (node,), coordinator, tuple(workers), batches)


def without_batches(plan: Plan) -> Plan:
    return replace(plan, topology=replace(plan.topology, batches=None))


def with_batches_defaults(plan: Plan, data_dir: str, port: int) -> Plan:
    """Returns the plan with what the batches process lacks before a start: its directory, and a port other than 0."""
    place = plan.topology.batches
    if place is None:
        return plan
    chosen = {"data_dir": place.config.data_dir or data_dir, "batches_port": place.config.batches_port or port}
    return replace(plan, topology=replace(plan.topology, batches=BatchesPlace({**place.options, **chosen})))


def with_addresses(topology: Topology, addresses: Mapping[str, str]) -> Topology:
    """Returns the same topology with other addresses for its nodes; the coordinator's default host follows."""
    nodes = tuple(replace(node, address=addresses[node.name]) for node in topology.nodes)
    place = topology.coordinator
    if place.config.host == topology.front.address:
        place = replace(place, options={**place.options, "host": addresses[place.node]})
    return replace(topology, nodes=nodes, coordinator=place)


def check_addresses(topology: Topology) -> None:
    """Raises StartupError for a node without an address."""
    for node in topology.nodes:
        if not node.address:
            raise StartupError(f"topology: node {node.name!r} has no address; only `baton emit slurm` works without it")


def _parts(topology: Topology) -> tuple[WorkerPart, ...]:
    parts: dict[tuple[str, str], WorkerPart] = {}
    for node in topology.nodes:
        here = [worker for worker in topology.workers if node.name in worker.nodes]
        gpus = _gpus(node, here)
        placed = zip(here, _placements(node, here), gpus, _gpu_ranks(here, gpus), strict=True)
        for worker, where, seen, shared in placed:
            parts[worker.name, node.name] = WorkerPart(worker, node, worker.nodes.index(node.name), where, seen, shared)
    return tuple(parts[worker.name, name] for worker in topology.workers for name in worker.nodes)


def _placements(node: Node, workers: Sequence[WorkerPlace]) -> list[Placement]:
    """Divides the cores of a node among the ranks of its workers; each worker gets the cores of all its ranks."""
    given = [worker.config.threads for worker in workers]
    if not node.core_count:
        if len(workers) > 1 and not all(given) and not node.gpus:
            names = " and ".join(worker.name for worker in workers[:2])
            reason = f"node {node.name!r} has several workers ({names}); set its 'cores'"
            raise StartupError(f"topology: {reason}")
        return [Placement((), threads) for threads in given]
    same = given[0] if len(set(given)) == 1 else 0
    shares = place([worker.ranks_per_node for worker in workers], node.cores or range(node.core_count), same)
    return [
        Placement(share.cores if node.cores else (), threads or share.threads)
        for share, threads in zip(shares, given, strict=True)
    ]


def _gpus(node: Node, workers: Sequence[WorkerPlace]) -> list[str]:
    """Returns the GPUs of a node that each worker may use: those that it names, else one for each rank in turn."""
    in_turn = cycle(node.gpus)
    visible = []
    for worker in workers:
        if worker.config.device == "cpu":
            seen: Iterable[str] = ()
        else:
            seen = worker.devices or dict.fromkeys(islice(in_turn, worker.ranks_per_node))
        visible.append(",".join(seen))
    return visible


def _gpu_ranks(workers: Sequence[WorkerPlace], gpus: Sequence[str]) -> list[int]:
    """Returns for each worker the most ranks, its own and others', on any GPU that it uses; 1 without GPUs."""
    counts: Counter[str] = Counter()
    for worker, seen in zip(workers, gpus, strict=True):
        if seen:
            counts.update(islice(cycle(seen.split(",")), worker.ranks_per_node))
    return [max(counts[name] for name in seen.split(",")) if seen else 1 for seen in gpus]


def _kind_on_shared_gpus(parts: Sequence[WorkerPart]) -> str:
    """Returns the kind of edge where NCCL refuses to connect: between two ranks on one GPU, and between MIG instances,
    which it treats as the GPU that they are part of. If all are on one GPU it is `ipc`, which copies on the GPU, else
    `gloo`: CUDA shares memory neither between MIG instances nor with a process that does not see the GPU. Empty if NCCL
    connects all."""
    divided = any("MIG-" in part.gpus for part in parts)
    if not divided and all(part.gpu_ranks == 1 for part in parts):
        return ""
    used = {(part.node.name, name) for part in parts for name in part.gpus.split(",")}
    return "gloo" if divided or len(used) > 1 else "ipc"


def _with_edge_kind(worker: WorkerPlace, kind: str) -> WorkerPlace:
    """Returns the worker with this kind of edge, unless its options name one."""
    return worker.with_option(edge_kind=kind) if worker.config.edge_kind == "auto" else worker


def _check_collisions(plan: Plan) -> None:
    taken: dict[tuple[str, int], Listener] = {}
    for listener in (listener for listener in plan.listeners() if listener.port):
        other = taken.setdefault((plan.topology.node(listener.node).address or listener.node, listener.port), listener)
        if other is not listener:
            where = f"on node {listener.node!r}"
            raise StartupError(f"{other} and {listener} are both {listener.port} {where}; give them different ports")
