"""The decode scheduler's state of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.events import SpeculationCounters, StageStamps
from baton.core.prefix_cache import PrefixUse
from baton.core.sequence import Sequence


@dataclass(slots=True)
class Entry:
    """`next_emit_index` is the output index from which tokens are still to be reported: the first event repeats the
    token that prefill sampled. `received_at`, `running_at`: None until then. `last_token_at`: when the last token, or
    the KV, arrived. `in_flight`: KV is still being written into the blocks of an aborted sequence. `boosted`: the
    sequence has the boost of its priority. `discard_result`: the result of its outstanding row is to be discarded.
    `end_reported`: its end is reported, but an outstanding step still writes into its blocks."""

    sequence: Sequence
    prefix: PrefixUse
    number: int
    next_emit_index: int
    received_at: float | None = None
    running_at: float | None = None
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
        received, running = self.received_at, self.running_at
        if received is None:
            return StageStamps()
        transfer_s = received - self.sequence.arrived_at
        if running is None:
            return StageStamps(transfer_s=transfer_s)
        decode_s = 0.0 if now is None else now - running
        return StageStamps(transfer_s=transfer_s, decode_queue_s=running - received, decode_s=decode_s)
