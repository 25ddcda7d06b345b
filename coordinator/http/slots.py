"""How many of something that takes long may go on at once, so that those who are slow leave room for others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from baton.core.errors import QuotaExceeded, Unavailable
from coordinator.policy.quotas import Client

RETRY_S = 5.0


class Slots:
    """At most `most` at once, and `of_owner` of one owner where clients have API keys; `what` they are, for messages.
    State: how many go on of each owner."""

    def __init__(self, what: str, most: int, of_owner: int) -> None:
        self._what, self._most, self._of_owner = what, most, of_owner
        self.taken: Counter[str] = Counter()

    @contextmanager
    def one(self, client: Client) -> Iterator[None]:
        """Takes a slot meanwhile.

        Raises:
            QuotaExceeded: the owner has as many as one may have.
            Unavailable: all are taken.
        """
        owner = client.tenant
        if client.key and self.taken[owner] >= self._of_owner:
            raise QuotaExceeded(f"{self._of_owner} of your files {self._what} already", retry_after_s=RETRY_S)
        if self.taken.total() >= self._most:
            raise Unavailable(f"{self._most} files {self._what} already", retry_after_s=RETRY_S)
        self.taken[owner] += 1
        try:
            yield
        finally:
            self.taken[owner] -= 1
            if not self.taken[owner]:
                del self.taken[owner]
