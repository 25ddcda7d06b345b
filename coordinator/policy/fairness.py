"""Fair service between tenants by virtual token counters. Pure.

The Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2: each
tenant has a counter of the service it has received, `INPUT_WEIGHT` for each prompt token that is computed for it and
`OUTPUT_WEIGHT` for each token generated, and the waiting tenant with the smallest counter goes next. A tenant that had
nothing waiting is lifted to the smallest counter of those that wait, so that time without requests earns no credit. No
tenant is held back while nobody else waits: the order is work-conserving.

For two tenants that wait during a whole interval, the difference of the service that they receive in it is at most
2 max(INPUT_WEIGHT L, OUTPUT_WEIGHT M), for prompts of at most L tokens and M tokens that fit on the decode workers
(theorem 4.4). A tenant with `weight` w counts 1/w of its service, and receives w times as much.
"""

from __future__ import annotations

from collections.abc import Iterable

INPUT_WEIGHT, OUTPUT_WEIGHT = 1, 2
"""As in the paper: what hosted models charge for tokens. Any two positive values are fair in this sense."""


class VirtualCounters:
    """Counters of tenants that share one queue."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}  # the counters
        self._turns: dict[str, int] = {}  # the number of the last prompt charged to each tenant
        self._prompts = 0
        self._last_left = ""  # the last tenant that left the queue: others are lifted to it when nobody waits

    def of(self, tenant: str) -> float:
        return self._served.get(tenant, 0.0)

    def turn(self, tenant: str) -> tuple[float, int]:
        """Returns the sort key of a tenant that waits: the lowest goes next. Of equal counters, the one served longest
        ago: a tenant that was idle has just been lifted to the counter of another."""
        return self.of(tenant), self._turns.get(tenant, 0)

    def after_idle(self, tenant: str, waiting: Iterable[str]) -> float:
        """Returns the counter with which a tenant that has nothing in the queue would enter it; `waiting` are those
        in it."""
        floor = min(map(self.of, waiting), default=self.of(self._last_left))
        return max(self.of(tenant), floor)

    def enter(self, tenant: str, waiting: Iterable[str]) -> None:
        """Lifts the counter of a tenant that had nothing in the queue."""
        self._served[tenant] = self.after_idle(tenant, waiting)

    def leave(self, tenant: str) -> None:
        """Records that a tenant has nothing in the queue any more."""
        self._last_left = tenant

    def charge(self, tenant: str, weight: int, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Counts service that a tenant received."""
        cost = INPUT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens
        self._served[tenant] = self.of(tenant) + cost / weight
        if prompt_tokens:
            self._prompts += 1
            self._turns[tenant] = self._prompts
