"""The coordinator's end of a check: real workers join it, and it lets each prefill worker hand a prompt to each decode
worker. It serves no clients, and accepts only the workers of the plan."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from baton.core.commands import Abort, Drain, Drained, Heartbeat, HeartbeatAck, Join, Prefill, Role, Welcome
from baton.core.errors import HandoffError, InvalidRequest, InvariantError, JoinRefused
from baton.core.events import HandedOver, Parked, SequenceEnded, StepEvents
from baton.core.request import GenerateRequest, SequenceId
from baton.runtime.cluster_token import check_token
from coordinator.cluster import ToWorker
from coordinator.policy.handles import signed_targets
from coordinator.policy.joining import OwnModel
from coordinator.policy.pool import Worker
from coordinator.policy.workers import WorkerTable

log = logging.getLogger("baton.doctor")
CHECK_BYTES = 8 << 20
"""About how much KV a prompt has, so that small packets alone do not pass the check."""
LEASE_S = 4.0
DRAIN_S = 1.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class MeasuredHandOver:
    """A hand-over that succeeded: its KV, and from the reply to the offer to the last acknowledgement, while the prompt
    was computed."""

    num_bytes: int
    seconds: float


class CheckSessions:
    """Serves the sessions of the workers of a check, in place of `coordinator.cluster.Cluster`."""

    def __init__(self, workers: Collection[str], own: OwnModel | None, token: str) -> None:
        self.address = ""
        # Why a worker was refused, by its name.
        self.refusals: dict[str, str] = {}
        self._expected = frozenset(workers)
        # What failed, by worker, once the check has ended.
        self._failed: dict[str, str] = {}
        self._table = WorkerTable(LEASE_S, own)
        self._token = token
        self._run_id = secrets.token_hex(8)
        self._handle_key = secrets.token_bytes(32)
        # Messages to send to each connected worker.
        self._queues: dict[str, asyncio.Queue[ToWorker]] = {}
        # The hand-overs in progress.
        self._tries: dict[SequenceId, _Try] = {}

    @property
    def connected(self) -> frozenset[str]:
        return frozenset(self._queues)

    async def hand_over(self, prefill: str, decode: str, limit_s: float) -> MeasuredHandOver:
        """Lets `prefill` compute a prompt and hand it to `decode`, which computes one more token.

        Raises:
            HandoffError: it failed, with the reason of the worker that reported it; or took longer than `limit_s`.
        """
        source, target = self._table.get(prefill), self._table.get(decode)
        if source is None or target is None or not {prefill, decode} <= self.connected:
            raise HandoffError("one of the two is not connected any more")
        salt = f"check {prefill} {decode}"  # no KV is reused from another pair's check: all of it is sent
        prompt = check_prompt(source, target)
        request = GenerateRequest(secrets.token_hex(8), prompt, max_tokens=2, deadline_s=limit_s, cache_salt=salt)
        name = request.sequence_id
        trial = self._tries[name] = _Try(prefill, decode, asyncio.get_running_loop().create_future())
        placed = name, prefill, (decode,), time.monotonic() + limit_s
        targets = signed_targets(self._table, self._handle_key, *placed, secrets.token_bytes)
        self._send(prefill, Prefill(request, targets))
        try:
            async with asyncio.timeout(limit_s):
                return await trial.result
        except TimeoutError:
            raise HandoffError(f"no result within {limit_s:g} s") from None
        finally:
            del self._tries[name]
            for worker in (prefill, decode):
                self._send(worker, Abort(name, "the check has ended"))

    async def end(self, failed: Mapping[str, str], timeout_s: float) -> None:
        """Ends the check: orders the workers to leave. Those in `failed` are refused when they redial, with that
        failure, so that they exit with it on their own node. Returns when they were, or after `timeout_s`."""
        self._failed = dict(failed)
        for worker in self.connected:
            if worker in failed:
                del self._queues[worker]  # its session ends with its next message
            else:
                self._send(worker, Drain(DRAIN_S))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not failed.keys() <= self.refusals.keys():
                    await asyncio.sleep(POLL_S)

    # For the service (coordinator.control.Sessions).

    def check_token(self, presented: str, who: str) -> None:
        check_token(self._token, presented, who)

    def refused(self, error: JoinRefused, peer: str) -> None:
        log.warning("%s (peer: %s)", error.message, peer)

    def join(self, join: Join, peer: str) -> asyncio.Queue[ToWorker]:
        """Raises JoinRefused if the worker does not fit, is none of the plan's, or has another token."""
        worker, now = join.worker_id, time.monotonic()
        try:
            self.check_token(join.token, f"{join.role} worker {worker[:128]!r}")
            if worker not in self._expected:
                plan = "another topology file, or a cluster that is not being checked?"
                raise JoinRefused(f"worker_id: {worker[:128]!r} is not in this plan; {plan}", param="worker_id")
            if worker in self._failed:
                raise JoinRefused(f"hand-over: {self._failed[worker]}", param="hand-over")
            self._table.join(replace(join, token="", replace=True), now)
        except JoinRefused as error:
            self.refusals[worker] = error.message
            self.refused(error, peer)
            raise
        queue = self._queues[worker] = asyncio.Queue[ToWorker]()
        queue.put_nowait(Welcome(self._run_id, LEASE_S, LEASE_S / 4, self._handle_key, (), round(now * 1000)))
        return queue

    def is_current(self, worker: str, queue: asyncio.Queue[ToWorker]) -> bool:
        return self._queues.get(worker) is queue

    def on_message(self, worker: str, incarnation: int, message: object) -> bool:
        match message:
            case Heartbeat(number):
                self._send(worker, HeartbeatAck(number))
            case StepEvents():
                self._on_events(worker, message)
            case Drained():
                self._queues.pop(worker, None)
                return False
        return True

    def session_ended(self, worker: str, incarnation: int, queue: asyncio.Queue[ToWorker], why: str) -> None:
        if self.is_current(worker, queue):
            del self._queues[worker]
            for trial in self._tries.values():
                if worker in (trial.prefill, trial.decode):
                    trial.fail(f"the session of {worker} ended: {why}")

    def drain_worker(self, worker: str, timeout_s: float, next_role: Role | None = None) -> None:
        self._send(worker, Drain(timeout_s, next_role))

    def set_traffic(self, shares: Mapping[str, float], *, clear: bool) -> Mapping[str, float]:
        raise InvalidRequest("a doctor serves no requests", param="share")

    def fail(self, error: InvariantError) -> None:
        log.critical("%s", error)

    def _on_events(self, worker: str, events: StepEvents) -> None:
        reported: tuple[Parked | HandedOver | SequenceEnded, ...] = (
            *events.parked,
            *events.handed_over,
            *events.ended,
        )
        for event in reported:
            trial = self._tries.get(event.sequence)
            if trial is None:
                continue
            match event:
                case HandedOver():
                    trial.handed_over(event)
                case SequenceEnded(code=None) if worker == trial.decode:
                    trial.decoded()
                case SequenceEnded():
                    trial.fail(f"{worker}: {event.message or event.reason}")
                case Parked(reason=reason):
                    trial.fail(f"{worker}: {reason}")

    def _send(self, worker: str, message: ToWorker) -> None:
        if (queue := self._queues.get(worker)) is not None:
            queue.put_nowait(message)


