"""Whether a choice whose workers were lost is tried again. Pure.

Whether a choice ended its worker cannot be determined from outside. A choice that was running on SUSPECT_DEATHS workers
when they were lost may be the cause: from then on it is computed in steps of its own, announced by its worker
(`StepEvents.alone`), so that a loss in such a step concerns no other choice, and a loss in another step not this one.
It ends with an error when it was alone in its step at ALONE_DEATHS losses, or at `max_deaths` losses in all, or if it
failed again with at most one new token when the budget for this is used up.

The budget limits how often choices may fail again, since in an outage retries must not multiply the load. It is a token
bucket as gRPC's retry throttling has (gRFC A6): a failure takes a token, an answer that is completed returns
TOKEN_RATIO of one, and without a token nothing is tried again. Two things differ. The loss of a worker is one failure,
however many choices ran there. And a choice that was never tried again, or has received more than the one token of its
prefill since, does not depend on the budget: so the loss of any one worker ends no stream, and in an outage in which
nothing else is generated, each choice is computed at most twice once the budget is used up.
"""

from __future__ import annotations

from baton.core.errors import BatonError, Unavailable, WorkerLost
from baton.core.events import StepEvents
from baton.core.request import ChoiceId
from coordinator.policy.choice import Choice, LostWorker
from coordinator.policy.codes import PlacementCode

ALONE_DEATHS = 2
"""One could be a kill from outside that coincides with its step."""
MAX_TOKENS, TOKEN_RATIO = 10.0, 0.1
"""As in gRPC's examples. With so many losses in a row the cause of a worker's death is isolated."""


class RetryBudget:
    def __init__(self) -> None:
        self.tokens = MAX_TOKENS
        self.refused = 0  # choices that were not tried again
        self._permitted: bool | None = None  # by the present failure; None while it has taken no token

    def failure(self) -> None:
        """Begins a failure: of all choices that fail until the next one, at most one token is taken."""
        self._permitted = None

    def permits(self) -> bool:
        """Returns whether a choice may be tried again that failed again with at most one new token."""
        if self._permitted is None:
            self._permitted = self.tokens >= 1.0
            self.tokens -= self._permitted
        self.refused += not self._permitted
        return self._permitted

    def completed(self) -> None:
        """Records that an answer was completed."""
        self.tokens = min(MAX_TOKENS, self.tokens + TOKEN_RATIO)


class Losses:
    def __init__(self, max_deaths: int) -> None:
        self.budget = RetryBudget()
        self._max_deaths = max_deaths
        self._alone: dict[str, ChoiceId] = {}  # the choice that a worker computes alone now

    def reported(self, worker: str, events: StepEvents) -> None:
        """Records what a worker reports about its step, and begins a failure."""
        self.budget.failure()
        if events.alone is not None:
            self._alone[worker] = events.alone.choice_id
        elif events.step_id:
            self._alone.pop(worker, None)

    def lost(self, worker: str, reason: str, *, drained: bool) -> LostWorker:
        """Records the loss of a worker, which is one failure."""
        self.budget.failure()
        return LostWorker(worker, reason, self._alone.pop(worker, None), drained)

    def count(self, choice: Choice, loss: LostWorker, *, ran: bool) -> None:
        """Counts a death of a choice that depended on a lost worker: if the worker `ran` it, unless another choice, or
        this one among others, was computed when it has to be alone."""
        if ran and not loss.drained and (choice.name == loss.alone if choice.alone else loss.alone is None):
            how = ", alone in its step" if choice.alone else ""
            choice.alone_deaths += choice.alone
            choice.deaths.append(f"{loss.worker} ({loss.reason}, stage {choice.stage.value}{how})")

    def error(self, choice: Choice, why: str, retry_after_s: float, *, planned: bool) -> BatonError | None:
        """Returns the error with which a choice ends instead of being tried again, if any. `planned`: nothing has
        failed, a worker leaves."""
        if choice.alone_deaths >= ALONE_DEATHS or len(choice.deaths) >= self._max_deaths:
            deaths = ", ".join(choice.deaths)
            message = f"{len(choice.deaths)} workers were lost while they ran the request: {deaths}"
            return WorkerLost(message, retry_after_s=1)
        if not planned:
            tokens = len(choice.tokens)
            if tokens <= choice.tokens_at_failure + 1 and not self.budget.permits():  # the first one is of the prefill
                message = (
                    f"{why}; it failed before with at most one new token, and so do too many requests to try it again"
                )
                return Unavailable(message, code=PlacementCode.RETRY_BUDGET_EXHAUSTED, retry_after_s=retry_after_s)
            choice.tokens_at_failure = tokens
        return None
