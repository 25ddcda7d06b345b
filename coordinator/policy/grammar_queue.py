"""Whose grammar is compiled next, and whose has to wait outside. Pure.

Grammars are compiled one at a time, in turns of clients by the seconds that compiling has cost them so far (start-time
fair queueing): next is the client that used the least, with its grammars in the order of their arrival. A client that
comes anew begins level with the last turn: it has saved nothing up, and what others have waiting does not delay it. So
a client's flood delays its own grammars, and another's wait is one compilation that is under way.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from baton.core.errors import InvariantError, QuotaExceeded

MAX_WAITING = 64
"""Different grammars of one client."""
G = TypeVar("G", bound=Hashable)


class GrammarQueue(Generic[G]):
    """Complete state: for each client that waits its grammars, in order, with how many of its requests want each; the
    seconds that each client has used; how many its client had used when the last turn began; that client and the
    grammar being compiled, if one is."""

    def __init__(self, most: int = MAX_WAITING) -> None:
        self._most = most
        self._waiting: dict[str, dict[G, int]] = {}
        self._used_s: dict[str, float] = {}
        self._level_s = 0.0
        self._running: tuple[str, G] | None = None

    def __repr__(self) -> str:
        waiting = {client: len(grammars) for client, grammars in self._waiting.items()}
        return f"<GrammarQueue {waiting or 'nothing'} waiting, {self._used_s} s used>"

    def add(self, client: str, grammar: G) -> None:
        """A request wants a grammar. `client` is a name; the empty one stands for all without an API key.

        Raises:
            QuotaExceeded: too many others of this client wait; nothing has changed then.
        """
        if self._running is not None and self._running[1] == grammar:
            return
        wanted = self._waiting.get(client, {})
        if grammar not in wanted and len(wanted) >= self._most:
            whose = "this API key" if client else "clients without an API key"
            raise QuotaExceeded(f"{self._most} grammars of {whose} wait to be compiled already", retry_after_s=1)
        if not wanted:
            self._used_s[client] = max(self._used_s.get(client, 0.0), self._level_s)
            self._waiting[client] = wanted
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

    def begin(self) -> G | None:
        """The grammar to compile now, None where none waits. It has to be followed by `ended`."""
        if self._running is not None:
            raise InvariantError(f"{self!r}: one is being compiled")
        if not self._waiting:
            return None
        client = min(self._waiting, key=self._used_s.__getitem__)  # of those that are level, who has waited longest
        grammar = next(iter(self._waiting[client]))
        self._level_s = self._used_s[client]
        for each in [other for other, grammars in self._waiting.items() if grammar in grammars]:
            self._drop(each, grammar)
        self._running = client, grammar
        return grammar

    def ended(self, took_s: float) -> None:
        """The grammar that `begin` named has been compiled, or refused, in so many seconds."""
        if self._running is None:
            raise InvariantError(f"{self!r}: none is being compiled")
        self._used_s[self._running[0]] += took_s
        self._running = None

    def _drop(self, client: str, grammar: G) -> None:
        del self._waiting[client][grammar]
        if not self._waiting[client]:
            del self._waiting[client]
