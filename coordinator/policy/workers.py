"""The worker table: which workers exist, their class and lease. Pure; the states of a worker are in membership.py, its
routing state in pool.py. A lost worker's entry stays in `/workers` for KEEP_LOST_S.

A lease belongs to the session between worker and coordinator, renewed by each message. A worker whose lease has ended
is fenced: its messages are refused until it joins again. While a worker has its lease, an older incarnation of its
name is refused, and while its session is open, a newer one too, unless that asks to replace it, as a supervisor does at
a restart. Incarnations are timestamps: after a clock was set back, a lost worker's successor may have a lower one.

A class is a revision (`--revision` of its workers) in one domain (`--domain`), with one protocol version. Within a
revision all workers serve the same model in the same way (`coordinator.policy.joining`); within a class every prefill
worker can hand KV over to every decode worker. A request uses the workers of one class. It moves to another one only as
tokens, its prompt and its output so far, and once it has output only where that is continued by the same model
(`continues`). A class in which a role has no worker gets no request that needs that role.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

from baton.core.commands import Join, Role
from baton.core.compatibility import Compatibility, Difference, difference
from baton.core.errors import InvalidRequest, InvariantError, NotFound
from baton.core.events import GpuUsage, Load
from coordinator.policy.joining import OwnModel, check_join, refused
from coordinator.policy.membership import DRAINING, DrainBegan, LeaseEnded, Left, Redialled, Replaced, SessionBroke
from coordinator.policy.pool import Pool, Worker
from coordinator.policy.split import HandOverCost


class ClassKey(NamedTuple):
    revision: str
    domain: str
    protocol_version: int


def class_key(join: Join) -> ClassKey:
    return ClassKey(join.revision, join.domain, join.facts.protocol_version)


@dataclass(frozen=True, slots=True, eq=False)
class WorkerClass:
    """The present workers of a class. It remains while it is empty, for the limits of the workers that it had last."""

    key: ClassKey
    prefill: Pool
    decode: Pool
    hand_over_cost: HandOverCost = field(default_factory=HandOverCost)

    @property
    def pools(self) -> tuple[Pool, Pool]:
        return self.prefill, self.decode

    def pool(self, role: Role) -> Pool:
        return self.prefill if role == "prefill" else self.decode

    @property
    def workers(self) -> list[Worker]:
        return [*self.prefill.workers, *self.decode.workers]

    @property
    def changes(self) -> int:
        """How often a worker joined, left or changed its state or adapters."""
        return self.prefill.changes + self.decode.changes

    @property
    def facts(self) -> Compatibility | None:
        """The facts that its workers share, if there are any."""
        return next((worker.join.facts for pool in self.pools for worker in pool.workers), None)


def continues(before: Compatibility, after: Compatibility) -> Difference | None:
    """Returns the first field that prevents workers with the facts `after` from continuing the output of workers with
    the facts `before`; None if they can. In exact mode they must also generate the same tokens."""
    names = ["model_digest", "tokenizer_digest", "exact", "quantize"]
    if before.exact:
        names += ["dtype", "kv_dtype", "model_impl"]
    a, b = asdict(before), asdict(after)
    return difference({name: a[name] for name in names}, {name: b[name] for name in names})


KEEP_LOST_S = 300.0


class Joined(NamedTuple):
    """`replaced`: an earlier incarnation that was still present."""

    worker: Worker
    replaced: Worker | None


class WorkerTable:
    def __init__(self, lease_s: float, own: OwnModel | None = None) -> None:
        if not lease_s > 0:
            raise InvariantError(f"the lease must be above 0 s, not {lease_s} s")
        self.lease_s = lease_s
        self._own = own  # the coordinator's model
        self._workers: dict[str, Worker] = {}  # by name
        self._left: dict[str, int] = {}  # the last incarnation that drained under each name
        self._next_roles: dict[str, Role] = {}  # of workers that drained to join again
        self.flips: Counter[Role] = Counter()  # workers that joined again in another role, by that role
        self._classes: dict[ClassKey, WorkerClass] = {}  # with present workers, and the last ones that had any
        self._earlier: dict[Role, Counter[str]] = {"prefill": Counter(), "decode": Counter()}  # totals of other classes
        self._expired_at: float | None = None  # the last call of `expire`

    def get(self, worker_id: str) -> Worker | None:
        """Returns the present worker of that name, if any."""
        worker = self._workers.get(worker_id)
        return None if worker is None or worker.lost else worker

    def incarnation(self, worker_id: str) -> int | None:
        worker = self.get(worker_id)
        return None if worker is None else worker.incarnation

    def connected(self, worker_id: str) -> bool:
        worker = self.get(worker_id)
        return worker is not None and worker.connected

    def present(self) -> list[Worker]:
        return [worker for each in self.classes for worker in each.workers]

    @property
    def classes(self) -> Collection[WorkerClass]:
        return self._classes.values()

    def totals(self, role: Role) -> dict[str, float]:
        """Returns the sums of `Pool.totals` over all classes of this run: they never fall."""
        sums = Counter(self._earlier[role])
        for each in self.classes:
            sums.update(each.pool(role).totals())
        return {**Pool(role).totals(), **sums}

    def class_of(self, worker: Worker) -> WorkerClass | None:
        """Returns the class of a worker; None only if neither it nor any other worker of that class is present."""
        return self._classes.get(class_key(worker.join))

    def all(self) -> Iterable[Worker]:
        """Returns all workers, lost ones too, prefill first."""
        return sorted(self._workers.values(), key=lambda w: (w.role != "prefill", w.worker_id))

    def max_model_len(self, prompt_tokens: int = 0) -> int | None:
        """Returns the tokens of the longest prompt and output together that every worker can hold, or, for a prompt
        that is too long for the smallest worker, that one worker of each role of a class can hold; None before any has
        joined."""
        classes = [each for each in self.classes if each.workers] or self.classes
        known = [[pool.lengths for pool in each.pools if pool.lengths is not None] for each in classes]
        if not any(known):
            return None
        smallest = min(least for lengths in known for least, _ in lengths)
        if prompt_tokens < smallest:
            return smallest
        return max(min(longest for _, longest in lengths) for lengths in known if lengths)

    def join(self, join: Join, now: float) -> Joined:
        """Adds a worker, or reconnects one that redialled.

        Raises:
            JoinRefused: it does not fit; the message names the field and both values.
        """
        # Equal facts share one object, so that a join is not compared with each of a thousand workers.
        peers = [w.join for w in self.present() if w.worker_id != join.worker_id and w.join.revision == join.revision]
        present = {id(peer.facts): peer for peer in peers}.values()
        check_join(join, present, self._own)
        join = replace(join, facts=next((j.facts for j in present if j.facts == join.facts), join.facts))
        name, known = join.worker_id, self.get(join.worker_id)
        takes_place = known is not None and join.replace and join.incarnation > known.incarnation
        if known is not None and known.role != join.role and not takes_place:
            raise refused(join, f"role: {name} is a {known.role} worker but joins as {join.role}")
        if self.has_left(name, join.incarnation):
            raise refused(join, f"incarnation: {join.incarnation} has drained and left")
        if known is not None and known.incarnation > join.incarnation:
            later = f"another worker has joined as {name} since this one started"
            raise refused(join, f"incarnation: {later} ({join.incarnation} is older)")
        if known is not None and known.incarnation < join.incarnation and known.live(now) and not join.replace:
            at = f"{known.join.link_address or known.join.host}, pid {', '.join(map(str, known.join.pids))}"
            raise refused(join, f"worker_id: a live worker has this id ({at}); --replace takes its place")
        if known is not None and known.incarnation == join.incarnation:
            if class_key(known.join) != class_key(join):
                earlier = f"revision {known.join.revision!r} and domain {known.join.domain!r}"
                raise refused(join, f"revision: this incarnation joined with {earlier}")
            known.join = join
            known.on(Redialled(now + self.lease_s), now)
            return Joined(known, replaced=None)
        lost = self._workers.get(name) if known is None else None
        before = known or lost
        next_role = self._next_roles.pop(name, None) if before is None else before.next_role
        if next_role == join.role:
            self.flips[join.role] += 1
        worker = self.add(join, now, now + self.lease_s)
        if lost is not None and lost.incarnation == join.incarnation and lost.drain_by is not None:
            worker.on(DrainBegan(lost.drain_by, lost.next_role), now)
        return Joined(worker, replaced=known)

    def add(self, join: Join, now: float, lease_until: float) -> Worker:
        """Adds a worker without comparing it with the others; replaces an earlier incarnation."""
        earlier, key = self.get(join.worker_id), class_key(join)
        if earlier is not None:
            earlier.on(Replaced(), now)
        for empty in [each for each in self.classes if each.key != key and not each.workers]:
            del self._classes[empty.key]
            for pool in empty.pools:
                self._earlier[pool.role].update(pool.totals())
        into = self._classes.setdefault(key, WorkerClass(key, Pool("prefill"), Pool("decode")))
        worker = self._workers[join.worker_id] = Worker(join, now, lease_until, into.pool(join.role))
        return worker

    def renew_lease(self, worker_id: str, incarnation: int, load: Load | None, now: float) -> bool:
        """Renews a lease. Returns False if the worker is fenced: its lease ended or a newer incarnation is present."""
        worker = self.get(worker_id)
        if worker is None or worker.incarnation != incarnation or worker.lease_until <= now:
            return False
        worker.lease_until = now + self.lease_s
        if load is not None:
            worker.load = load
        return True

    def update_gpu(self, worker_id: str, gpu: GpuUsage | None) -> None:
        if (worker := self.get(worker_id)) is not None:
            worker.gpu = gpu

    def disconnected(self, worker_id: str, incarnation: int, now: float) -> bool:
        """Records that a session broke: the lease now ends within REDIAL_S. Returns False if the worker is not the
        present incarnation."""
        worker = self.get(worker_id)
        if worker is None or worker.incarnation != incarnation:
            return False
        worker.on(SessionBroke(), now)
        return True

    def drain(self, worker_id: str, by: float, now: float, next_role: Role | None = None) -> None:
        """Makes a worker draining: it accepts no new work and gives back what it has at `by` at the latest. The last
        call decides whether it joins again, in `next_role`.

        Raises:
            NotFound: no such worker is present.
            InvalidRequest: it cannot join again in that role.
        """
        worker = self.get(worker_id)
        if worker is None and worker_id in self._next_roles:
            raise NotFound(f"{worker_id} is changing its role and has not joined again yet", param="worker_id")
        if worker is None and worker_id in self._workers:
            raise NotFound(f"{worker_id} is lost: its lease has ended, and it has not joined again", param="worker_id")
        if worker is None:
            raise NotFound(f"no worker {worker_id[:128]!r} is in this cluster", param="worker_id")
        if next_role is not None and worker.state is DRAINING and worker.next_role is None:
            raise InvalidRequest(f"{worker_id} is leaving the cluster", param="next_role")
        if next_role == worker.role and worker.next_role is not None:
            raise InvalidRequest(f"{worker_id} drains to become a {worker.next_role} worker", param="next_role")
        if next_role == worker.role:
            raise InvalidRequest(f"{worker_id} is a {worker.role} worker already", param="next_role")
        if next_role is not None and not worker.join.both_roles:
            raise InvalidRequest(
                f"{worker_id} was not started for both roles: start it with --both-roles on", param="next_role"
            )
        worker.on(DrainBegan(by, next_role), now)

    def left(self, worker_id: str, incarnation: int, now: float) -> None:
        """Removes a worker that has drained; this incarnation may not join again."""
        if self.incarnation(worker_id) == incarnation:
            worker = self._workers.pop(worker_id)
            worker.on(Left(), now)
            self._left[worker_id] = incarnation
            if worker.next_role is not None:
                self._next_roles[worker_id] = worker.next_role

    def has_left(self, worker_id: str, incarnation: int | None) -> bool:
        return incarnation is not None and self._left.get(worker_id) == incarnation

    def expire(self, now: float) -> list[tuple[Worker, str]]:
        """Marks workers whose lease has ended as lost and returns them with the reason; drops those lost long ago.
        Counts the time that workers were present."""
        since = now if self._expired_at is None else self._expired_at
        for each in self.classes:
            for pool in each.pools:
                pool.worker_s += len(pool.workers) * (now - since)
        self._expired_at = now
        expired = []
        for worker in self._workers.values():
            if not worker.lost and worker.lease_until <= now:
                silent = f"silent for {self.lease_s:g} s"
                expired.append((worker, silent if worker.connected else "its connection closed and it did not redial"))
                worker.on(LeaseEnded(), now)
        self._workers = {n: w for n, w in self._workers.items() if not w.lost or now - w.since <= KEEP_LOST_S}
        return expired
