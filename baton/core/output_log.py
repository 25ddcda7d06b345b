"""What a worker has said about each sequence, kept until the coordinator has it, so that a broken stream loses nothing.

After a redial the coordinator names its next index per sequence and the worker says again what came from there on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.core.commands import Following
from baton.core.events import HandedOver, Parked, SequenceEnded, StepEvents, TokenEvent
from baton.core.request import SequenceId


@dataclass(slots=True)
class _Record:
    first_index: int
    tokens: list[int] = field(default_factory=list)
    ended: SequenceEnded | None = None
    parked: Parked | None = None
    handed_over: HandedOver | None = None


class OutputLog:
    """Complete state: `_records`, oldest first. At most `limit` ended sequences are kept for a coordinator that never
    releases them."""

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._records: dict[SequenceId, _Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def record(self, events: StepEvents) -> None:
        for event in events.tokens:
            record = self._records.setdefault(event.sequence, _Record(event.first_index))
            known = event.first_index - record.first_index
            record.tokens[known:] = event.tokens
        for ended in events.ended:
            self._records.setdefault(ended.sequence, _Record(0)).ended = ended
        for parked in events.parked:
            self._records.setdefault(parked.sequence, _Record(0)).parked = parked
        for over in events.handed_over:
            record = self._records.setdefault(over.sequence, _Record(0))
            record.handed_over, record.parked = over, None
        if len(self._records) > self._limit:
            done = [s for s, r in self._records.items() if r.ended is not None]
            for sequence in done[: len(self._records) - self._limit]:
                del self._records[sequence]

    def since(self, following: Iterable[Following]) -> tuple[StepEvents, tuple[SequenceId, ...]]:
        """What to say again, and the sequences named that this worker does not know (they are lost here)."""
        tokens: list[TokenEvent] = []
        ended: list[SequenceEnded] = []
        parked: list[Parked] = []
        over: list[HandedOver] = []
        unknown: list[SequenceId] = []
        for item in following:
            record = self._records.get(item.sequence)
            if record is None:
                unknown.append(item.sequence)
                continue
            start = max(item.next_index, record.first_index)
            rest = tuple(record.tokens[start - record.first_index :])
            if rest:
                tokens.append(TokenEvent(item.sequence, start, rest))
            if record.ended is not None:
                ended.append(record.ended)
            if record.parked is not None:
                parked.append(record.parked)
            if record.handed_over is not None:
                over.append(record.handed_over)
        events = StepEvents(tokens=tuple(tokens), ended=tuple(ended), parked=tuple(parked), handed_over=tuple(over))
        return events, tuple(unknown)

    def release(self, sequences: Iterable[SequenceId]) -> None:
        for sequence in sequences:
            self._records.pop(sequence, None)

    def clear(self) -> None:
        self._records.clear()
