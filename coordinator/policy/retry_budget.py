"""How often choices may fail again before they are not tried again: in an outage, retries must not multiply the load.
Pure.

A token bucket as gRPC's retry throttling has (gRFC A6): a failure takes a token, an answer that is completed returns
TOKEN_RATIO of one, and without a token nothing is tried again. Two things differ. The loss of a worker is one failure,
however many choices ran there. And a choice that was never tried again, or has received more than the one token of its
prefill since, does not depend on the budget: so the loss of any one worker ends no stream, and in an outage in which
nothing else is generated, each choice is computed at most twice once the budget is used up.
"""

from __future__ import annotations

MAX_TOKENS, TOKEN_RATIO = 10.0, 0.1
"""As in gRPC's examples. With so many losses in a row the cause of a worker's death is isolated (policy.requests)."""


class RetryBudget:
    def __init__(self) -> None:
        self.tokens = MAX_TOKENS
        self.refused = 0  # choices that were not tried again
        self._permitted: bool | None = None  # by the present failure; None while it has taken no token

    def failure(self) -> None:
        """Begins a failure: of all choices that fail until the next one, at most one token is taken."""
        self._permitted = None

    def permits(self) -> bool:
        """Returns whether a choice may be tried again that failed again without a new token."""
        if self._permitted is None:
            self._permitted = self.tokens >= 1.0
            self.tokens -= self._permitted
        self.refused += not self._permitted
        return self._permitted

    def completed(self) -> None:
        """Records that an answer was completed."""
        self.tokens = min(MAX_TOKENS, self.tokens + TOKEN_RATIO)
