"""Runs the cluster: executes the actions of policy.requests and passes it the events of workers.

One event loop owns all of it. `coordinator.policy` decides about requests; `coordinator.control` opens and reads the
sessions with workers.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Concatenate, ParamSpec, TypeVar

from baton.core.codes import ErrorCode
from baton.core.commands import (
    AdapterStates,
    Assign,
    Command,
    Drain,
    Drained,
    Heartbeat,
    HeartbeatAck,
    Join,
    Leave,
    Prefill,
    Role,
    Target,
    Welcome,
)
from baton.core.errors import InvalidRequest, InvariantError, JoinRefused, ProtocolError, Unavailable
from baton.core.events import StepEvents
from baton.core.liveness import MAX_LEASE_GAP_S, ListeningClock
from baton.core.request import ChoiceId, GenerateRequest, SequenceId
from baton.runtime.cluster_token import FLAG, check_token
from coordinator.policy.adapters import Adapter, AdapterTable
from coordinator.policy.choice import Action, AssignTargets, Choice, KVParked, Notify, Rescheduled, Send, StartPrefill
from coordinator.policy.codes import NO_WORKER
from coordinator.policy.handles import signed_targets
from coordinator.policy.joining import OwnModel
from coordinator.policy.pool import Worker
from coordinator.policy.quotas import ANONYMOUS, Client
from coordinator.policy.requests import TICK_S, Requests
from coordinator.policy.split import Split
from coordinator.policy.workers import WorkerTable

log = logging.getLogger("baton.coordinator")
LOAD_ADAPTER_S = 90.0  # how long the workers have to load an adapter
LOAD_ADAPTER_POLL_S = 0.05
LINGER_S = 1.0  # clients that connected just before may send their requests
DRAINED_TIMEOUT_S = 5.0  # how long workers that drain with the whole cluster have to report it
ToWorker = Welcome | Command | HeartbeatAck
P = ParamSpec("P")
R = TypeVar("R")


def _ends_process(method: Callable[Concatenate[Cluster, P], R]) -> Callable[Concatenate[Cluster, P], R]:
    """Of a method that tasks of clients, sessions and operators call, which may drop its error: requests may have been
    left halfway, so after an InvariantError `tick` raises it, too."""

    @functools.wraps(method)
    def call(cluster: Cluster, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(cluster, *args, **kwargs)
        except InvariantError as e:
            cluster.fail(e)
            raise

    return call


class Cluster:
    def __init__(
        self,
        lease_s: float,
        max_queued_requests: int,
        max_queued_tokens: int,
        own_model: OwnModel | None = None,
        token: str = "",
        hold_s: float = 30.0,
        max_deaths: int = 5,
        adapters: AdapterTable | None = None,
        split: Split = "always",
    ) -> None:
        """Workers must present `token`, unless it is empty."""
        self.adapters = adapters or AdapterTable()
        self.own_model = own_model
        self.workers = WorkerTable(lease_s, own_model)
        self.requests = Requests(self.workers, max_queued_requests, max_queued_tokens, hold_s, max_deaths, split)
        self.run_id = secrets.token_hex(8)
        self.address = ""  # where workers dial
        self.joins_refused: Counter[str] = Counter()  # by field
        self.handle_key = secrets.token_bytes(32)  # of this run: workers receive it when they join
        self._token = token
        self._notify: dict[ChoiceId, Callable[[], None]] = {}  # of the reader of each choice
        self._outgoing: dict[str, asyncio.Queue[ToWorker]] = {}  # to each connected worker
        self._lease_clock = ListeningClock(time.monotonic(), MAX_LEASE_GAP_S)
        self._failure: InvariantError | None = None

    # For the fronts.

    @_ends_process
    def admit(
        self, request: GenerateRequest, choices: int = 1, session: str = "", client: Client = ANONYMOUS
    ) -> Choice:
        """Queues one choice of a client's request, which has `choices` if this is the first, and dispatches what can
        start. `session` is the client's, if it named one.

        Raises:
            BatonError: the request is refused, and was not queued.
            InvariantError: `tick` raises it as well.
        """
        choice, actions = self.requests.admit(request, time.monotonic(), choices, session, client)
        self._execute(actions)
        return choice

    def listen(self, choice: Choice, notify: Callable[[], None]) -> None:
        """Calls `notify` after each change of a choice, until that is forgotten."""
        self._notify[choice.name] = notify

    @_ends_process
    def end(self, choice: Choice, reason: str, *, answered: bool = False) -> None:
        """Ends a choice of which the front needs no more output, and notifies both pools immediately. `answered`: its
        answer is complete. Raises as `admit` does."""
        self._execute(self.requests.end(choice, reason, time.monotonic(), answered=answered))
        self._execute([choice.notification])  # the other choices of its request may wait for its end

    @_ends_process
    def forget(self, choice: Choice) -> None:
        """Ends a choice and removes it, so that its id can be reused."""
        self.end(choice, "the client disconnected")
        if self.requests.get(choice.name) is choice:
            self._notify.pop(choice.name, None)
        self.requests.forget(choice)

    async def load_adapter(self, adapter: Adapter, *, replace: bool = False, decode: bool = True) -> None:
        """Returns when every ready worker has the adapter, whose name clients may choose from then on. Without `decode`
        no decode worker is needed.

        Raises:
            BatonError: its name is taken, or a worker cannot load it, with that worker's reason; then none keeps it.
        """
        if (role := self.requests.dispatcher.missing_role(decode=decode)) is not None:
            raise Unavailable(f"no {role} worker is ready", code=NO_WORKER[role], retry_after_s=2)
        self.adapters.load(adapter, replace=replace)
        digest, deadline, added = adapter.source.digest, time.monotonic() + LOAD_ADAPTER_S, False
        try:
            self._require_adapters()
            while missing := [w for w in self.workers.present() if w.ready and not w.has(digest)]:
                names = ", ".join(w.worker_id for w in missing)
                for worker in missing:
                    if (reason := worker.adapter_failures.get(digest)) is not None:
                        raise InvalidRequest(f"{worker.worker_id}: {reason}", param="lora_path")
                if time.monotonic() > deadline:
                    raise Unavailable(f"{names} did not load the adapter within {LOAD_ADAPTER_S:g} s")
                await asyncio.sleep(LOAD_ADAPTER_POLL_S)
            added = True
        finally:
            if added:
                self.adapters.loaded(adapter)
                log.info("adapter %s (%.12s) is loaded", adapter.name, digest)
            else:
                self.adapters.failed(adapter)
            self._release_adapters()

    def unload_adapter(self, name: str) -> None:
        """Removes the name of an adapter; requests that run finish with it. Raises NotFound."""
        self.adapters.unload(name)
        log.info("adapter %s is unloaded", name)
        self._release_adapters()

    # For sessions with workers.

    @_ends_process
    def join(self, join: Join, peer: str) -> asyncio.Queue[ToWorker]:
        """Adds a worker; returns the queue of messages to send to it, a Welcome first. `peer` is its address, for the
        log.

        Raises:
            JoinRefused: it does not fit; the message names the field.
            Unavailable: the cluster is draining and accepts no new worker; the worker may retry.
        """
        worker, known = join.worker_id, self.workers.incarnation(join.worker_id)
        try:
            described = f"{join.role} worker {worker[:128]!r}"
            self.check_token(join.token, described)
            if join.token and not self._token:  # the others have none, and it would refuse their links
                message = f"{described} refused: token: this cluster has no token; remove {FLAG}"
                raise JoinRefused(message, param="token")
            if self.requests.draining and known != join.incarnation:
                raise Unavailable(f"{worker} cannot join: the cluster is draining", code=ErrorCode.DRAINING)
            joined = self.workers.join(replace(join, token=""), self.lease_now())
        except JoinRefused as e:
            self.refused(e, peer)
            raise
        # Also after its lease has ended: it may have kept sequences handed over to it, and would drop them silently.
        tracked = () if joined.replaced else self.requests.tracked(worker)
        queue: asyncio.Queue[ToWorker] = asyncio.Queue()
        lease_s, now_ms = self.workers.lease_s, round(time.monotonic() * 1000)
        queue.put_nowait(Welcome(self.run_id, lease_s, lease_s / 4, self.handle_key, tracked, now_ms))
        if joined.worker.drain_by is not None:  # the command may have been lost with the previous session
            remaining_s = max(joined.worker.drain_by - time.monotonic(), 0.0)
            queue.put_nowait(Drain(remaining_s, joined.worker.next_role))
        queue.put_nowait(self.adapters.required)  # if it is empty, too: the worker may have some
        self._outgoing[worker] = queue  # from here on, requests of the old incarnation may be placed on this one
        log.info("%s worker %s joined (incarnation %d)", join.role, worker, join.incarnation)
        if joined.replaced is not None:
            self._lost(joined.replaced, "it was replaced by a new incarnation")
        self._execute(self.requests.worker_joined(time.monotonic()))
        return queue

    def refused(self, error: JoinRefused, peer: str) -> None:
        """Counts and logs a refused join."""
        self.joins_refused[error.param or ""] += 1
        log.warning("%s (peer: %s)", error.message, peer)

    def is_current(self, worker: str, queue: asyncio.Queue[ToWorker]) -> bool:
        """Returns whether this is the worker's current session: a redial opens another one."""
        return self._outgoing.get(worker) is queue

    @_ends_process
    def on_message(self, worker: str, incarnation: int, message: object) -> bool:
        """Handles one message of a worker; returns False to end its session."""
        load = message.load if isinstance(message, Heartbeat | StepEvents) else None
        if not self.workers.renew_lease(worker, incarnation, load, self.lease_now()):
            log.warning("%s is fenced: its lease has ended", worker)
            return False
        match message:
            case StepEvents():
                self._execute(self.requests.on_events(worker, message, time.monotonic()))
            case AdapterStates():
                self._adapters_changed(worker, message)
            case Heartbeat(number, _, gpu):
                self.workers.update_gpu(worker, gpu)
                self.send(worker, HeartbeatAck(number))
            case Leave(timeout_s):
                log.info("%s leaves the cluster within %.1f s", worker, timeout_s)
                self.workers.drain(worker, time.monotonic() + timeout_s, self.lease_now())
            case Drained():
                log.info("%s has left the cluster", worker)
                self.workers.left(worker, incarnation, self.lease_now())
                self._outgoing.pop(worker, None)
                self._execute(self.requests.on_worker_lost(worker, "it drained", time.monotonic(), drained=True))
                return False
            case _:
                raise ProtocolError(f"{worker} sent an unexpected {type(message).__name__}")
        return True

    @_ends_process
    def session_ended(self, worker: str, incarnation: int, queue: asyncio.Queue[ToWorker], why: str) -> None:
        """Records that a session has ended; the worker may redial for a while."""
        if self.is_current(worker, queue):
            del self._outgoing[worker]
            if self.workers.disconnected(worker, incarnation, self.lease_now()):
                log.warning("session of %s broke: %s", worker, why)

    def fail(self, error: InvariantError) -> None:
        """Reports a bug that another task ran into: `tick` raises it."""
        self._failure = error

    def check_token(self, presented: str, who: str) -> None:
        """Raises JoinRefused if the token is not this cluster's."""
        check_token(self._token, presented, who)

    def send(self, worker: str, command: ToWorker) -> None:
        queue = self._outgoing.get(worker)
        if queue is not None:
            queue.put_nowait(command)

    # Time, and the end.

    def lease_now(self) -> float:
        """Returns seconds on the lease clock."""
        return self._lease_clock.at(time.monotonic())

    async def tick(self) -> None:
        """Runs leases, deadlines and the queue until cancelled.

        Raises:
            InvariantError: a session or a request found a violated invariant, or the counters of workers do not match
                the requests, which is checked whenever no request is left. The process must exit.
        """
        idle = True
        while True:
            await asyncio.sleep(TICK_S)
            if self._failure is not None:
                raise self._failure
            # Leases do not run while messages wait unread: a process that was stopped first reads what arrived
            # meanwhile.
            for worker, why in self.workers.expire(self._lease_clock.advance(time.monotonic())):
                self._outgoing.pop(worker.worker_id, None)
                self._lost(worker, why)
            self._execute(self.requests.tick(time.monotonic()))
            self._release_adapters()
            if not idle and not len(self.requests):
                self.requests.check()
            idle = not len(self.requests)

    @_ends_process
    def drain_worker(self, worker: str, timeout_s: float, next_role: Role | None = None) -> None:
        """Drains one worker: it gets no new work, finishes what it has or gives it back after `timeout_s`, and leaves;
        with a `next_role`, it joins again in that.

        Raises:
            NotFound: there is no such worker.
            InvalidRequest: it cannot join again in that role.
        """
        self.workers.drain(worker, time.monotonic() + timeout_s, self.lease_now(), next_role)
        log.info("draining %s within %.1f s%s", worker, timeout_s, f" to become {next_role}" if next_role else "")
        self.send(worker, Drain(timeout_s, next_role))

    @_ends_process
    def set_traffic(self, shares: Mapping[str, float], *, clear: bool) -> Mapping[str, float]:
        """Sets the shares of new requests by revision; returns those that are valid now.

        Raises:
            InvalidRequest: a share is invalid.
        """
        traffic = self.requests.dispatcher.traffic
        traffic.set(shares, clear=clear)
        log.info("traffic: %s", traffic.shares)
        self._execute(self.requests.tick(time.monotonic()))
        return traffic.shares

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests, fails those still running after `timeout_s`, then drains the workers."""
        self.requests.draining = True
        deadline = time.monotonic() + timeout_s
        log.info("draining: %d requests in flight", self.requests.counts().requests)
        while len(self.requests) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._execute(self.requests.drain(time.monotonic()))
        for worker in self.workers.present():
            self.drain_worker(worker.worker_id, max(deadline - time.monotonic(), 1.0))
        give_up_at = time.monotonic() + DRAINED_TIMEOUT_S
        while self._outgoing and time.monotonic() < give_up_at:
            await asyncio.sleep(0.02)

    async def finish(self, timeout_s: float) -> None:
        """Waits until no request is left, while those of clients that are still connected are accepted; fails the rest
        after `timeout_s`. The workers keep running, for the next coordinator."""
        began = time.monotonic()
        log.info("handing over: %d requests in flight", self.requests.counts().requests)
        while (now := time.monotonic()) - began < timeout_s and (len(self.requests) or now - began < LINGER_S):
            await asyncio.sleep(0.02)
        self.requests.draining = True
        self._execute(self.requests.drain(time.monotonic()))

    def _require_adapters(self) -> None:
        for worker in self.workers.present():
            worker.adapter_failures = {}
            self.send(worker.worker_id, self.adapters.required)

    def _release_adapters(self) -> None:
        """Makes the workers drop adapters that have no name and no request any more."""
        if self.adapters.retired:
            in_use = {choice.request.adapter for choice in self.requests if not choice.ended}
            if self.adapters.release(in_use):
                self._require_adapters()

    def _adapters_changed(self, worker_id: str, states: AdapterStates) -> None:
        if (worker := self.workers.get(worker_id)) is None:
            return
        worker.update_adapters(states)
        for failure in states.failed:
            log.error("%s cannot load adapter %.12s: %s", worker_id, failure.digest, failure.reason)
        self._execute(self.requests.worker_joined(time.monotonic()))

    def _lost(self, worker: Worker, why: str) -> None:
        actions = self.requests.on_worker_lost(worker.worker_id, why, time.monotonic(), drained=False)
        self._execute(actions)
        moved = len({each.sequence.request_id for each in actions if isinstance(each, Rescheduled)})
        log.warning("%s worker %s is lost: %s; %d requests rescheduled", worker.role, worker.worker_id, why, moved)

    def _execute(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Notify(name):
                    if (notify := self._notify.get(name)) is not None:
                        notify()
                case Send(worker, command):
                    self.send(worker, command)
                case StartPrefill(prefill, request, targets, deadline_at):
                    signed = self._sign(request.sequence_id, prefill, targets, deadline_at)
                    self.send(prefill, Prefill(request, signed))
                case AssignTargets(prefill, sequence, targets, attempt, deadline_at):
                    signed = self._sign(sequence._replace(attempt=attempt), prefill, targets, deadline_at)
                    self.send(prefill, Assign(sequence, signed, attempt))
                case Rescheduled(sequence, next_index, reason):
                    log.info("%s is rescheduled at index %d: %s", sequence, next_index, reason)
                case KVParked(sequence, reason):
                    log.info("KV of %s is parked: %s", sequence, reason)

    def _sign(
        self, sequence: SequenceId, prefill: str, targets: Iterable[str], deadline_at: float
    ) -> tuple[Target, ...]:
        placed = sequence, prefill, targets, deadline_at
        return signed_targets(self.workers, self.handle_key, *placed, secrets.token_bytes)
