"""How many bytes of KV may be on their way at once, packed or received: a bound of its own beside the KV blocks. Pure.

First come, first served: a large piece is not overtaken for ever by small ones. Who holds bytes gives them back without
waiting for anybody who waits here: a sender's wait ends with the receiver's, a receiver's with bytes that are being
packed already. So a wait always ends, and never for lack of KV blocks.
"""

from __future__ import annotations

from collections import deque

from baton.core.errors import HandoffError, InvariantError


class StagingQuota:
    """Complete state: the bytes taken, and who waits for how many, in order."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0
        self._waiting: deque[tuple[object, int]] = deque()

    def take(self, who: object, num_bytes: int) -> bool:
        """True when `who` has them now; else it waits until a `give` or `leave` names it.

        Raises:
            HandoffError: they are none, or more than there will ever be.
        """
        if num_bytes < 1:  # a peer says how many: less than none would lift the limit for others
            raise HandoffError(f"{num_bytes} bytes of KV cannot be staged")
        if num_bytes > self.limit_bytes:
            raise HandoffError(f"{num_bytes} bytes of KV do not fit into {self.limit_bytes} of staging")
        self._waiting.append((who, num_bytes))
        return who in self._grant()

    def give(self, num_bytes: int) -> tuple[object, ...]:
        """Bytes come back; those who have theirs now."""
        self.taken_bytes -= num_bytes
        if self.taken_bytes < 0:
            raise InvariantError(f"staging: {-self.taken_bytes} bytes more given than taken")
        return self._grant()

    def leave(self, who: object) -> tuple[object, ...]:
        """`who` waits no longer; those behind it who have theirs now."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] is not who)
        return self._grant()

    def _grant(self) -> tuple[object, ...]:
        granted: list[object] = []
        while self._waiting and self.taken_bytes + self._waiting[0][1] <= self.limit_bytes:
            who, num_bytes = self._waiting.popleft()
            self.taken_bytes += num_bytes
            granted.append(who)
        return tuple(granted)

    def __repr__(self) -> str:
        return f"<StagingQuota {self.taken_bytes} of {self.limit_bytes} bytes taken, {len(self._waiting)} wait>"
