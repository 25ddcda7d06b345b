"""Sources of draft tokens as the scheduler sees them: pure. A draft model with KV of its own, or the text itself.

A draft model's KV follows its sequence: prompt and output are computed in chunks, from the hand-over on, if that is
expected to pay off, and a drafting step first computes the tokens accepted since. The KV of a rejected draft token is
overwritten by the next token. Its blocks are small, in a pool of their own; a sequence that gets none has no drafts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton.core.blocks import BlockTable, Holder
from baton.core.errors import InvariantError
from baton.core.kv_layout import KVLayout
from baton.core.request import SequenceId
from baton.core.sequence import Sequence
from baton.core.step import DraftRow

CATCH_UP = 16  # the draft model drafts in a step only if its KV is at most this many tokens behind
LONGEST, SHORTEST = 4, 2  # lengths of the n-grams that are looked up


class NgramIndex:
    """Prompt lookup: the last few tokens are looked up in the text before them; the tokens that followed there are the
    draft tokens. Longer matches take precedence. Complete state: the tokens of one sequence, and for each n-gram in
    them the position after its latest occurrence; the one at the very end is added with the next token."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            end = len(self._tokens)
            for length in range(SHORTEST, LONGEST + 1):
                if end >= length:
                    self._after[tuple(self._tokens[end - length :])] = end
            self._tokens.append(token)

    def propose(self, count: int) -> tuple[int, ...]:
        """Returns `count` tokens that may come next, or none if the last tokens have not occurred before."""
        end = len(self._tokens)
        for length in range(min(LONGEST, end), SHORTEST - 1, -1):
            start = self._after.get(tuple(self._tokens[end - length :]))
            if start is not None:
                found = self._tokens[start : start + count]
                while len(found) < count:  # it reached the end: assume that the text repeats with that period
                    found.append(found[start - end])
                return tuple(found)
        return ()


class NgramDrafts:
    """Complete state: an index for each open sequence, extended when it is used."""

    def __init__(self) -> None:
        self._indexes: dict[SequenceId, NgramIndex] = {}

    def open(self, sequence: Sequence) -> None:
        self._indexes[sequence.id] = NgramIndex()

    def close(self, sequence_id: SequenceId) -> None:
        self._indexes.pop(sequence_id, None)

    def behind(self, sequence: Sequence) -> int:
        return 0

    def room(self, sequence: Sequence, count: int) -> int:
        return len(self._index(sequence).propose(count))

    def propose(self, sequence: Sequence, row: int, count: int) -> tuple[int, ...]:
        return self._index(sequence).propose(count)

    def on_verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        pass

    def fill(self, sequence: Sequence, tokens: int) -> DraftRow | None:
        return None

    def check_idle(self) -> None:
        self.check(set())

    def check(self, sequence_ids: set[SequenceId]) -> None:
        if set(self._indexes) != sequence_ids:
            raise InvariantError(f"n-gram indexes do not match the sequences: {set(self._indexes) ^ sequence_ids}")

    def _index(self, sequence: Sequence) -> NgramIndex:
        index = self._indexes[sequence.id]
        index.extend(sequence.tokens(len(index), sequence.num_tokens))
        return index


@dataclass(slots=True)
class _Draft:
    block_ids: tuple[int, ...] = ()
    computed: int = 0


class ModelDrafts:
    """Complete state: `blocks` of the draft model's pool, and for each sequence its blocks there and how many of its
    positions are `computed`. The draft model supports `max_positions` positions."""

    def __init__(self, layout: KVLayout, num_blocks: int, max_positions: int) -> None:
        self.layout = layout
        self.blocks = BlockTable(num_blocks)
        self.max_positions = max_positions
        self._drafts: dict[SequenceId, _Draft] = {}

    def open(self, sequence: Sequence) -> None:
        self._drafts[sequence.id] = _Draft()

    def close(self, sequence_id: SequenceId) -> None:
        draft = self._drafts.pop(sequence_id, None)
        if draft is not None:
            self.blocks.release(draft.block_ids, Holder("sequence", sequence_id))

    def behind(self, sequence: Sequence) -> int:
        """Returns how many tokens of a sequence the draft model has to compute before it drafts the next one."""
        return sequence.num_tokens - self._drafts[sequence.id].computed

    def room(self, sequence: Sequence, count: int) -> int:
        """Returns how many of `count` draft tokens after the last token can be drafted in this step."""
        draft, end = self._drafts[sequence.id], sequence.num_tokens
        if end - draft.computed > CATCH_UP:
            return 0
        # The draft model never computes the KV of the last draft token.
        return max(0, min(count, self._reach(sequence.id, end + count - 1) - end + 1))

    def propose(self, sequence: Sequence, row: int, count: int) -> DraftRow:
        """Returns the draft row that makes `count` draft tokens, at most what `room` returned, for row `row` of the
        plan. (`NgramDrafts` returns the tokens themselves.)"""
        draft = self._drafts[sequence.id]
        tokens = sequence.tokens(draft.computed, sequence.num_tokens)
        return DraftRow(sequence.id, draft.computed, tokens, draft.block_ids, count, row)

    def on_verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Records the verification of draft tokens; `sequence` does not have the accepted ones yet."""
        if drafted:
            self._drafts[sequence.id].computed = sequence.num_tokens + min(accepted, drafted - 1)

    def fill(self, sequence: Sequence, tokens: int) -> DraftRow | None:
        """Returns a row of at most `tokens` tokens that extends the draft KV of a sequence; None if none can."""
        draft = self._drafts[sequence.id]
        start = draft.computed
        # The last token is left for the row that drafts what follows it, which needs a token to compute.
        end = self._reach(sequence.id, min(sequence.num_tokens - 1, start + tokens))
        if end <= start:
            return None
        draft.computed = end  # planned steps are always computed, in the order of their planning
        return DraftRow(sequence.id, start, sequence.tokens(start, end), draft.block_ids)

    def check_idle(self) -> None:
        """Raises InvariantError, in constant time, if state of any sequence is left."""
        self._check_drafts(set())
        self.blocks.check_idle()

    def check(self, sequence_ids: set[SequenceId]) -> None:
        self._check_drafts(sequence_ids)
        self.blocks.check()
        held = {(b, Holder("sequence", i)) for i, draft in self._drafts.items() for b in draft.block_ids}
        self.blocks.check_held(held)

    def _check_drafts(self, sequence_ids: set[SequenceId]) -> None:
        if set(self._drafts) != sequence_ids:
            raise InvariantError(f"drafts do not match the sequences: {set(self._drafts) ^ sequence_ids}")

    def _reach(self, sequence_id: SequenceId, end: int) -> int:
        """Allocates blocks for positions [0, end) while any are free; returns how many are covered, at most `end`."""
        draft, size = self._drafts[sequence_id], self.layout.block_size
        end = min(end, self.max_positions)
        needed = min(self.layout.blocks_for(end) - len(draft.block_ids), self.blocks.num_free)
        if needed > 0:
            draft.block_ids += self.blocks.allocate(needed, Holder("sequence", sequence_id)) or ()
        return min(end, len(draft.block_ids) * size)


Drafts = NgramDrafts | ModelDrafts
