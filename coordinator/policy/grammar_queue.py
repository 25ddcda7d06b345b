"""Decides whose grammar is compiled next, and whose is refused. Pure.

Each client has at most one grammar compiling at a time, in order of arrival. Between clients the order is start-time
fair queueing over compile time: the next client is the one that has used the fewest seconds so far. A client that was
idle starts level with the latest turn: it has accumulated no credit, and other clients' backlogs do not delay it. So a
client's flood delays only its own grammars, as long as fewer clients flood at once than there are compilers. Otherwise
another client waits until one grammar in progress ends, and is next.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from baton.core.errors import QuotaExceeded

MAX_WAITING = 64
"""Different grammars that one client may have waiting."""
G = TypeVar("G", bound=Hashable)


class GrammarQueue(Generic[G]):
    def __init__(self, limit: int = MAX_WAITING) -> None:
        self._limit = limit
        self._waiting: dict[str, dict[G, int]] = {}  # by client, in order, with the requests that wait for each
        self._running: dict[str, G] = {}  # by client
        self._used_s: dict[str, float] = {}  # by client
        self._level_s = 0.0  # the most that any client had used when its turn began

    def add(self, client: str, grammar: G) -> None:
        """Adds a request for a grammar. `client` is a name; the empty one stands for all clients without an API key.

        Raises:
            QuotaExceeded: too many other grammars of this client wait; the state is unchanged.
        """
        if grammar in self._running.values():
            return
        waiting = self._waiting.get(client, {})
        if grammar not in waiting and len(waiting) >= self._limit:
            owner = "this API key" if client else "clients without an API key"
            message = f"{self._limit} grammars of {owner} are already waiting to be compiled"
            raise QuotaExceeded(message, retry_after_s=1)
        if not waiting:
            self._waiting[client] = waiting
            self._used_s[client] = max(self._used_s.get(client, 0.0), self._level_s)
        waiting[grammar] = waiting.get(grammar, 0) + 1

    def leave(self, client: str, grammar: G) -> bool:
        """Withdraws a request that `add` was called for. Returns whether no other request waits for its grammar, so
        that it will not be compiled; False for a grammar that is being compiled."""
        waiting = self._waiting.get(client, {})
        if grammar not in waiting:
            return False
        waiting[grammar] -= 1
        if not waiting[grammar]:
            self._drop(client, grammar)
        return not any(grammar in grammars for grammars in self._waiting.values())

    def begin(self) -> tuple[str, G] | None:
        """Returns the next client and the grammar to compile; None if every waiting client is being served. Must be
        followed by `ended`."""
        client = min((c for c in self._waiting if c not in self._running), key=self._used_s.__getitem__, default=None)
        if client is None:
            return None
        grammar = next(iter(self._waiting[client]))
        for each in [other for other, grammars in self._waiting.items() if grammar in grammars]:
            self._drop(each, grammar)
        self._running[client] = grammar
        self._level_s = max(self._level_s, self._used_s[client])
        return client, grammar

    def ended(self, client: str, took_s: float) -> None:
        """Records that the client's grammar was compiled, or refused, in `took_s` seconds."""
        del self._running[client]
        self._used_s[client] += took_s

    def _drop(self, client: str, grammar: G) -> None:
        del self._waiting[client][grammar]
        if not self._waiting[client]:
            del self._waiting[client]
