"""Who goes on while blocks are short, and who comes back: pure.

A sequence that was preempted has to be computed again before it says another word. If each of those that wait is to be
heard again within SILENCE_S, all of them are computed again within that time; RECOMPUTE_SHARE of all time is given to
it. From what a token costs to compute again follow both rules here:

- Turns. Of each priority one at a time may take others' blocks to come back: who has been silent longest, as late as
  all that wait can still be heard in time, and no sooner than the share allows. More than it allows wait longer, each
  as long as the others.
- Pace. Few are preempted if few grow. While blocks are short, as many sequences as could be kept heard go on, the
  oldest; behind them each keeps its blocks and says a token now and then. What the first leave behind when they end is
  for all.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.request import SequenceId
from decode.entry import Entry

SILENCE_S = 1.5  # of a stream, that turns are planned by; what is planned comes a little later
RECOMPUTE_SHARE = 0.3  # of all time, for turns
TURN_TOKENS = 4  # who was given the turn keeps it until it has generated that many more
PACE_S = 0.4  # between two tokens of a sequence that keeps its blocks but is not among the first
_LEAST_SHARE = 4  # one in so many goes on at full pace, whatever recomputation costs: narrow steps cost most


class Turns:
    """Complete state: for each priority who has its turn, and its output then (`_given`); before `_next_at` nobody is
    given another."""

    def __init__(self) -> None:
        self._given: dict[int, tuple[Entry, int]] = {}
        self._next_at = float("-inf")

    def give(self, waiting: Sequence[Entry], now: float, token_s: float) -> None:
        """Ends turns, and gives one to whom of the preempted it is due. `token_s`: to compute a token again."""
        for priority, (entry, output) in list(self._given.items()):
            if entry.sequence.finished or len(entry.sequence.output) >= output + TURN_TOKENS:
                entry.favoured = False
                del self._given[priority]
        if now < self._next_at:
            return
        ahead_s, longest = 0.0, dict[int, Entry]()
        for entry in sorted(waiting, key=lambda e: (e.sequence.request.priority, e.heard_at)):
            priority = entry.sequence.request.priority
            first = longest.setdefault(priority, entry)
            ahead_s += _turn_s(entry, token_s)
            if priority not in self._given and now - entry.heard_at + ahead_s >= SILENCE_S:
                first.favoured = True
                self._given[priority] = first, len(first.sequence.output)
                self._next_at = now + _turn_s(first, token_s)
                return


def _turn_s(entry: Entry, token_s: float) -> float:
    """How long a turn takes of which recomputation is RECOMPUTE_SHARE."""
    return entry.sequence.num_tokens * token_s / RECOMPUTE_SHARE


def full_pace(here: Sequence[Entry], token_s: float) -> int:
    """How many of those that are here go on at full pace while blocks are short: at least one."""
    tokens = sum(entry.sequence.num_tokens for entry in here) / max(len(here), 1)
    heard = int(RECOMPUTE_SHARE * SILENCE_S / max(tokens * token_s, 1e-9))
    return max(heard, len(here) // _LEAST_SHARE, 1)


def rest(running: Sequence[Entry], most: int, now: float) -> set[SequenceId]:
    """Those of the running, ranked, that keep their blocks without saying anything now: of the last priority, behind
    the first `most`. One that is computed again, or has the turn, never rests."""
    return {
        entry.sequence.id
        for entry in running[most:]
        if entry.rank[:2] == (running[-1].rank[0], True)
        and entry.sequence.num_uncomputed == 1
        and now - entry.heard_at < PACE_S
    }
