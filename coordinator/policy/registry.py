"""Who belongs to the cluster: joins, leases, states. Pure; the control service acts on what is decided here.

A worker joins with its facts; what it does not have in common with those that are here, and what cannot be, is refused
with the name of the field. Its lease is renewed by its heartbeats. A broken stream alone does not end it: it may redial
within the lease. A newer incarnation replaces an older one at once; an older one is fenced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Literal

from baton.core.commands import Join, Role, WorkerFacts
from baton.core.errors import JoinRefused, StartupError
from baton.core.events import Load
from baton.core.leases import LeaseTable
from baton.core.names import name_error
from baton.core.reshard import MAX_TENSOR_PARALLEL, local_layout
from coordinator.policy.own_model import OwnModel

WorkerState = Literal["joining", "ready", "draining", "lost"]
KEEP_LOST_S = 300.0
_ADDRESS = re.compile(r"[A-Za-z0-9._:\[\]-]+:[0-9]{1,5}")


@dataclass(slots=True)
class WorkerRecord:
    """`joining` is a worker whose stream is broken and whose lease still runs."""

    join: Join
    state: WorkerState
    since: float
    load: Load = field(default_factory=Load)

    @property
    def worker_id(self) -> str:
        return self.join.worker_id

    @property
    def role(self) -> Role:
        return self.join.role


class Registry:
    """Complete state: `_records` by worker id, `leases`, and `_left`: the incarnation of each worker that drained last.
    `own` is the coordinator's own model."""

    def __init__(self, lease_s: float, own: OwnModel | None = None) -> None:
        self.leases = LeaseTable(lease_s)
        self._own = own
        self._records: dict[str, WorkerRecord] = {}
        self._left: dict[str, int] = {}

    def __repr__(self) -> str:
        states = [r.state for r in self._records.values()]
        return "<Registry " + ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states)) + ">"

    def get(self, worker_id: str) -> WorkerRecord | None:
        return self._records.get(worker_id)

    def records(self) -> Iterable[WorkerRecord]:
        return sorted(self._records.values(), key=lambda r: (r.role != "prefill", r.worker_id))

    def join(self, join: Join, now: float) -> WorkerRecord | None:
        """Takes a worker in. Returns the record it replaces when that was another incarnation not yet lost.

        Raises:
            JoinRefused: it does not fit; the message names the field and both values.
        """
        _check_possible(join)
        difference = self._own.difference(join.facts) if self._own is not None else None
        if difference is not None:
            raise _refused(join, difference)
        for other in self._records.values():
            if other.state == "lost" or other.worker_id == join.worker_id:
                continue
            difference = other.join.facts.first_difference(join.facts)
            if difference is not None:
                raise _refused(join, difference + _whose(difference, join, other))
        known = self._records.get(join.worker_id)
        if known is not None and known.state != "lost" and known.role != join.role:
            raise _refused(join, f"role: {join.worker_id} is a {known.role} worker and {join.role} joins")
        if self.has_left(join.worker_id, join.incarnation):
            raise _refused(join, f"incarnation: {join.incarnation} has drained and left")
        if not self.leases.grant(join.worker_id, join.incarnation, now):
            later = f"another worker has joined as {join.worker_id} since this one started"
            raise _refused(join, f"incarnation: {later} ({join.incarnation} is older)")
        record = self._records[join.worker_id] = WorkerRecord(join, "ready", now)
        if known is None:
            return None
        if known.join.incarnation == join.incarnation:
            record.load = known.load
            record.state = "draining" if known.state == "draining" else "ready"
            return None
        return None if known.state == "lost" else known

    def facts(self) -> WorkerFacts | None:
        """What the workers have in common, if there are any."""
        for record in self._records.values():
            if record.state != "lost":
                return record.join.facts
        return None

    def heard(self, worker_id: str, incarnation: int, load: Load | None, now: float) -> bool:
        """Renews a lease. False when the worker is fenced: its lease has run out or a newer incarnation is here."""
        if not self.leases.renew(worker_id, incarnation, now):
            return False
        if load is not None:
            self._records[worker_id].load = load
        return True

    def disconnected(self, worker_id: str, incarnation: int, now: float) -> bool:
        """Its stream broke; it keeps its lease. False when it is no longer the one we know."""
        record = self._records.get(worker_id)
        if record is None or record.join.incarnation != incarnation or record.state == "lost":
            return False
        if record.state != "draining":
            record.state, record.since = "joining", now
        return True

    def draining(self, worker_id: str, now: float) -> None:
        record = self._records.get(worker_id)
        if record is not None and record.state != "lost":
            record.state, record.since = "draining", now

    def left(self, worker_id: str, incarnation: int) -> None:
        """It drained and said so: it is forgotten, and does not come back."""
        record = self._records.get(worker_id)
        if record is not None and record.join.incarnation == incarnation:
            del self._records[worker_id]
            self.leases.drop(worker_id, incarnation)
            self._left[worker_id] = incarnation

    def has_left(self, worker_id: str, incarnation: int | None) -> bool:
        return incarnation is not None and self._left.get(worker_id) == incarnation

    def expire(self, now: float) -> list[WorkerRecord]:
        """Marks as lost, and returns, those whose lease has run out."""
        lost: list[WorkerRecord] = []
        for lease in self.leases.expire(now):
            record = self._records.get(lease.holder)
            if record is not None and record.join.incarnation == lease.incarnation:
                record.state, record.since = "lost", now
                lost.append(record)
        for worker_id in [w for w, r in self._records.items() if r.state == "lost" and now - r.since > KEEP_LOST_S]:
            del self._records[worker_id]
        return lost

    def table(self, now: float) -> list[dict[str, object]]:
        """The `/workers` table."""
        return [
            {
                "id": r.worker_id,
                "role": r.role,
                "tensor_parallel": r.join.facts.tensor_parallel,
                "host": r.join.host,
                "state": r.state,
                "since_s": round(max(now - r.since, 0.0), 1),
                "incarnation": r.join.incarnation,
                "pids": list(r.join.pids),
                "address": r.join.link_address or r.join.host,
                "blocks_total": r.load.blocks_total or r.join.blocks_total,
                "blocks_free": r.load.blocks_free,
                "running": r.load.running,
                "waiting": r.load.waiting,
                "prompt_tokens_computed": r.load.prompt_tokens_computed,
                "prompt_tokens_cached": r.load.prompt_tokens_cached,
                "tokens_generated": r.load.tokens_generated,
                "kv_bytes_sent": r.load.kv_bytes_sent,
                "kv_bytes_received": r.load.kv_bytes_received,
                "kv_bytes_reused": r.load.kv_bytes_reused,
                "steps": r.load.steps,
                "steps_ahead": r.load.steps_ahead,
                "rows_discarded": r.load.rows_discarded,
                "sequences": r.load.sequences,
                "preemptions": r.load.preemptions,
                "speculation": None if r.load.speculation is None else asdict(r.load.speculation),
                "handles_refused": r.load.handles_refused,
                "stale_messages": r.load.stale_messages,
                "chunks_resent": r.load.chunks_resent,
                "chunks_early": r.load.chunks_early,
                "links_refused": r.load.links_refused,
            }
            for r in self.records()
        ]


