"""A request in flight, as the coordinator follows it: its journal, what became of it, and how long its stages took."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace

from baton.core.errors import BatonError
from baton.core.events import StageStamps
from baton.core.request import FinishReason, GenerateRequest, SequenceId
from coordinator.policy.journal import Appended, Journal
from coordinator.submission import Timeline


@dataclass(slots=True, eq=False)
class Live:
    """`fresh` is set whenever the journal grew or `error` was set."""

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
    refused: frozenset[str] = frozenset()
    stamps: StageStamps = field(default_factory=StageStamps)

    @property
    def request(self) -> GenerateRequest:
        return self.journal.request

    @property
    def sequence(self) -> SequenceId:
        return self.request.sequence_id._replace(attempt=self.journal.attempt)

    @property
    def over(self) -> bool:
        return self.error is not None or self.journal.finish is not None

    def accept(self, attempt: int, first_index: int, tokens: tuple[int, ...]) -> FinishReason | None:
        """Journals tokens before anybody writes them out; says whether they end the request."""
        verdict = self.journal.accept(attempt, first_index, tokens)
        if not isinstance(verdict, Appended):
            return None
        if not self.first_token_at:
            self.first_token_at = time.monotonic()
        self.fresh.set()
        return verdict.finish

    def fail(self, error: BatonError) -> None:
        if not self.over:
            self.error = error
            self.fresh.set()

    def add_stamps(self, stamps: StageStamps) -> None:
        """Each worker knows its own stages; the larger value is the one that was measured."""
        names = ("queue_s", "prefill_s", "reserve_s", "transfer_s", "decode_queue_s", "decode_s")
        self.stamps = replace(self.stamps, **{n: max(getattr(self.stamps, n), getattr(stamps, n)) for n in names})

    def timeline(self) -> Timeline:
        s = self.stamps
        waited = self.dispatched_at - self.started_at if self.dispatched_at else 0.0
        return Timeline(
            queue_s=waited + s.queue_s,
            prefill_s=s.prefill_s,
            reserve_s=s.reserve_s,
            transfer_s=s.transfer_s,
            decode_queue_s=s.decode_queue_s,
            decode_s=s.decode_s,
            first_token_s=self.first_token_at - self.started_at if self.first_token_at else 0.0,
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
        )
