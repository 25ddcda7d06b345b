"""The worker table: which workers exist, their state and lease, and what routing knows of each. Pure.

States of a worker:

    ready     its session is open and it takes new work
    joining   its session broke; it may redial until its lease ends, and keeps its sequences
    draining  it takes no new work, finishes or gives back what it has, and leaves
    lost      its lease ended, or a newer incarnation replaced it; an entry stays for `/workers` for a while

A lease belongs to the session of worker and coordinator and is renewed by each message. A worker whose lease has ended
is fenced: its messages are refused until it joins again. While a worker holds its lease, an older incarnation of its
name is refused; numbers are times, so that one that follows a dead worker may be lower where a clock was set back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, NamedTuple

from baton.core.commands import Join, Role, WorkerFacts
from baton.core.errors import InvariantError, NotFound
from baton.core.events import KVCacheEvents, Load
from coordinator.policy.joining import OwnModel, check_join, refused

WorkerState = Literal["joining", "ready", "draining", "lost"]
KEEP_LOST_S = 300.0
AHEAD_SHARE = 8
_NO_LIMIT = 1 << 30
# Hints (baton.core.prefix_keys) of a request's full blocks, by block size: the two pools may differ in it.
Prefix = Mapping[int, tuple[bytes, ...]]


class HeldBlocks:
    """Complete state: the hints of the blocks that one worker can reuse, at most `limit`, the size of its pool.

    Events take time to arrive and a block may be evicted before a request arrives, so this is advice to routing only.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._hints: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._hints)

    def update(self, events: KVCacheEvents) -> None:
        if events.cleared:
            self._hints.clear()
        self._hints.difference_update(events.evicted)
        self._hints.update(events.stored[: max(0, self._limit - len(self._hints))])

    def count(self, prefix: tuple[bytes, ...]) -> int:
        """Length in blocks of the longest prefix, given by its hints in order, that the worker holds."""
        for count, hint in enumerate(prefix):
            if hint not in self._hints:
                return count
        return len(prefix)


