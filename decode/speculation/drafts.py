"""Where draft tokens come from, as the scheduler sees it: pure. A draft model with KV of its own, or the text itself.

A draft model's KV follows its sequence: prompt and output are computed there in chunks, from the hand-over on, where
that is expected to pay, and a step of drafting first computes what was accepted since. The KV of a wrong draft token is
written over by the next. Its blocks are few bytes each and their own pool; where they run out, a sequence goes without.
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

CATCH_UP = 16  # tokens that a draft may be behind and still draft in the same step
LONGEST, SHORTEST = 4, 2  # n-grams that are looked up


class NgramIndex:
    """Prompt lookup: the last few tokens are looked up in what came before; what followed them there is the draft
    token. Longer matches first. Complete state: the tokens of one sequence, and for each n-gram in them the position
    behind its latest occurrence but for the one at the very end, which is entered when the next token comes."""

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
        """Up to `count` tokens that may come next; none where nothing like the end came before."""
        end = len(self._tokens)
        for length in range(min(LONGEST, end), SHORTEST - 1, -1):
            start = self._after.get(tuple(self._tokens[end - length :]))
            if start is not None:
                found = self._tokens[start : start + count]
                while len(found) < count:  # it ran into the end: the text repeats itself with that period
                    found.append(found[start - end])
                return tuple(found)
        return ()


class NgramDrafts:
    """Complete state: an index for each sequence, made when first asked for."""

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
            raise InvariantError(f"indexes of {set(self._indexes) ^ sequence_ids}")

    def _index(self, sequence: Sequence) -> NgramIndex:
        index = self._indexes[sequence.id]
        index.extend(sequence.tokens(len(index), sequence.num_tokens))
        return index


@dataclass(slots=True)
class _Draft:
    block_ids: tuple[int, ...] = ()
    computed: int = 0


class ModelDrafts:
    """Complete state: `blocks` of the draft's pool, and for each sequence its blocks there and how many positions of
    it are `computed`. Positions beyond `max_positions` the draft does not know."""

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
        """Tokens of a sequence that would have to be computed before a draft token at what follows."""
        return sequence.num_tokens - self._drafts[sequence.id].computed

    def room(self, sequence: Sequence, count: int) -> int:
        """Of `count` draft tokens at the tokens after the last, how many can be made in this step."""
        draft, end = self._drafts[sequence.id], sequence.num_tokens
        if end - draft.computed > CATCH_UP:
            return 0
        # The last draft token is never computed by the draft.
        return max(0, min(count, self._reach(sequence.id, end + count - 1) - end + 1))

    def propose(self, sequence: Sequence, row: int, count: int) -> DraftRow:
        """What makes at most `count` draft tokens, no more than there is room for, for row `row` of the plan. (Of the
        text they are known already.)"""
        draft = self._drafts[sequence.id]
        tokens = sequence.tokens(draft.computed, sequence.num_tokens)
        return DraftRow(sequence.id, draft.computed, tokens, draft.block_ids, count, row)

    def on_verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Draft tokens behind the tokens that `sequence` has still were verified."""
        if drafted:
            self._drafts[sequence.id].computed = sequence.num_tokens + min(accepted, drafted - 1)

    def fill(self, sequence: Sequence, tokens: int) -> DraftRow | None:
        """A row of at most `tokens` that brings the draft's KV of a sequence nearer to its end, if one can."""
        draft = self._drafts[sequence.id]
        start = draft.computed
        # The last token is left for the row that drafts what follows it: that one needs a token to compute.
        end = self._reach(sequence.id, min(sequence.num_tokens - 1, start + tokens))
        if end <= start:
            return None
        draft.computed = end  # a step that was planned is computed, before any that is planned later
        return DraftRow(sequence.id, start, sequence.tokens(start, end), draft.block_ids)

    def check_idle(self) -> None:
        """Raises InvariantError, in constant time, when something of a sequence is left."""
        self._check_drafts(set())
        self.blocks.check_idle()

    def check(self, sequence_ids: set[SequenceId]) -> None:
        self._check_drafts(sequence_ids)
        self.blocks.check()
        held = {(b, Holder("sequence", i)) for i, draft in self._drafts.items() for b in draft.block_ids}
        self.blocks.check_held(held)

    def _check_drafts(self, sequence_ids: set[SequenceId]) -> None:
        if set(self._drafts) != sequence_ids:
            raise InvariantError(f"drafts of {set(self._drafts) ^ sequence_ids}")

    def _reach(self, sequence_id: SequenceId, end: int) -> int:
        """Takes blocks of positions [0, end), as far as there are any; returns how far they reach, at most `end`."""
        draft, size = self._drafts[sequence_id], self.layout.block_size
        end = min(end, self.max_positions)
        needed = min(self.layout.blocks_for(end) - len(draft.block_ids), self.blocks.num_free)
        if needed > 0:
            draft.block_ids += self.blocks.allocate(needed, Holder("sequence", sequence_id)) or ()
        return min(end, len(draft.block_ids) * size)


Drafts = NgramDrafts | ModelDrafts
