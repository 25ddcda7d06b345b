"""What a worker has said about each sequence, kept until the coordinator has it, so that a broken stream loses nothing.

After a redial the coordinator names its next index per sequence and the worker says again what came from there on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.core.commands import Following
from baton.core.errors import InvariantError
from baton.core.events import HandedOver, Parked, SequenceEnded, SpeculationCounters, StepEvents, TokenEvent
from baton.core.request import SequenceId, TokenLogprob


@dataclass(slots=True)
class _Record:
    # Index of tokens[0]; None until a token has been said.
    first_index: int | None = None
    tokens: list[int] = field(default_factory=list)
    # As many as tokens, or none.
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    cached_tokens: int = 0
    speculation: SpeculationCounters | None = None
    ended: SequenceEnded | None = None
    parked: Parked | None = None
    handed_over: HandedOver | None = None

    @property
    def done(self) -> bool:
        return self.ended is not None or self.handed_over is not None


class OutputLog:
    """Complete state: `_records`, oldest first. At most `limit` sequences are kept for a coordinator that never
    releases them; the oldest that are done go first."""

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._records: dict[SequenceId, _Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def record(self, events: StepEvents) -> None:
        """Keeps what is about to be said. A token event may repeat what was said before.

        Raises:
            InvariantError: the tokens leave a gap after those of the sequence so far, or begin before them.
        """
        for event in events.tokens:
            record = self._records.setdefault(event.sequence, _Record())
            if record.first_index is None:
                record.first_index = event.first_index
            known = event.first_index - record.first_index
            if not 0 <= known <= len(record.tokens):
                raise InvariantError(f"tokens of {event.sequence} from {event.first_index} leave a gap")
            record.tokens[known : known + len(event.tokens)] = event.tokens
            record.logprobs[known : known + len(event.logprobs)] = event.logprobs
            record.prompt_logprobs = record.prompt_logprobs or event.prompt_logprobs
            record.cached_tokens = max(record.cached_tokens, event.cached_tokens)
            record.speculation = event.speculation or record.speculation
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
        """Those of which something is kept."""
        return tuple(self._records)

    def done(self, sequence: SequenceId) -> bool:
        """Whether the end of a sequence here has been said, and is kept."""
        record = self._records.get(sequence)
        return record is not None and record.done

    def since(self, following: Iterable[Following]) -> StepEvents:
        """What to say again."""
        tokens: list[TokenEvent] = []
        records: list[_Record] = []
        for item in following:
            record = self._records.get(item.sequence)
            if record is None:
                continue
            records.append(record)
            first = record.first_index or 0
            start = max(item.next_index, first)
            rest = tuple(record.tokens[start - first :])
            if rest or record.prompt_logprobs:
                logprobs = tuple(record.logprobs[start - first :])
                scores, cached = record.prompt_logprobs, record.cached_tokens
                tokens.append(TokenEvent(item.sequence, start, rest, logprobs, scores, cached, record.speculation))
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
