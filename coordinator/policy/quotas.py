"""Clients, their limits, and how much of them they have used. Pure.

Requests and tokens per minute are token buckets (the network's, as in RFC 2697) of one minute's worth. A request is
charged as one request when it begins, and for its tokens (uncached prompt tokens and generated ones) when it ends,
since they are unknown before. It may begin while any token is left; if it overdraws the bucket, the next one waits.
Beyond `requests_at_once`, `Retry-After` follows from the rate at which the key's choices ended while at the limit.

A drain rate is how fast what waits gets its turn, measured: prompt tokens placed per second while choices wait in the
queue, or choices that end per second while a key is at its limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from baton.core.errors import InvariantError, QuotaExceeded

WINDOW_S = 10.0
"""Older measurements count less: by 1/e after so many seconds in which choices waited."""
MAX_RETRY_S = 60.0


class DrainRate:
    def __init__(self) -> None:
        self._tokens = 0.0  # that were placed while choices waited, decayed, as the next
        self._seconds = 0.0  # in which choices waited
        self._at = 0.0  # when choices were last known to wait
        self._waited = False  # since the last update

    def update(self, now: float, placed_tokens: int, *, waits: bool) -> None:
        """Counts what was just placed; `waits`: whether choices are left for which workers have no room now. What is
        placed while nothing waits says nothing about the rate, and what was measured before a long pause neither."""
        elapsed_s = now - self._at
        if not self._waited and elapsed_s > WINDOW_S:
            self._tokens = self._seconds = 0.0
        elif self._waited:
            kept = math.exp(-elapsed_s / WINDOW_S)
            self._tokens = self._tokens * kept + placed_tokens
            self._seconds = self._seconds * kept + elapsed_s
        if waits or self._waited:
            self._at = now
        self._waited = waits

    @property
    def measured(self) -> bool:
        """Whether choices have waited for so long that requests may be refused by the rate. Its first moments say
        little: when workers have just joined, one short prompt may be placed while many wait for their turn."""
        return self._tokens > 0 and self._seconds >= WINDOW_S / 2

    def seconds(self, tokens: float) -> float | None:
        """Returns how long so many tokens take to leave the queue; None if nothing has been measured."""
        return tokens * self._seconds / self._tokens if self._tokens > 0 else None

    def retry_after_s(self, tokens: float) -> float:
        """Returns after how many seconds a refused client should try again, if so many tokens have to leave first."""
        return max(1.0, min(self.seconds(tokens) or 0.0, MAX_RETRY_S))


MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one key; 0 means unlimited. Beyond `max_running` choices at workers, others wait (policy.dispatch);
    what exceeds another limit is refused."""

    requests_at_once: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_running: int = 0


@dataclass(frozen=True, slots=True)
class Client:
    """A client: `key` names its API key in logs and metrics, `tenant` the owner of the key. Requests with a lower
    `priority` go first; a request cannot have a lower one than its client. `weight` is the share of its tenant beside
    others (policy.fair_queue)."""

    key: str = ""
    tenant: str = ""
    priority: int = 0
    limits: KeyLimits = field(default_factory=KeyLimits)
    weight: int = 1


ANONYMOUS = Client()


@dataclass(slots=True)
class _Bucket:
    level: float
    rate: float
    """Per second."""
    at: float

    def refill(self, now: float) -> None:
        self.level = min(self.level + (now - self.at) * self.rate, self.rate * MINUTE_S)
        self.at = now

    def wait_s(self, required: float) -> float:
        """Returns the seconds until `required` is in the bucket; 0 if it is."""
        return max(0.0, (required - self.level) / self.rate)


@dataclass(slots=True)
class _Account:
    running: int = 0
    ends: DrainRate = field(default_factory=DrainRate)
    """Choices that end per second while as many run as may."""
    requests: _Bucket | None = None
    tokens: _Bucket | None = None

    def measure(self, limit: int, now: float, ended: int = 0) -> None:
        if limit:
            self.ends.update(now, ended, waits=self.running >= limit)


class Quotas:
    """Running choices and token buckets of each key that has limits."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def admit(self, client: Client, now: float, choices: int = 1) -> None:
        """Counts a request that begins; must be followed by `ended`. Each of its `choices` counts as running; a request
        with more choices than its key may run at once needs the key to have nothing else running.

        Raises:
            QuotaExceeded: a limit is reached; nothing was counted.
        """
        if (account := self.check(client, now, choices)) is None:
            return
        account.running += choices
        account.measure(client.limits.requests_at_once, now)
        if account.requests is not None:
            account.requests.level -= 1

    def check(self, client: Client, now: float, choices: int = 1) -> _Account | None:
        """Returns the account of a client that may begin a request, None if it has no limits. Raises QuotaExceeded."""
        limits = client.limits
        if limits == KeyLimits():
            return None
        account = self._accounts.get(client.key)
        if account is None:
            account = self._accounts[client.key] = _Account(
                requests=_full(limits.requests_per_minute, now), tokens=_full(limits.tokens_per_minute, now)
            )
        limit = limits.requests_at_once
        if limit and (excess := account.running + min(choices, limit) - limit) > 0:
            account.measure(limit, now)
            message = f"this API key is limited to {limit} concurrent requests, counting each choice"
            raise QuotaExceeded(message, retry_after_s=account.ends.retry_after_s(excess))
        for bucket, required, limit, counted in (
            (account.requests, 1.0, limits.requests_per_minute, "requests"),
            (account.tokens, 1e-9, limits.tokens_per_minute, "tokens"),
        ):
            if bucket is not None:
                bucket.refill(now)
                if wait_s := bucket.wait_s(required):
                    message = f"this API key is limited to {limit} {counted} per minute"
                    raise QuotaExceeded(message, retry_after_s=max(1.0, wait_s))
        return account

    def ended(self, client: Client, now: float, choices: int = 1) -> None:
        """Records the end of a request that was admitted."""
        if client.limits == KeyLimits():
            return
        account = self._accounts[client.key]
        account.running -= choices
        account.measure(client.limits.requests_at_once, now, choices)
        if account.running < 0:
            raise InvariantError(f"more choices of {client.key} ended than began")

    def charge(self, client: Client, tokens: int, now: float) -> None:
        """Charges the tokens that an admitted request, or a part of it, used."""
        if client.limits == KeyLimits():
            return
        account = self._accounts[client.key]
        if account.tokens is not None:
            account.tokens.refill(now)
            account.tokens.level -= tokens


def _full(per_minute: int, now: float) -> _Bucket | None:
    return _Bucket(float(per_minute), per_minute / MINUTE_S, now) if per_minute else None
