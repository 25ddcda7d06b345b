"""Whose turn it is to compute tokens that are known, and how many of them, in rows of more than one token. Pure.

Lower `priority` goes first, whatever waits behind it. Then the tenants take turns by the prompt tokens that this worker
computed for them (`virtual_counters`), and each step is divided anew: a prompt of many steps gives way to another
tenant's after each of them, and keeps what is computed.

Of one tenant's sequences the one with the fewest uncomputed tokens comes first, and waiting counts as if
AGEING_TOKENS_PER_S had been computed meanwhile. So the turn of a sequence is fixed by its arrival and its remainder,
and only sequences that arrive within remainder / AGEING_TOKENS_PER_S after it can overtake it: short prompts do not
wait behind long ones, and no prompt starves.

Sequences that were preempted, and are computed again, go before the prompts of their priority, the earliest first, and
are not charged: their clients are in the middle of an answer. The boosted one of them is the very first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from baton.core.sequence import Sequence
from baton.core.virtual_counters import VirtualCounters

AGEING_TOKENS_PER_S = 2048.0
MAX_SCORED_TOKENS = 256
"""Limit of prompt tokens per step that need log-probabilities: each needs the logits of the whole vocabulary."""


class TokenBudget:
    """The tokens of a step that long rows may still use: `tokens`, and up to `spare` more so that the last of them,
    which would fit into these `tokens`, is not cut."""

    def __init__(self, tokens: int, spare: int = 0) -> None:
        self.tokens, self.scored = tokens, MAX_SCORED_TOKENS
        self._uncut, self._spare = tokens, spare

    def take(self, sequence: Sequence, remainder: int) -> int:
        """Returns how many of a sequence's uncomputed tokens the step computes, which are then used up."""
        scores = sequence.computes_prompt and sequence.request.sampling.prompt_logprobs is not None
        fits = remainder <= min(self.tokens + self._spare, self._uncut)
        count = min(remainder if fits else self.tokens, self.scored if scores else remainder, remainder)
        self.tokens -= count
        if self.tokens <= 0:
            self.tokens = self._spare = 0
        self.scored -= count if scores else 0
        return count


class Turns:
    """The turns of those whose long rows one worker computes."""

    def __init__(self, counters: VirtualCounters | None = None) -> None:
        self._counters = counters or VirtualCounters()  # of tenants, in tokens

    def copy(self) -> Turns:
        return Turns(self._counters.copy())

    def arrives(self, sequence: Sequence, here: Iterable[Sequence]) -> None:
        """Records that a prompt arrives; `here` are those that the worker has not computed yet."""
        tenants = {other.request.tenant for other in here}
        if sequence.request.tenant not in tenants:
            self._counters.enter(sequence.request.tenant, tenants)

    def computes(self, sequence: Sequence, tokens: int) -> None:
        """Charges tokens of a prompt that a step computes."""
        if sequence.computes_prompt:
            self._counters.charge(sequence.request.tenant, tokens, takes_turn=True)
            self._counters.leave(sequence.request.tenant)

    def order(self, remainders: Mapping[Sequence, int]) -> Iterator[Sequence]:
        """Yields sequences, given with the number of their uncomputed tokens, in the order in which they are computed.
        The caller charges the tokens of each before it asks for the next one."""
        if len(remainders) == 1:
            yield from remainders
            return
        lanes: dict[tuple[tuple[int, bool, bool], str], deque[tuple[tuple[float, int], Sequence]]] = {}
        for own, sequence in sorted((_turn(s, remainder), s) for s, remainder in remainders.items()):
            request, again = sequence.request, not sequence.computes_prompt
            level = request.priority, not sequence.boosted, not again
            lanes.setdefault((level, "" if again else request.tenant), deque()).append((own, sequence))
        while lanes:
            lane = min(lanes, key=lambda lane: (lane[0], self._counters.turn(lane[1]), lanes[lane][0][0]))
            yield lanes[lane].popleft()[1]
            if not lanes[lane]:
                del lanes[lane]

    def share(self, remainders: Mapping[Sequence, int], tokens: int) -> dict[Sequence, int]:
        """Returns how many tokens each sequence computes in a step of which `tokens` are for long rows. Nothing is
        charged: some of the rows may turn out to have no blocks."""
        turns, budget, counts = self.copy(), TokenBudget(tokens), dict.fromkeys(remainders, 0)
        for sequence in turns.order(remainders):
            if not budget.tokens:
                break
            counts[sequence] = budget.take(sequence, remainders[sequence])
            turns.computes(sequence, counts[sequence])
        return counts


def _turn(sequence: Sequence, remainder: int) -> tuple[float, int]:
    """Sort key: of the sequences of a tenant, the one with the lowest is computed first."""
    if not sequence.computes_prompt:
        remainder = 0
    return sequence.arrived_at + remainder / AGEING_TOKENS_PER_S, sequence.number
