"""Shares of new requests by revision: canaries, and the way back. Pure.

A share is a percentage of new requests that goes to one revision (`baton traffic NAME=5`). What no share claims goes to
the revisions without one, by their room. A revision with a share of 0 gets no new request. While the revisions that a
request is meant for lack a role, its adapter, or room for a request of its length, it goes to any other whose share is
not 0.

Each request has a place from 0 to 100, and shares are intervals of it in the order of names: a share that grows keeps
the requests it had. The place is sticky: it follows from the client's session (`x-session-id`); without one, a prompt
that begins with an earlier prompt, as the next turn of a conversation does, has the place of that one. Prompts that
only share a beginning, such as a system prompt, have places of their own. A request that was queued before there were
shares has a place by its id, once one is needed.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Collection, Mapping

from baton.core.blocks import KeyChain
from baton.core.errors import InvalidRequest
from baton.core.names import name_error
from baton.core.request import GenerateRequest

WHOLE = 100.0
ROUNDING = 1e-6  # of a sum of shares: 0.4, 64.9 and 34.7 are 100
UNNAMED = "-"  # what commands call workers without a revision
KEPT_PROMPTS = 20_000
BLOCK_TOKENS = 16
MAX_PREFIX_TOKENS = 4096
"""Hashing a longer prompt would block the event loop for milliseconds: its place follows from all of it."""


class Traffic:
    def __init__(self) -> None:
        self._shares: dict[str, float] = {}  # in percent, by revision, sorted
        self._places: OrderedDict[bytes, float] = OrderedDict()  # by the last full block of prompts, the oldest first

    @property
    def shares(self) -> Mapping[str, float]:
        return self._shares

    def set(self, shares: Mapping[str, float], *, clear: bool = False) -> None:
        """Sets shares, beside those that were set before; with `clear` instead of them.

        Raises:
            InvalidRequest: a name is invalid, or a share, or all together exceed 100 percent; nothing changes.
        """
        new = dict(shares) if clear else {**self._shares, **shares}
        for name, percent in new.items():
            if name and (wrong := name_error(name)):
                raise InvalidRequest(f"revision: {wrong}", param="revision")
            if not 0.0 <= percent <= WHOLE:
                raise InvalidRequest(f"the share of {name!r} is not 0 to 100: {percent:g}", param="share")
        if (total := math.fsum(new.values())) > WHOLE + ROUNDING:
            raise InvalidRequest(f"the shares are {total:g} % in all, above 100 %", param="share")
        self._shares = dict(sorted(new.items()))

    def place(self, request: GenerateRequest, session: str) -> float | None:
        """Returns the place of a new request, from 0 to below 100; None while there are no shares."""
        if not self._shares:
            return None
        who = f"{len(request.tenant)}:{request.tenant}".encode()
        if session:
            return _place(who + session.encode())
        prompt, known = request.prompt, None
        chain = KeyChain("", request.tenant, request.cache_salt, request.adapter, BLOCK_TOKENS)
        short = len(prompt) <= MAX_PREFIX_TOKENS
        keys = chain.grow(lambda start, end: prompt[start:end], len(prompt) if short else MAX_PREFIX_TOKENS)
        for key in reversed(keys):
            if (known := self._places.get(key)) is not None:
                self._places.move_to_end(key)
                break
        place = _place(who + repr(prompt).encode()) if known is None else known
        if keys and short:
            self._places[keys[-1]] = place
            if len(self._places) > KEPT_PROMPTS:
                self._places.popitem(last=False)
        return place

    def revisions(self, place: float | None, request_id: str, present: Collection[str]) -> Collection[str]:
        """Returns those of the `present` revisions that a request at `place` may use; without one, by its id."""
        if not self._shares:
            return present
        if place is None:
            place = _place(request_id.encode())
        end = 0.0
        for name, percent in self._shares.items():
            if end <= place < end + percent and name in present:
                return (name,)
            end += percent
        unnamed = [name for name in present if name not in self._shares]
        if place >= end and unnamed:
            return unnamed
        return [name for name in present if self._shares.get(name, WHOLE)]


def parse_shares(words: Collection[str]) -> dict[str, float]:
    """Returns the shares of words such as `v2=5`; `-=95` is the share of workers without a revision.

    Raises:
        InvalidRequest: a word is not NAME=PERCENT, or a name is given twice.
    """
    shares: dict[str, float] = {}
    for word in words:
        name, _, percent = word.rpartition("=")
        revision = "" if name == UNNAMED else name
        if name and revision in shares:
            raise InvalidRequest(f"{name[:100]!r} is given twice", param="share")
        try:
            shares[revision] = float(percent.removesuffix("%"))
        except ValueError:
            name = ""
        if not name:
            wrong = f"{word[:100]!r} is not NAME=PERCENT, such as v2=5"
            raise InvalidRequest(f"{wrong}; workers without a revision are `{UNNAMED}`", param="share")
    return shares


def _place(identity: bytes) -> float:
    number = int.from_bytes(hashlib.blake2b(identity, digest_size=8, person=b"baton traffic").digest(), "big")
    return number / (1 << 64) * WHOLE