def _check_possible(join: Join) -> None:
    """Raises JoinRefused for what no worker of ours says about itself."""
    if wrong := name_error(join.worker_id):
        raise JoinRefused(f"{join.role} worker refused: worker_id: {wrong}", param="worker_id")
    for name, size, least in (
        ("block_size", join.facts.layout.block_size, 1),
        ("blocks_total", join.blocks_total, 1),
        ("step_tokens", join.step_tokens, 0),
    ):
        if size < least:
            raise _refused(join, f"{name}: {size} is no size")
    ranks = join.facts.tensor_parallel
    if not 1 <= ranks <= MAX_TENSOR_PARALLEL:
        raise _refused(join, f"tensor_parallel: {ranks} ranks are not 1 to {MAX_TENSOR_PARALLEL}")
    if join.pids and len(join.pids) != ranks:
        raise _refused(join, f"tensor_parallel: {ranks} ranks with {len(join.pids)} pids")
    try:
        local_layout(join.facts.layout, ranks, 0)
    except StartupError as e:
        raise _refused(join, f"tensor_parallel: {e.message}") from None
    if join.role == "decode" and _ADDRESS.fullmatch(join.link_address) is None:
        raise _refused(join, f"link_address: {join.link_address[:100]!r} is not HOST:PORT")


def _whose(difference: str, join: Join, other: WorkerRecord) -> str:
    """Which worker has the other value: digests, and numbers alone, tell nobody."""
    if not difference.startswith("model_digest: "):
        return f"; the first is that of {other.worker_id}"
    what = "weights" if join.facts.config_digest == other.join.facts.config_digest else "config.json"
    return f"; its {what} differ from what {other.worker_id} has on host {other.join.host[:253]!a}"


def _refused(join: Join, difference: str) -> JoinRefused:
    return JoinRefused(f"{join.role} worker {join.worker_id} refused: {difference}", param=difference.split(":")[0])
