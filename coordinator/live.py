"""A request in flight, as the coordinator follows it: its journal, what became of it, and how long its stages took."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace

from baton.core.commands import Target
from baton.core.errors import BatonError, DeadlineExceeded, HandoffError, KVCorrupt, Unavailable, WorkerLost
from baton.core.events import SequenceEnded, SpeculationCounters, StageStamps, TokenEvent
from baton.core.request import FinishReason, GenerateRequest, SequenceId
from coordinator.policy.journal import Appended, Journal
from coordinator.submission import Timeline

MAX_TIMES_PARKED = 30  # tries; from the second on they are a tick apart

# What a worker's error code means to the client; any other is our bug.
_WORKER_ERRORS: dict[str, type[BatonError]] = {
    "deadline_exceeded": DeadlineExceeded,
    "kv_corrupt": KVCorrupt,
    "worker_lost": WorkerLost,
    "handoff_failed": HandoffError,
    "draining": Unavailable,
    "prompt_exceeds_pool": Unavailable,
}


@dataclass(slots=True, eq=False)
class Live:
    """`fresh` is set whenever the journal grew, `error` was set, or the deadline has passed (`expired`).
    `dispatched_at` is 0 while it waits in the queue. `targets` are the decode workers named under the present attempt:
    any of them may hold the sequence. `settled` once both pools have been told of the end. `recomputed` because
    its KV was damaged: not a second time."""

    journal: Journal
    started_at: float
    deadline_at: float
    fresh: asyncio.Event = field(default_factory=asyncio.Event)
    error: BatonError | None = None
    dispatched_at: float = 0.0
    first_token_at: float = 0.0
    prefill_worker: str = ""
    decode_worker: str = ""
    stage: str = "queue"
    parked_since: float = 0.0
    times_parked: int = 0
    targets: tuple[Target, ...] = ()
    handed_over: bool = False
    settled: bool = False
    cached_tokens: int = 0
    queued_at: float = 0.0
    queued_s: float = 0.0
    stamps: StageStamps = field(default_factory=StageStamps)
    speculation: SpeculationCounters | None = None
    expired: bool = False
    recomputed: bool = False

    @property
    def request(self) -> GenerateRequest:
        return self.journal.request

    @property
    def sequence(self) -> SequenceId:
        request = self.journal.request
        return SequenceId(request.request_id, request.choice, self.journal.attempt)

    @property
    def decoding(self) -> bool:
        """Whether a decode worker has all KV, as far as that has been told."""
        return self.handed_over or self.journal.next_index > len(self.request.output) + 1

    @property
    def over(self) -> bool:
        return self.error is not None or self.journal.finish is not None

    def is_at(self, worker: str) -> bool:
        """Whether that worker has what there is of it, as far as that has been told."""
        return worker == (self.decode_worker if self.handed_over else self.prefill_worker)

    def dispatch(self, now: float) -> None:
        self.dispatched_at, self.stage = now, "prefill"
        self.queued_s += now - (self.queued_at or self.started_at)

    def begin_again(self, attempt: int, now: float) -> None:
        """Nothing of it is anywhere but here: it goes on from the journal under a new attempt."""
        self.journal.resume(max(attempt, self.journal.attempt + 1))
        self.prefill_worker = self.decode_worker = ""
        self.targets, self.handed_over = (), False
        self.parked_since, self.times_parked = 0.0, 0
        self.dispatched_at, self.queued_at, self.stage = 0.0, now, "queue"

    def accept(self, event: TokenEvent) -> FinishReason | None:
        """Journals tokens before anybody writes them out; says whether they end the request."""
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        verdict = self.journal.accept(
            event.sequence.attempt, event.first_index, event.tokens, event.logprobs, event.prompt_logprobs
        )
        if event.prompt_logprobs:
            self.fresh.set()
        if not isinstance(verdict, Appended):
            return None
        if not self.first_token_at:
            self.first_token_at = time.monotonic()
        self.fresh.set()
        return verdict.finish

    def park(self, reason: str) -> HandoffError | None:
        """No decode worker took the KV; after too many tries, the error that ends the request."""
        self.parked_since, self.times_parked = time.monotonic(), self.times_parked + 1
        if self.times_parked <= MAX_TIMES_PARKED:
            return None
        return HandoffError(f"KV could not be handed over in {MAX_TIMES_PARKED} tries: {reason}", retry_after_s=1)

    def fail(self, error: BatonError) -> None:
        if not self.over:
            self.error = error
            self.fresh.set()

    def expire(self) -> None:
        """The deadline has passed: whoever waits for news looks up."""
        self.expired = True
        self.fresh.set()

    def workers(self) -> set[str]:
        """Every worker that may hold something of it."""
        return {w for w in (self.prefill_worker, self.decode_worker, *(t.worker_id for t in self.targets)) if w}

    def error_of(self, ended: SequenceEnded) -> BatonError:
        kind = _WORKER_ERRORS.get(ended.code, BatonError)
        return kind(f"{ended.message} (stage {self.stage})", code=ended.code)

    def late(self) -> DeadlineExceeded:
        took = time.monotonic() - self.started_at
        return DeadlineExceeded(f"the request did not finish within its {took:.1f} s (stage {self.stage})")

    def add_stamps(self, stamps: StageStamps) -> None:
        """Each worker knows its own stages; the larger value is the one that was measured."""
        names = ("queue_s", "prefill_s", "reserve_s", "transfer_s", "decode_queue_s", "decode_s")
        self.stamps = replace(self.stamps, **{n: max(getattr(self.stamps, n), getattr(stamps, n)) for n in names})

    def timeline(self) -> Timeline:
        s = self.stamps
        return Timeline(
            queue_s=self.queued_s + s.queue_s,
            prefill_s=s.prefill_s,
            reserve_s=s.reserve_s,
            transfer_s=s.transfer_s,
            decode_queue_s=s.decode_queue_s,
            decode_s=s.decode_s,
            first_token_s=self.first_token_at - self.started_at if self.first_token_at else 0.0,
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
        )
