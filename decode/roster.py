"""The sequences on a decode worker: who is here, in which state, on which blocks. Pure; it changes nothing."""

from __future__ import annotations

from baton.core.events import StageStamps
from baton.core.kv_layout import KVLayout
from baton.core.request import SequenceId
from baton.core.sequence import State
from decode.entry import Entry
from decode.holdings import Holdings


class Roster:
    """What may be asked of a scheduler at any time. Complete state: `_entries`, whose states say who is where, and
    their `_holdings`."""

    def __init__(self, layout: KVLayout, num_blocks: int, model_digest: str, prefix_cache: bool) -> None:
        self.layout = layout
        self._holdings = Holdings(layout, num_blocks, model_digest, prefix_cache)
        self.blocks, self.cache = self._holdings.blocks, self._holdings.cache
        self._entries: dict[SequenceId, Entry] = {}

    @property
    def num_running(self) -> int:
        return self._number(State.RUNNING)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not generate now: receiving, ready or preempted."""
        return len(self._entries) - self.num_running

    @property
    def num_preempted(self) -> int:
        return self._number(State.PREEMPTED)

    @property
    def num_sequences(self) -> int:
        return len(self._entries)

    def block_ids(self, sequence_id: SequenceId) -> tuple[int, ...]:
        return self._entries[sequence_id].sequence.block_ids

    def num_cached(self, sequence_id: SequenceId) -> int:
        """Positions of a receiving sequence whose KV is here already."""
        return self._entries[sequence_id].prefix.cached

    def generations(self, sequence_id: SequenceId) -> tuple[int, ...]:
        return self.blocks.generations(self.block_ids(sequence_id))

    def knows(self, sequence_id: SequenceId) -> bool:
        return sequence_id in self._entries

    def receiving(self, sequence_id: SequenceId) -> bool:
        """Whether KV of this sequence is still welcome."""
        entry = self._entries.get(sequence_id)
        return entry is not None and entry.sequence.state is State.RECEIVING and entry.sequence.ending is None

    def sequence_ids(self) -> tuple[SequenceId, ...]:
        """Those whose end is not told yet."""
        return tuple(sequence_id for sequence_id, entry in self._entries.items() if not entry.over)

    def stamps(self, sequence_id: SequenceId) -> StageStamps:
        return self._entries[sequence_id].stamps(None)

    def _in(self, *states: State) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.sequence.state in states]

    def _number(self, state: State) -> int:
        return [entry.sequence.state for entry in self._entries.values()].count(state)

    def _ranked(self, *states: State) -> list[Entry]:
        return sorted(self._in(*states), key=lambda entry: entry.rank)
