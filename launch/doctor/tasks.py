"""What the doctor checks for a plan, and what each of its probes does. Pure.

One probe represents each rank, on the rank's node and with its address and ports. All probes run the same steps:

1. rendezvous   a worker's ranks meet in a store at the leader's rendezvous address
2. all-reduce   all ranks of a worker dial each other, then compute a sum over all
3. link         a prefill leader dials a decode worker's link port
4. edge         each prefill rank and each decode rank that share KV heads connect and move bytes
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from itertools import product
from typing import Any

from baton.core.commands import Role
from baton.core.reshard import reshard
from launch.plan import Plan

STEPS = ("rendezvous", "all-reduce", "link", "edge")


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank of a worker and the address of its node."""

    worker: str
    rank: int
    host: str

    @property
    def key(self) -> str:
        return f"{self.worker}.{self.rank}"

    def __str__(self) -> str:
        return f"{self.worker} rank {self.rank} ({self.host})"


@dataclass(frozen=True, slots=True)
class Task:
    """What one probe does. `ranks` are all ranks of its worker, itself included; `peers` the ranks at the other ends of
    its edges; `links` the decode leaders whose link port it dials."""

    me: Rank
    role: Role
    ranks: tuple[Rank, ...]
    peers: tuple[Rank, ...]
    links: tuple[Rank, ...]
    rendezvous_port: int
    link_port: int
    store_port: int
    device: str
    edge_kind: str
    local_rank: int
    limit_s: float

    @property
    def leads(self) -> bool:
        return self.me.rank == 0

    def expected(self, step: str) -> dict[str, Rank]:
        """Returns the names of its results of a step, and the rank that it tries each with: itself where the step
        involves only its own worker."""
        if step in ("rendezvous", "all-reduce"):
            return {f"{step}/{self.me.key}": self.me} if len(self.ranks) > 1 else {}
        if step == "link":
            return {f"link/{self.me.key}/{leader.key}": leader for leader in self.links}
        side = "edge" if self.role == "prefill" else "end"
        return {f"{side}/{self.me.key}/{peer.key}": peer for peer in self.peers}

    def step_s(self, step: str) -> float:
        """Returns how long a step may take: a prefill rank's connected edges move their bytes one by one."""
        return self.limit_s * (1 + len(self.peers) if step == "edge" else 1)


def task_from_json(fields: dict[str, Any]) -> Task:
    """Inverse of `asdict`."""
    ranks = {name: tuple(Rank(**rank) for rank in fields[name]) for name in ("ranks", "peers", "links")}
    return Task(**{**fields, **ranks, "me": Rank(**fields["me"])})


def exited_key(probe: str) -> str:
    """Returns the name under which a doctor reports why a probe of its host has exited."""
    return f"exited/{probe}"


def make_tasks(plan: Plan, heads_per_layer: tuple[int, ...], limit_s: float) -> dict[str, list[Task]]:
    """Returns the tasks of each node. Without `heads_per_layer` (no model here) every prefill rank gets an edge to
    every decode rank."""
    ranks = {worker.name: _ranks(plan, worker.name) for worker in plan.topology.workers}
    prefills, decodes = ([w for w in plan.topology.workers if w.role == role] for role in ("prefill", "decode"))
    peers: defaultdict[Rank, list[Rank]] = defaultdict(list)
    for prefill, decode in product(prefills, decodes):
        for p, d in _pairs(heads_per_layer, prefill.tensor_parallel, decode.tensor_parallel):
            sender, receiver = ranks[prefill.name][p], ranks[decode.name][d]
            peers[sender].append(receiver)
            peers[receiver].append(sender)
    tasks: dict[str, list[Task]] = {node.name: [] for node in plan.topology.nodes}
    for part in plan.parts:
        worker, config = part.worker, part.worker.config
        for local in range(part.ranks):
            me = ranks[worker.name][part.node_rank * part.ranks + local]
            dials = worker.role == "prefill" and me.rank == 0
            task = Task(
                me,
                worker.role,
                ranks[worker.name],
                tuple(peers[me]),
                tuple(ranks[decode.name][0] for decode in decodes) if dials else (),
                worker.rendezvous_port,
                config.link_port,
                config.store_port,
                config.device,
                config.edge_kind,
                local,
                limit_s,
            )
            tasks[part.node.name].append(task)
    return tasks


def plan_digest(plan: Plan) -> str:
    """Returns a digest, equal for equal plans: two nodes must agree on it before they measure together."""
    return hashlib.sha256(repr((plan.topology, plan.model)).encode()).hexdigest()


def _ranks(plan: Plan, worker: str) -> tuple[Rank, ...]:
    parts = [part for part in plan.parts if part.worker.name == worker]
    hosts = [part.node.address for part in parts for _ in range(part.ranks)]
    return tuple(Rank(worker, rank, host) for rank, host in enumerate(hosts))


def _pairs(heads: tuple[int, ...], prefill_tp: int, decode_tp: int) -> list[tuple[int, int]]:
    if not heads:
        return list(product(range(prefill_tp), range(decode_tp)))
    return [(edge.prefill_rank, edge.decode_rank) for edge in reshard(heads, prefill_tp, decode_tp)]
