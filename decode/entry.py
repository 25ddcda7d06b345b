"""A sequence in the decode scheduler's books."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.events import SpeculationCounters, StageStamps
from baton.core.prefix_use import PrefixUse
from baton.core.sequence import Sequence


@dataclass(slots=True)
class Times:
    """Instants on the worker's clock; None until then."""

    reserved_at: float
    received_at: float | None = None
    running_at: float | None = None


@dataclass(slots=True)
class Entry:
    """`next_emit_index` is the output index from which tokens are still to be told: the first event repeats the token
    that
    prefill sampled. `in_flight`: KV is still being written into the blocks of an aborted sequence. `last_token_at`:
    when the
    last token came, or its KV. `boosted`: it has the turn of its priority. `discard_result`: what the step that is out
    computes
    of it says nothing. `end_reported`: its end is told, and a step that is out still writes into its blocks."""

    sequence: Sequence
    prefix: PrefixUse
    number: int
    times: Times
    next_emit_index: int
    in_flight: bool = False
    last_token_at: float = 0.0
    boosted: bool = False
    discard_result: bool = False
    end_reported: bool = False
    speculation: SpeculationCounters = field(default_factory=SpeculationCounters)

    @property
    def rank(self) -> tuple[int, bool, int]:
        return self.sequence.request.priority, not self.boosted, self.number

    def stamps(self, now: float | None) -> StageStamps:
        received, running = self.times.received_at, self.times.running_at
        if received is None:
            return StageStamps()
        transfer_s = received - self.times.reserved_at
        if running is None:
            return StageStamps(transfer_s=transfer_s)
        decode_s = 0.0 if now is None else now - running
        return StageStamps(transfer_s=transfer_s, decode_queue_s=running - received, decode_s=decode_s)
