"""Anti-starvation: which sequences continue while blocks are short, and which preempted ones resume: pure.

A preempted sequence has to be recomputed before it generates another token. For each waiting sequence to emit a token
every TOKEN_GAP_S, all of them have to be recomputed within that time; RECOMPUTE_SHARE of all time may be spent on it.
The cost of recomputing a token then determines both rules:

- Boost. In each priority one sequence at a time may take the blocks of others to resume: the one whose last token is
  the oldest. It is boosted as late as all waiting sequences can still be served in time, and no sooner than
  RECOMPUTE_SHARE allows. If the share does not suffice, all of them wait longer, equally long.
- Throttle. Few sequences are preempted if few grow. While blocks are short, only as many sequences as can be served in
  time run at full rate, the oldest ones; each of the others keeps its blocks and computes one step every
  THROTTLED_INTERVAL_S. The blocks that finished sequences free are available to all.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.core.request import SequenceId
from baton.core.sequence import Sequence

TOKEN_GAP_S = 1.5  # gap between two tokens of a stream that boosts aim for; the actual gap is slightly longer
RECOMPUTE_SHARE = 0.3  # of all time, for recomputing boosted sequences
BOOST_TOKENS = 4  # a boost ends after this many more tokens of its sequence
THROTTLED_INTERVAL_S = 0.4  # between two tokens of a throttled sequence
_LEAST_SHARE = 4  # at least 1 of this many runs at full rate, whatever recomputation costs: small steps cost most


class AntiStarvation:
    def __init__(self) -> None:
        # The boosted sequence of each priority, and the length of its output when it was boosted.
        self._boosted: dict[int, tuple[Sequence, int]] = {}
        # No other sequence is boosted before this time.
        self._next_at = float("-inf")

    def update(self, waiting: Iterable[Sequence], now: float, token_s: float) -> None:
        """Ends boosts, and boosts a preempted sequence if one is due. `token_s`: the cost of recomputing one token."""
        for priority, (sequence, output_len) in list(self._boosted.items()):
            if sequence.finished or len(sequence.output) >= output_len + BOOST_TOKENS:
                sequence.boosted = False
                del self._boosted[priority]
        if now < self._next_at:
            return
        ahead_s, longest = 0.0, dict[int, Sequence]()
        for sequence in sorted(waiting, key=lambda s: (s.request.priority, s.last_token_at)):
            priority = sequence.request.priority
            first = longest.setdefault(priority, sequence)
            ahead_s += _boost_s(sequence, token_s)
            if priority not in self._boosted and now - sequence.last_token_at + ahead_s >= TOKEN_GAP_S:
                first.boosted = True
                self._boosted[priority] = first, len(first.output)
                self._next_at = now + _boost_s(first, token_s)
                return


def _boost_s(sequence: Sequence, token_s: float) -> float:
    """Returns the time of which recomputing the sequence takes RECOMPUTE_SHARE."""
    return sequence.num_tokens * token_s / RECOMPUTE_SHARE


def num_unthrottled(here: list[Sequence], token_s: float) -> int:
    """Returns how many of the sequences `here` run at full rate while blocks are short: at least one."""
    tokens = sum(sequence.num_tokens for sequence in here) / max(len(here), 1)
    served = int(RECOMPUTE_SHARE * TOKEN_GAP_S / max(tokens * token_s, 1e-9))
    return max(served, len(here) // _LEAST_SHARE, 1)


def throttled(running: list[Sequence], num_full_rate: int, now: float) -> set[SequenceId]:
    """Returns which of the running sequences, given by rank, keep their blocks and compute nothing now: those of the
    lowest priority after the first `num_full_rate`, except boosted sequences and those that are being recomputed."""
    return {
        sequence.id
        for sequence in running[num_full_rate:]
        if sequence.rank[:2] == (running[-1].rank[0], True)
        and sequence.num_uncomputed == 1
        and now - sequence.last_token_at < THROTTLED_INTERVAL_S
    }
