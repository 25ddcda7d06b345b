"""Sources of draft tokens as the scheduler sees them: pure. A draft model with KV of its own, or the text itself.

A draft model's KV follows its sequence: prompt and output are computed in chunks, from the hand-over on, if that is
expected to pay off, and a drafting step first computes the tokens accepted since. The KV of a rejected draft token is
overwritten by the next token. Its blocks are small, in a pool of their own; a sequence that gets none has no drafts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton.core.blocks import BlockTable
from baton.core.errors import InvariantError
from baton.core.kv_layout import KVLayout
from baton.core.sequence import Sequence
from baton.core.step import DraftRow

CATCH_UP = 16  # the draft model drafts in a step only if its KV is at most this many tokens behind
LONGEST, SHORTEST = 4, 2  # lengths of the n-grams that are looked up


class NgramIndex:
    """Prompt lookup: the last few tokens are looked up in the text before them; the tokens that followed there are the
    draft tokens. Longer matches take precedence."""

    def __init__(self) -> None:
        # Those of one sequence.
        self._tokens: list[int] = []
        # The position after the latest occurrence of each n-gram; the one at the very end is added with the next token.
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
                draft_tokens = self._tokens[start : start + count]
                while len(draft_tokens) < count:  # it reached the end: assume that the text repeats with that period
                    draft_tokens.append(draft_tokens[start - end])
                return tuple(draft_tokens)
        return ()


class NgramDrafts:
    """Each sequence's index (`Sequence.draft`) is extended when it is used."""

    def open(self, sequence: Sequence) -> None:
        sequence.draft = NgramIndex()

    def close(self, sequence: Sequence) -> None:
        sequence.draft = None

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
        pass

    def check(self, sequences: Iterable[Sequence]) -> None:
        pass

    def _index(self, sequence: Sequence) -> NgramIndex:
        index = sequence.draft
        if not isinstance(index, NgramIndex):
            raise InvariantError(f"{sequence.id} has no index of its tokens")
        index.extend(sequence.tokens(len(index), sequence.num_tokens))
        return index


@dataclass(slots=True)
class DraftKV:
    """The draft model's KV of one sequence: its blocks, and the positions whose KV is in them."""

    block_ids: tuple[int, ...] = ()
    computed: int = 0


class ModelDrafts:
    """`blocks` are those of the draft model's pool; it supports `max_positions` positions."""

    def __init__(self, layout: KVLayout, num_blocks: int, max_positions: int) -> None:
        self.layout = layout
        self.blocks = BlockTable(num_blocks)
        self.max_positions = max_positions

    def open(self, sequence: Sequence) -> None:
        sequence.draft = DraftKV()

    def close(self, sequence: Sequence) -> None:
        draft, sequence.draft = _draft_kv(sequence), None
        self.blocks.release(draft.block_ids, sequence.holder)

    def behind(self, sequence: Sequence) -> int:
        """Returns how many tokens of a sequence the draft model has to compute before it drafts the next one."""
        return sequence.num_tokens - _draft_kv(sequence).computed

    def room(self, sequence: Sequence, count: int) -> int:
        """Returns how many of `count` draft tokens after the last token can be drafted in this step."""
        draft, end = _draft_kv(sequence), sequence.num_tokens
        if end - draft.computed > CATCH_UP:
            return 0
        # The draft model never computes the KV of the last draft token.
        return max(0, min(count, self._reach(sequence, end + count - 1) - end + 1))

    def propose(self, sequence: Sequence, row: int, count: int) -> DraftRow:
        """Returns the draft row that makes `count` draft tokens, at most what `room` returned, for row `row` of the
        plan. (`NgramDrafts` returns the tokens themselves.)"""
        draft = _draft_kv(sequence)
        tokens = sequence.tokens(draft.computed, sequence.num_tokens)
        return DraftRow(sequence.id, draft.computed, tokens, draft.block_ids, count, row)

    def on_verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Records the verification of draft tokens; `sequence` does not have the accepted ones yet."""
        if drafted:
            _draft_kv(sequence).computed = sequence.num_tokens + min(accepted, drafted - 1)

    def fill(self, sequence: Sequence, tokens: int) -> DraftRow | None:
        """Returns a row of at most `tokens` tokens that extends the draft KV of a sequence; None if none can."""
        draft = _draft_kv(sequence)
        start = draft.computed
        # The last token is left for the row that drafts what follows it, which needs a token to compute.
        end = self._reach(sequence, min(sequence.num_tokens - 1, start + tokens))
        if end <= start:
            return None
        draft.computed = end  # planned steps are always computed, in the order of their planning
        return DraftRow(sequence.id, start, sequence.tokens(start, end), draft.block_ids)

    def check_idle(self) -> None:
        """Raises InvariantError, in constant time, if a block of any sequence is left."""
        self.blocks.check_idle()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raises InvariantError unless exactly these sequences hold blocks."""
        self.blocks.check()
        self.blocks.check_held({(b, s.holder) for s in sequences for b in _draft_kv(s).block_ids})

    def _reach(self, sequence: Sequence, end: int) -> int:
        """Allocates blocks for positions [0, end) while any are free; returns how many are covered, at most `end`."""
        draft, groups = _draft_kv(sequence), self.layout.groups
        end = min(end, self.max_positions)
        free = self.blocks.num_free // groups * groups
        needed = min(self.layout.blocks_for(end) - len(draft.block_ids), free)
        if needed > 0:
            draft.block_ids += self.blocks.allocate(needed, sequence.holder) or ()
        return min(end, self.layout.positions_in(len(draft.block_ids)))


def _draft_kv(sequence: Sequence) -> DraftKV:
    if not isinstance(sequence.draft, DraftKV):
        raise InvariantError(f"{sequence.id} has no KV of the draft model")
    return sequence.draft


Drafts = NgramDrafts | ModelDrafts
