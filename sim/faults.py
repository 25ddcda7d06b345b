"""Faults of a whole cluster, drawn from its generator: processes die, pause and drain, hosts vanish, networks part, and
streams break. Faults of single messages and chunks are `NetworkFaults` and `ChunkFaults`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from baton.core.commands import Role
from sim.cluster import SimCluster
from sim.process import Process

KINDS = (
    "kill",
    "vanish",
    "pause",
    "partition",
    "break",
    "drain",
    "leave",
    "kill coordinator",
    "pause coordinator",
    "repeat offer",
)


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """One of `kinds`, with weights, about every `every_s` seconds; a pause or partition lasts at most `most_s`."""

    kinds: dict[str, float]
    every_s: float = 1.0
    most_s: float = 6.0


class Injector:
    """Injects faults, from its construction on until `stop`."""

    def __init__(self, cluster: SimCluster, plan: FaultPlan) -> None:
        self.counts: Counter[str] = Counter()
        self._cluster, self._plan, self._loop = cluster, plan, cluster.loop
        self._names, self._weights = list(plan.kinds), list(plan.kinds.values())
        self._active = bool(plan.kinds)
        if self._active:
            self._next()

    def stop(self) -> None:
        """Ends all faults: networks heal, processes continue, and those that ended are started again."""
        cluster = self._cluster
        self._active = False
        self._loop.note("faults end")
        faults, chunks = cluster.network.faults, cluster.chunk_faults
        faults.broken = faults.delayed = chunks.damaged = chunks.edge_failed = chunks.no_staging = 0.0
        cluster.poison.clear()
        cluster.network.heal_all()
        for process in cluster.processes():
            if process.paused:
                process.resume()
        for name, worker in cluster.workers.items():
            known = cluster.coordinator.workers.get(name)
            flips = worker.next_role is not None or (known is not None and known.next_role is not None)
            if flips or worker.tier.role[0] != name[0]:
                cluster.kill(name)  # its supervisor starts it in its own role

    def _next(self) -> None:
        self._loop.later(self._loop.random.expovariate(1.0 / self._plan.every_s), self._inject)

    def _inject(self) -> None:
        if not self._active:
            return
        draw, cluster = self._loop.random, self._cluster
        kind = draw.choices(self._names, self._weights)[0]
        self.counts[kind] += 1
        name = draw.choice(list(cluster.workers))
        worker = cluster.workers[name]
        match kind:
            case "kill" | "vanish":
                cluster.kill(name, silently=kind == "vanish")
            case "pause":
                self._pause(worker)
            case "pause coordinator":
                self._pause(cluster.coordinator)
            case "kill coordinator":
                cluster.kill_coordinator()
            case "drain":
                self._loop.note("drain", worker)
                cluster.coordinator.receives(cluster.coordinator.drain_worker, name, draw.random() * 2.0)
            case "flip":
                self._loop.note("flip", worker)
                role: Role = "decode" if worker.tier.role == "prefill" else "prefill"
                timeout_s = draw.random() * 2.0
                cluster.coordinator.receives(cluster.coordinator.drain_worker, name, timeout_s, role)
            case "leave":
                self._loop.note("leave", worker)
                worker.receives(worker.leave, draw.random() * 2.0)
            case "partition":
                self._partition(name)
            case "break":
                self._break()
            case "repeat offer":
                cluster.repeat_offer()
        self._next()

    def _pause(self, process: Process) -> None:
        if process.alive and not process.paused:
            self._loop.note("pause", process)
            process.pause()
            self._loop.later(self._loop.random.random() * self._plan.most_s, self._resume, process)

    def _resume(self, process: Process) -> None:
        if process.paused:
            self._loop.note("resume", process)
            process.resume()

    def _partition(self, name: str) -> None:
        """Parts a worker from one other process, or from all, in one direction or both."""
        draw, cluster = self._loop.random, self._cluster
        peers = [p.name for p in cluster.processes() if p.name != name]
        for peer in peers if draw.random() < 0.3 else [draw.choice(peers)]:
            ways = draw.choice(("to", "from", "both"))
            pairs = [(name, peer)] * (ways != "from") + [(peer, name)] * (ways != "to")
            self._loop.note("partition", *pairs)
            for source, to in pairs:
                cluster.network.partition(source, to)
            self._loop.later(draw.random() * self._plan.most_s, self._heal, pairs)

    def _heal(self, pairs: list[tuple[str, str]]) -> None:
        self._loop.note("heal", *pairs)
        for source, to in pairs:
            self._cluster.network.heal(source, to)

    def _break(self) -> None:
        ends = [end for process in self._cluster.processes() for end in process.ends]
        if ends:
            self._cluster.network.break_stream(self._loop.random.choice(ends), "the connection broke")