class _Try:
    """One hand-over. It has succeeded when both workers have reported their part, in any order."""

    def __init__(self, prefill: str, decode: str, result: asyncio.Future[MeasuredHandOver]) -> None:
        self.prefill, self.decode, self.result = prefill, decode, result
        self._sent: HandedOver | None = None
        self._decoded = False

    def handed_over(self, event: HandedOver) -> None:
        self._sent = event
        self._finish()

    def decoded(self) -> None:
        self._decoded = True
        self._finish()

    def fail(self, reason: str) -> None:
        if not self.result.done():
            self.result.set_exception(HandoffError(reason))

    def _finish(self) -> None:
        if self._sent is not None and self._decoded and not self.result.done():
            self.result.set_result(MeasuredHandOver(self._sent.bytes, self._sent.stamps.transfer_s))


def check_prompt(source: Worker, target: Worker) -> tuple[int, ...]:
    """Returns a prompt with about CHECK_BYTES of KV, or as long as both workers can hold with two tokens of output."""
    facts = source.join.facts
    longest = min(source.max_model_len, target.max_model_len) - 2
    count = max(min(math.ceil(CHECK_BYTES / facts.layout.bytes_per_token), longest), 1)
    return tuple((7 * index + 1) % facts.vocab_size for index in range(count))
