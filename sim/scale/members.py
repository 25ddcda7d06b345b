"""The workers of a replay: they join, drain, and leave or join again in another role."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

from baton.core.commands import Join, Role
from baton.core.compatibility import PROTOCOL_VERSION, Compatibility
from baton.core.errors import InvariantError
from baton.core.kv_layout import KVLayout, LayerKV
from baton.core.prefix_cache import KeptBlocks
from coordinator.policy.membership import DRAINING
from coordinator.policy.pool import Worker
from coordinator.policy.split import STREAM_WEIGHT, Split
from coordinator.policy.workers import WorkerTable
from sim.loop import Loop
from sim.scale.costs import Calibration
from sim.scale.host import Host
from sim.scale.results import Measured
from sim.scale.workers import SimDecodeWorker, SimPrefillWorker, WorkerOwner

FOREVER_S = 1e15


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """A cluster: so many workers, as measured. `cores` has the cores of each worker, prefill first, if all of them, the
    coordinator and the client share one host of `host_cores` cores; empty: every process has cores of its own.
    `front_cores` are those of the coordinator and of the client; empty: whichever is least loaded."""

    prefill: Calibration
    num_prefill: int
    decode: Calibration
    num_decode: int
    cores: tuple[tuple[int, ...], ...] = ()
    host_cores: int = 0
    front_cores: tuple[int, ...] = ()
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 20
    split: Split = "always"
    stream_weight: float = STREAM_WEIGHT


class Flipped(NamedTuple):
    """A worker's name, incarnation and cores, and the blocks that it keeps of its previous role."""

    name: str
    incarnation: int
    kept: KeptBlocks | None
    cores: tuple[int, ...]


class SimMembers:
    """The workers that have joined, by name, and the coordinator's table of them."""

    def __init__(
        self,
        shape: ClusterShape,
        loop: Loop,
        owner: WorkerOwner,
        measured: Measured,
        host: Host | None,
        *,
        prefix_cache: bool,
        fast: bool,
    ) -> None:
        self.table = WorkerTable(FOREVER_S)
        self.prefill: dict[str, SimPrefillWorker] = {}
        self.decode: dict[str, SimDecodeWorker] = {}
        self.layout = _layout(shape.prefill)
        self._shape, self._loop, self._owner, self._measured, self._host = shape, loop, owner, measured, host
        self._prefix_cache, self._fast = prefix_cache, fast
        self._added: Counter[Role] = Counter()
        self._since: dict[str, float] = {}  # when each was started
        self._left_s: dict[Role, float] = {"prefill": 0.0, "decode": 0.0}  # of those that have left

    def present(self) -> list[SimPrefillWorker | SimDecodeWorker]:
        """Returns the workers that have joined and not left, prefill first."""
        return [*self.prefill.values(), *self.decode.values()]

    def worker_s(self, role: Role) -> float:
        """Returns the seconds of all workers of a role so far, each from its start on."""
        names = self.prefill if role == "prefill" else self.decode
        return self._left_s[role] + sum(self._loop.now - self._since[name] for name in names)

    def add(self, role: Role, started_at: float, cores: tuple[int, ...], flipped: Flipped | None = None) -> None:
        """Adds a worker that was started at `started_at`, or one that changes its role."""
        shape = self._shape
        if flipped is None:
            flipped = Flipped(f"{role}-{self._added[role]}", 1, None, cores)
            self._added[role] += 1
        name = flipped.name
        self._since[name] = started_at
        calibration = shape.prefill if role == "prefill" else shape.decode
        known = self._join(name, role, flipped.incarnation, calibration)
        of = known, self._loop, self._owner, calibration, self.layout, self._measured
        how: dict[str, Any] = {"prefix_cache": self._prefix_cache, "counted": self._fast and not self._prefix_cache}
        how |= {"host": self._host, "cores": flipped.cores, "kept": flipped.kept}
        worker: SimPrefillWorker | SimDecodeWorker
        if role == "prefill":
            worker = self.prefill[name] = SimPrefillWorker(*of, **how)
        else:
            worker = self.decode[name] = SimDecodeWorker(*of, **how, at_once=self._fast)
        cache = worker.scheduler.cache
        cache.restart_events()
        while cache.enabled and (events := cache.take_events()) is not None:
            self._owner.cached(name, events)

    def _join(self, name: str, role: Role, incarnation: int, calibration: Calibration) -> Worker:
        kind = calibration.prefill_worker if role == "prefill" else calibration.decode_worker
        facts = Compatibility(
            *(PROTOCOL_VERSION, "", False, "float32", "float32", "none", "baton", "gloo", "", "", 1 << 16),
            max_model_len=calibration.max_model_len,
            layout=self.layout,
        )
        join = Join(
            *(name, role, incarnation, facts),
            blocks_total=kind.blocks,
            step_tokens=kind.step_tokens,
            max_running=kind.max_running,
            computes_prompts=role == "decode",
            both_roles=True,
        )
        return self.table.add(join, self._loop.now, FOREVER_S)

    def drain_least_busy(self, role: Role) -> bool:
        """Drains the ready worker of a role with the least to do; returns whether there was one."""
        ready = [worker for worker in self.table.present() if worker.role == role and worker.ready]
        if not ready:
            return False
        least = min(ready, key=lambda worker: (worker.running, worker.backlog_tokens))
        self.table.drain(least.worker_id, FOREVER_S, self._loop.now)
        return True

    def drain_to_flip(self, name: str, role: Role, by: float) -> Worker:
        """Makes a worker drain until `by` to join again in `role`; returns it."""
        self.table.drain(name, by, self._loop.now, role)
        if (known := self.table.get(name)) is None:
            raise InvariantError(f"{name} drains and is not present")
        return known

    def remove_idle(self) -> None:
        """Removes the draining workers that have nothing left to do, except those that change their roles."""
        for known in [worker for worker in self.table.present() if worker.state is DRAINING]:
            if known.next_role is None:
                self.remove(known)

    def remove(self, known: Worker) -> SimPrefillWorker | SimDecodeWorker | None:
        """Removes and returns a worker; None while it has something to do."""
        role, name = known.role, known.worker_id
        worker = self.prefill[name] if role == "prefill" else self.decode[name]
        if isinstance(worker, SimDecodeWorker):
            worker.interrupt()
        if known.running or known.backlog_tokens or not worker.idle:
            return None
        worker.scheduler.check_idle()
        if isinstance(worker, SimDecodeWorker):
            self._measured.preemptions += worker.scheduler.preemptions
            del self.decode[name]
        else:
            del self.prefill[name]
        self._left_s[role] += self._loop.now - self._since.pop(name)
        self.table.left(name, known.incarnation, self._loop.now)
        return worker


def _layout(calibration: Calibration) -> KVLayout:
    """Returns a layout with the measured block size; the bytes of a token only matter on links, which have their
    own."""
    return KVLayout(calibration.block_size, (LayerKV(1, 1, "float32"),))
