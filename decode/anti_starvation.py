"""Anti-starvation: who goes on while blocks are short, and who comes back: pure.

A preempted sequence has to be recomputed before it generates another token. For each waiting one to emit a token every
SILENCE_S, all of them have to be recomputed within that time; RECOMPUTE_SHARE of all time may be spent on it. The cost
of recomputing a token then gives both rules:

- Boost. In each priority one sequence at a time may take others' blocks to come back: the one that has been silent
  longest, as late as all that wait can still be served in time, and no sooner than the share allows. If the share does
  not suffice, each waits longer, all equally long.
- Throttle. Few are preempted if few grow. While blocks are short only as many sequences as can be served in time run
  at full rate, the oldest; each of the others keeps its blocks and computes one step every THROTTLED_INTERVAL_S. The
  blocks that the first leave behind are for all.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.request import SequenceId
from decode.entry import Entry

SILENCE_S = 1.5  # of a stream, that turns are planned by; what is planned comes a little later
RECOMPUTE_SHARE = 0.3  # of all time, for turns
BOOST_TOKENS = 4  # who was given the turn keeps it until it has generated that many more
THROTTLED_INTERVAL_S = 0.4  # between two tokens of a sequence that keeps its blocks but is not among the first
_LEAST_SHARE = 4  # one in so many goes on at full pace, whatever recomputation costs: narrow steps cost most


class AntiStarvation:
    """Complete state: for each priority who has its turn, and its output then (`_given`); before `_next_at` nobody is
    given another."""

    def __init__(self) -> None:
        self._boosted: dict[int, tuple[Entry, int]] = {}
        self._next_at = float("-inf")

    def update(self, waiting: Sequence[Entry], now: float, token_s: float) -> None:
        """Ends turns, and gives one to whom of the preempted it is due. `token_s`: to compute a token again."""
        for priority, (entry, output) in list(self._boosted.items()):
            if entry.sequence.finished or len(entry.sequence.output) >= output + BOOST_TOKENS:
                entry.boosted = False
                del self._boosted[priority]
        if now < self._next_at:
            return
        ahead_s, longest = 0.0, dict[int, Entry]()
        for entry in sorted(waiting, key=lambda e: (e.sequence.request.priority, e.last_token_at)):
            priority = entry.sequence.request.priority
            first = longest.setdefault(priority, entry)
            ahead_s += _boost_s(entry, token_s)
            if priority not in self._boosted and now - entry.last_token_at + ahead_s >= SILENCE_S:
                first.boosted = True
                self._boosted[priority] = first, len(first.sequence.output)
                self._next_at = now + _boost_s(first, token_s)
                return


def _boost_s(entry: Entry, token_s: float) -> float:
    """How long a turn takes of which recomputation is RECOMPUTE_SHARE."""
    return entry.sequence.num_tokens * token_s / RECOMPUTE_SHARE


def num_unthrottled(here: Sequence[Entry], token_s: float) -> int:
    """How many of those that are here go on at full pace while blocks are short: at least one."""
    tokens = sum(entry.sequence.num_tokens for entry in here) / max(len(here), 1)
    served = int(RECOMPUTE_SHARE * SILENCE_S / max(tokens * token_s, 1e-9))
    return max(served, len(here) // _LEAST_SHARE, 1)


def throttled(running: Sequence[Entry], most: int, now: float) -> set[SequenceId]:
    """Those of the running, ranked, that keep their blocks and compute nothing now: of the last priority, behind
    the first `most`. One that is recomputed, or boosted, is never throttled."""
    return {
        entry.sequence.id
        for entry in running[most:]
        if entry.rank[:2] == (running[-1].rank[0], True)
        and entry.sequence.num_uncomputed == 1
        and now - entry.last_token_at < THROTTLED_INTERVAL_S
    }
