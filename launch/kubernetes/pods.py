"""From a topology to the pods of a cluster and their commands. Pure.

A worker's part on a node becomes a pod of its own, with an address of its own. Workers that differ in nothing but
names, ports, and the cores that their nodes have left for them are one pool, whose members its set numbers; each has
the cores of the one with the fewest. What the kubelet or the set knows only when a pod
starts is a variable of the container, which Kubernetes expands in commands as `$(NAME)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from baton.core.commands import Role
from baton.core.errors import StartupError
from baton.core.names import host_port
from launch.members import Programs
from launch.plan import COORDINATOR, LOOPBACK, Plan, WorkerPart, make_plan
from launch.plan_checks import check_plan
from launch.topology import Node, Topology, WorkerPlace

HEALTH_PORT = 9100
POD_IP = "$(POD_IP)"
PROGRAMS = Programs(
    ("python", "-m", "coordinator"), ("python", "-m", "launch.agent"), batches=("python", "-m", "batches")
)
_OWN_PORTS = ("link_port", "store_port", "health_port")
"""Options of a worker that differ only because workers of one host share its ports."""


@dataclass(frozen=True, slots=True)
class PodPool:
    """Workers that are alike: `replicas` groups of `size` pods, of which the first one leads."""

    name: str
    role: Role
    replicas: int
    parts: tuple[WorkerPart, ...]

    @property
    def size(self) -> int:
        return len(self.parts)

    @property
    def health_port(self) -> int:
        return self.parts[0].worker.config.health_port

    def gpus(self, rank: int) -> int:
        """The number of GPUs of a pod."""
        return len(self.parts[rank].node.gpus)


@dataclass(frozen=True, slots=True)
class PodPlan:
    """The plan of a topology whose nodes are pods, and its pools."""

    plan: Plan
    pools: tuple[PodPool, ...]

    def coordinator_command(self) -> list[str]:
        words = [*PROGRAMS.coordinator, *self.plan.coordinator_command()]
        return _expanded(words, {"--control-host": POD_IP, "--host": self._host})

    def batches_command(self) -> list[str]:
        """Returns the command of the batches process, in the coordinator's pod."""
        scheme = self.plan.url.partition("://")[0]
        here = host_port("::1" if self._host == "::" else LOOPBACK, self.plan.topology.coordinator.config.port)
        return _expanded([*PROGRAMS.batches, *self.plan.batches_command(f"{scheme}://{here}")], {})

    def worker_command(self, pool: PodPool, rank: int, coordinator: str) -> list[str]:
        """Returns the command of the leader (rank 0) or of a follower (any other rank) of a pool. `coordinator` is the
        name of the Service that workers dial."""
        port = self.plan.topology.coordinator.config.control_port
        words = PROGRAMS.of_part(self.plan, pool.parts[rank], host_port(coordinator, port))
        known = {"--host": POD_IP, "--worker-id": "$(GROUP_NAME)-$(GROUP_INDEX)"}
        if pool.size > 1:
            known |= {"--nnodes": "$(LWS_GROUP_SIZE)", "--node-rank": "$(LWS_WORKER_INDEX)"}
            # A leader does not wait until its name is known to DNS: it binds its own address.
            known["--master-addr"] = "$(LWS_LEADER_ADDRESS)" if rank else POD_IP
        return _expanded(words, known)

    @property
    def _host(self) -> str:
        given = self.plan.topology.coordinator.config.host
        return given if given == "::" else "0.0.0.0"


def pod_plan(topology: Topology, model: str, served_name: str) -> PodPlan:
    """Returns the pods of a topology.

    Raises:
        StartupError: the topology is refused, as a whole or when its workers share no node.
    """
    placed = make_plan(topology, model, served_name)
    check_plan(placed, {})
    by_worker: dict[str, list[WorkerPart]] = {}
    for part in placed.parts:
        by_worker.setdefault(part.worker.name, []).append(part)
    alike: dict[object, list[WorkerPlace]] = {}
    for worker in topology.workers:
        gpus = [_gpus(part) for part in by_worker[worker.name]]
        if len(set(gpus[1:])) > 1:
            reason = "the nodes after its first one differ in GPUs; the pods that follow a leader are alike"
            raise StartupError(f"{worker.name}: {reason}")
        options = sorted((key, repr(value)) for key, value in worker.options.items() if key not in _OWN_PORTS)
        alike.setdefault((worker.role, worker.tensor_parallel, *gpus, *options), []).append(worker)
    groups = list(alike.values())
    nodes, places = [Node(COORDINATOR, COORDINATOR)], []
    for name, group in zip(_names([group[0].role for group in groups]), groups, strict=True):
        worker = group[0]
        pods = [f"{name}-{rank}" for rank in range(len(worker.nodes))]
        threads = min(part.placement.threads for other in group for part in by_worker[other.name])
        nodes += [
            Node(pod, pod, (), threads, _gpus(part)) for pod, part in zip(pods, by_worker[worker.name], strict=True)
        ]
        port = worker.config.health_port or HEALTH_PORT
        place = replace(worker, name=name, nodes=tuple(pods), devices=())
        places.append(place.with_option(health_port=port))
    # The workers join the next coordinator: only its pod ends, when it is replaced or its node is drained.
    of_coordinator = {**topology.coordinator.options, "drain_workers": False}
    coordinator = replace(topology.coordinator, node=COORDINATOR, options=of_coordinator)
    pods_of = replace(topology, nodes=tuple(nodes), coordinator=coordinator, workers=tuple(places))
    plan = make_plan(pods_of, model, served_name)
    check_plan(plan, {})
    pools = [
        PodPool(place.name, place.role, len(group), tuple(p for p in plan.parts if p.worker.name == place.name))
        for place, group in zip(plan.topology.workers, groups, strict=True)
    ]
    return PodPlan(plan, tuple(pools))


def _gpus(part: WorkerPart) -> tuple[str, ...]:
    """Returns the GPUs of a part. They are only counted, since a node gives a pod any of its own; MIG instances keep
    their names, which decide the kind of edge."""
    gpus = tuple(part.gpus.split(",")) if part.gpus else ()
    return gpus if "MIG-" in part.gpus else tuple(map(str, range(len(gpus))))


def _names(roles: Sequence[Role]) -> list[str]:
    """Returns the names of pools: the role's, with a number if it has several."""
    return [
        role if roles.count(role) == 1 else f"{role}-{roles[:index].count(role)}" for index, role in enumerate(roles)
    ]


def _expanded(words: Sequence[str], known: Mapping[str, str]) -> list[str]:
    """Returns the words of a command as Kubernetes reads them. `known` are flags whose value is known only in the pod;
    in all other words a `$` is literal."""
    out: list[str] = []
    for word in words:
        out.append(known.get(out[-1] if out else "", word.replace("$", "$$")))
    return out