@dataclass(slots=True, eq=False, repr=False)
class Worker:
    """One incarnation of a worker. Times are seconds on the caller's lease clock; `drain_by` is when a draining worker
    gives back what it still has. `load` is what it reported last.

    `reserved_blocks`, `backlog_tokens` and `running` count what the dispatcher has placed here: blocks only until the
    KV has arrived, from then on they are part of the worker's own report.
    """

    join: Join
    since: float
    lease_until: float
    state: WorkerState = "ready"
    connected: bool = True
    drain_by: float | None = None
    load: Load | None = None
    reserved_blocks: int = 0
    backlog_tokens: int = 0
    running: int = 0
    held: HeldBlocks = field(init=False)

    def __post_init__(self) -> None:
        self.held = HeldBlocks(self.join.blocks_total)

    def __repr__(self) -> str:
        placed = f"{self.reserved_blocks} blocks, {self.backlog_tokens} tokens, {self.running} running"
        return f"<Worker {self.worker_id} {self.state} | {placed}>"

    @property
    def worker_id(self) -> str:
        return self.join.worker_id

    @property
    def role(self) -> Role:
        return self.join.role

    @property
    def incarnation(self) -> int:
        return self.join.incarnation

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    @property
    def lost(self) -> bool:
        return self.state == "lost"

    @property
    def block_size(self) -> int:
        return self.join.facts.layout.block_size

    @property
    def step_tokens(self) -> int:
        return max(self.join.step_tokens, 1)

    @property
    def max_tokens(self) -> int:
        """The longest sequence that an idle worker can hold."""
        return min(self.join.facts.max_model_len, self.join.blocks_total * self.block_size)

    @property
    def max_running(self) -> int:
        """Sequences that may be placed here: those that run at once, and some whose prompts compute meanwhile, so that
        no place stays empty. The others wait in the queue, where any worker can take them."""
        running = self.join.max_running
        return running + max(running // AHEAD_SHARE, 1) if running else _NO_LIMIT

    def blocks_left(self, growth: int) -> int:
        """Blocks for one more sequence, after `growth` blocks for those that run here; 0 while preempted sequences wait
        for blocks."""
        if self.running == 0:
            return self.join.blocks_total
        if self.load is None:
            return self.join.blocks_total - self.reserved_blocks - growth
        return 0 if self.load.preempted else self.load.blocks_free - self.reserved_blocks - growth

    def held_tokens(self, prefix: Prefix) -> int:
        return self.held.count(prefix.get(self.block_size, ())) * self.block_size

    def row(self, now: float) -> dict[str, object]:
        """One row of `/workers`."""
        load = self.load or Load()
        return {
            "id": self.worker_id,
            "role": self.role,
            "tensor_parallel": self.join.facts.tensor_parallel,
            "host": self.join.host,
            "state": self.state,
            "since_s": round(max(now - self.since, 0.0), 1),
            "incarnation": self.incarnation,
            "pids": list(self.join.pids),
            "address": self.join.link_address or self.join.host,
            "blocks_total": load.blocks_total or self.join.blocks_total,
            **{name: getattr(load, name) for name in _LOAD_COLUMNS},
            "speculation": None if load.speculation is None else asdict(load.speculation),
        }


_LOAD_COLUMNS = (
    "blocks_free",
    "running",
    "waiting",
    "prompt_tokens_computed",
    "prompt_tokens_cached",
    "tokens_generated",
    "kv_bytes_sent",
    "kv_bytes_received",
    "kv_bytes_reused",
    "steps",
    "steps_ahead",
    "rows_discarded",
    "sequences",
    "preemptions",
    "handles_refused",
    "stale_messages",
    "chunks_resent",
    "chunks_early",
    "links_refused",
)


class Joined(NamedTuple):
    """`resumed`: the same incarnation has redialled and keeps its sequences. `replaced`: another incarnation that was
    still present."""

    worker: Worker
    resumed: bool
    replaced: Worker | None


class WorkerTable:
    """Complete state: `_workers` by name; `_left`, the incarnation that drained last under each name. `own` is the
    coordinator's model."""

    def __init__(self, lease_s: float, own: OwnModel | None = None) -> None:
        if not lease_s > 0:
            raise InvariantError(f"a lease of {lease_s} s can never be held")
        self.lease_s = lease_s
        self._own = own
        self._workers: dict[str, Worker] = {}
        self._left: dict[str, int] = {}

    def __repr__(self) -> str:
        states = [w.state for w in self._workers.values()]
        return "<WorkerTable " + ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states)) + ">"

    def get(self, worker_id: str) -> Worker | None:
        """The present worker of that name."""
        worker = self._workers.get(worker_id)
        return None if worker is None or worker.lost else worker

    def incarnation(self, worker_id: str) -> int | None:
        worker = self.get(worker_id)
        return None if worker is None else worker.incarnation

    def connected(self, worker_id: str) -> bool:
        worker = self.get(worker_id)
        return worker is not None and worker.connected

    def present(self) -> Iterable[Worker]:
        return [w for w in self._workers.values() if not w.lost]

    def all(self) -> Iterable[Worker]:
        """Lost ones too, prefill first."""
        return sorted(self._workers.values(), key=lambda w: (w.role != "prefill", w.worker_id))

    def facts(self) -> WorkerFacts | None:
        """What the present workers have in common, if there are any."""
        return next((w.join.facts for w in self._workers.values() if not w.lost), None)

    def join(self, join: Join, now: float) -> Joined:
        """Takes a worker in.

        Raises:
            JoinRefused: it does not fit; the message names the field and both values.
        """
        check_join(join, (w.join for w in self.present() if w.worker_id != join.worker_id), self._own)
        name, known = join.worker_id, self.get(join.worker_id)
        if known is not None and known.role != join.role:
            raise refused(join, f"role: {name} is a {known.role} worker and {join.role} joins")
        if self.has_left(name, join.incarnation):
            raise refused(join, f"incarnation: {join.incarnation} has drained and left")
        if known is not None and known.incarnation > join.incarnation:
            later = f"another worker has joined as {name} since this one started"
            raise refused(join, f"incarnation: {later} ({join.incarnation} is older)")
        if known is not None and known.incarnation == join.incarnation:
            known.join, known.connected, known.lease_until = join, True, now + self.lease_s
            if known.state == "joining":
                known.state, known.since = "ready", now
            return Joined(known, resumed=True, replaced=None)
        worker = self._workers[name] = Worker(join, now, now + self.lease_s)
        return Joined(worker, resumed=False, replaced=known)

    def renew_lease(self, worker_id: str, incarnation: int, load: Load | None, now: float) -> bool:
        """False when the worker is fenced: its lease has ended or a newer incarnation is here."""
        worker = self.get(worker_id)
        if worker is None or worker.incarnation != incarnation or worker.lease_until <= now:
            return False
        worker.lease_until = now + self.lease_s
        if load is not None:
            worker.load = load
        return True

    def disconnected(self, worker_id: str, incarnation: int, now: float) -> bool:
        """Its session broke; it keeps its lease. False when it is not the present incarnation."""
        worker = self.get(worker_id)
        if worker is None or worker.incarnation != incarnation:
            return False
        worker.connected = False
        if worker.state == "ready":
            worker.state, worker.since = "joining", now
        return True

    def drain(self, worker_id: str, by: float, now: float) -> None:
        """It takes no new work from now on, and gives back what it has at `by` at the latest.

        Raises:
            NotFound: no such worker is present.
        """
        worker = self.get(worker_id)
        if worker is None:
            raise NotFound(f"no worker {worker_id[:128]!r} is in this cluster", param="worker_id")
        worker.drain_by = by if worker.drain_by is None else min(by, worker.drain_by)
        if worker.state != "draining":
            worker.state, worker.since = "draining", now

    def left(self, worker_id: str, incarnation: int) -> None:
        """It has drained: it is removed, and this incarnation does not come back."""
        if self.incarnation(worker_id) == incarnation:
            del self._workers[worker_id]
            self._left[worker_id] = incarnation

    def has_left(self, worker_id: str, incarnation: int | None) -> bool:
        return incarnation is not None and self._left.get(worker_id) == incarnation

    def expire(self, now: float) -> list[Worker]:
        """Marks as lost, and returns, those whose lease has ended; removes those lost long ago."""
        expired = [w for w in self._workers.values() if not w.lost and w.lease_until <= now]
        for worker in expired:
            worker.state, worker.since, worker.connected = "lost", now, False
        self._workers = {n: w for n, w in self._workers.items() if not w.lost or now - w.since <= KEEP_LOST_S}
        return expired
