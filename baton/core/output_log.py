"""What a worker has reported about each sequence, kept until the coordinator has it (`OutputLog`), and what the worker
does with its sequences when its session is established again (`reconcile`). Pure.

After a redial the coordinator sends its next index per sequence, and the worker resends everything from there on, so a
broken stream loses nothing. The welcome lists the sequences that the coordinator tracks at the worker, as of some
moment after the join. Meanwhile the worker may have received more over a link, and may have ended some of those listed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from baton.core.codes import ErrorCode
from baton.core.commands import TrackedSequence
from baton.core.errors import InvariantError
from baton.core.events import HandedOver, Parked, SequenceEnded, SpeculationCounters, StepEvents, TokenEvent
from baton.core.request import SequenceId, TokenLogprob


@dataclass(slots=True)
class _Record:
    # Index of tokens[0]; None until a token has been recorded.
    first_index: int | None = None
    tokens: list[int] = field(default_factory=list)
    # As many as tokens, or none.
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    cached_tokens: int = 0
    speculation: SpeculationCounters | None = None
    pooled: bytes = b""
    ended: SequenceEnded | None = None
    parked: Parked | None = None
    handed_over: HandedOver | None = None

    @property
    def done(self) -> bool:
        return self.ended is not None or self.handed_over is not None


class OutputLog:
    """At most `limit` sequences are kept for a coordinator that never releases them; beyond that, sequences that are
    done are dropped first, the oldest of them first."""

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._records: dict[SequenceId, _Record] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._records)

    def record(self, events: StepEvents) -> None:
        """Records what is about to be sent. A token event may repeat recorded tokens.

        Raises:
            InvariantError: the tokens leave a gap after those of the sequence so far, or begin before them.
        """
        for event in events.tokens:
            record = self._records.setdefault(event.sequence, _Record())
            if record.first_index is None:
                record.first_index = event.first_index
            known = event.first_index - record.first_index
            if not 0 <= known <= len(record.tokens):
                raise InvariantError(f"tokens of {event.sequence} from {event.first_index} are not contiguous")
            record.tokens[known : known + len(event.tokens)] = event.tokens
            record.logprobs[known : known + len(event.logprobs)] = event.logprobs
            record.prompt_logprobs = record.prompt_logprobs or event.prompt_logprobs
            record.cached_tokens = max(record.cached_tokens, event.cached_tokens)
            record.speculation = event.speculation or record.speculation
            record.pooled = event.pooled or record.pooled
        for ended in events.ended:
            record = self._records.setdefault(ended.sequence, _Record())
            record.ended, record.parked = ended, None
        for parked in events.parked:
            self._records.setdefault(parked.sequence, _Record()).parked = parked
        for over in events.handed_over:
            record = self._records.setdefault(over.sequence, _Record())
            record.handed_over, record.parked = over, None
        if len(self._records) > self._limit:
            done_first = sorted(self._records, key=lambda sequence: not self._records[sequence].done)
            for sequence in done_first[: len(self._records) - self._limit]:
                del self._records[sequence]

    def sequences(self) -> tuple[SequenceId, ...]:
        """Returns the sequences that have a record."""
        return tuple(self._records)

    def done(self, sequence: SequenceId) -> bool:
        """Returns whether the end or the hand-over of a sequence is recorded."""
        record = self._records.get(sequence)
        return record is not None and record.done

    def since(self, tracked: Iterable[TrackedSequence]) -> StepEvents:
        """Returns what to resend."""
        tokens: list[TokenEvent] = []
        records: list[_Record] = []
        for item in tracked:
            record = self._records.get(item.sequence)
            if record is None:
                continue
            records.append(record)
            first = record.first_index or 0
            start = max(item.next_index, first)
            resent = tuple(record.tokens[start - first :])
            if resent or record.prompt_logprobs or record.pooled:
                event = TokenEvent(
                    item.sequence,
                    start,
                    resent,
                    tuple(record.logprobs[start - first :]),
                    record.prompt_logprobs,
                    record.cached_tokens,
                    record.speculation,
                    pooled=record.pooled,
                )
                tokens.append(event)
        return StepEvents(
            tokens=tuple(tokens),
            ended=tuple(record.ended for record in records if record.ended is not None),
            parked=tuple(record.parked for record in records if record.parked is not None),
            handed_over=tuple(record.handed_over for record in records if record.handed_over is not None),
        )

    def release(self, sequences: Iterable[SequenceId]) -> None:
        for sequence in sequences:
            self._records.pop(sequence, None)

    def clear(self) -> None:
        self._records.clear()


@dataclass(frozen=True, slots=True)
class Reconciled:
    """Send `resend` and then report `unknown`; end every sequence that is not in `keep`."""

    resend: StepEvents
    unknown: tuple[SequenceEnded, ...]
    keep: frozenset[SequenceId]


def reconcile(
    tracked: Collection[TrackedSequence],
    before_join: Collection[SequenceId],
    present: Collection[SequenceId],
    log: OutputLog,
) -> Reconciled:
    """Compares the coordinator's list with the worker's sequences. `before_join` are the sequences that were present or
    logged before the join: one that is not in it arrived later, from which on the coordinator assigns work, and the
    welcome, which may have been written earlier, does not list it."""
    listed = {t.sequence for t in tracked}
    new = {*present, *log.sequences()}.difference(before_join, listed)
    resend = log.since((*tracked, *(TrackedSequence(sequence, 0) for sequence in sorted(new))))
    here = set(present)
    unknown = tuple(
        SequenceEnded(t.sequence, "error", ErrorCode.UNKNOWN_SEQUENCE, "this worker has no such sequence")
        for t in tracked
        if t.here and t.sequence not in here and not log.done(t.sequence)
    )
    return Reconciled(resend, unknown, frozenset(new | listed))
