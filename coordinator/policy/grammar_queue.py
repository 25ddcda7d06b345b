"""Whose grammar is compiled next, and whose has to wait outside. Pure.

A client has one grammar at a time compiled, in the order of their arrival; between clients it goes by the seconds that
compiling has cost them so far (start-time fair queueing): next is the client that used the least. A client that comes
anew begins level with the last turn: it has saved nothing up, and what others have waiting does not delay it. So a
client's flood delays its own grammars alone, as long as no more clients than there are compilers flood at once; then
another waits for one of them to end what it compiles, and comes next.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from baton.core.errors import QuotaExceeded

MAX_WAITING = 64
"""Different grammars of one client."""
G = TypeVar("G", bound=Hashable)


class GrammarQueue(Generic[G]):
    """Complete state: for each client that waits its grammars, in order, with how many of its requests want each; the
    grammar that is being compiled for a client; the seconds that each client has used; and the most that the client of
    any turn had used when it began (`_level_s`)."""

    def __init__(self, most: int = MAX_WAITING) -> None:
        self._most = most
        self._waiting: dict[str, dict[G, int]] = {}
        self._running: dict[str, G] = {}
        self._used_s: dict[str, float] = {}
        self._level_s = 0.0

    def add(self, client: str, grammar: G) -> None:
        """A request wants a grammar. `client` is a name; the empty one stands for all without an API key.

        Raises:
            QuotaExceeded: too many others of this client wait; nothing has changed then.
        """
        if grammar in self._running.values():
            return
        wanted = self._waiting.get(client, {})
        if grammar not in wanted and len(wanted) >= self._most:
            whose = "this API key" if client else "clients without an API key"
            raise QuotaExceeded(f"{self._most} grammars of {whose} wait to be compiled already", retry_after_s=1)
        if not wanted:
            self._waiting[client] = wanted
            self._used_s[client] = max(self._used_s.get(client, 0.0), self._level_s)
        wanted[grammar] = wanted.get(grammar, 0) + 1

    def leave(self, client: str, grammar: G) -> bool:
        """A request that `add` was called for has no use for its grammar any more. Whether nobody else waits for it
        either, so that it will not be compiled; False for one that is being compiled."""
        wanted = self._waiting.get(client, {})
        if grammar not in wanted:
            return False
        wanted[grammar] -= 1
        if not wanted[grammar]:
            self._drop(client, grammar)
        return not any(grammar in grammars for grammars in self._waiting.values())

    def begin(self) -> tuple[str, G] | None:
        """Whose turn it is and the grammar to compile now; None where nobody waits who is not being served. It has to
        be followed by `ended`."""
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
        """The client's grammar has been compiled, or refused, in so many seconds."""
        del self._running[client]
        self._used_s[client] += took_s

    def _drop(self, client: str, grammar: G) -> None:
        del self._waiting[client][grammar]
        if not self._waiting[client]:
            del self._waiting[client]
