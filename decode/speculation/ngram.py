"""Prompt lookup: the text so far as its own draft model, pure.

The last few tokens are looked up in what came before; what followed them there is the draft token. Longer matches
first.
"""

from __future__ import annotations

from collections.abc import Iterable

LONGEST, SHORTEST = 4, 2


class NgramIndex:
    """The tokens of one sequence, and for each n-gram in them the position behind its latest occurrence but for the one
    at the very end, which is entered when the next token comes."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

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
