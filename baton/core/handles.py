"""Handles: the signed right to one sequence's KV. Signed by the coordinator, checked at both ends of a hand-over.

A handle binds the sequence (including its attempt), both workers with their incarnations, a nonce and its expiry. The
expiry is a time of the coordinator's clock: a worker receives that clock's time when it joins and advances it by its
own clock, so a worker's copy is never ahead, and clocks of different hosts are never compared.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass, replace

from baton.core.errors import StaleHandle
from baton.core.request import SequenceId

SWEEP_EVERY_MS = 10_000.0


@dataclass(frozen=True, slots=True)
class Handle:
    sequence: SequenceId
    source_worker: str
    source_incarnation: int
    destination_worker: str
    destination_incarnation: int
    expires_ms: int
    nonce: bytes
    signature: bytes = b""


def _digest(key: bytes, handle: Handle) -> bytes:
    parts = [
        handle.sequence.request_id.encode(),
        handle.source_worker.encode(),
        handle.destination_worker.encode(),
        handle.nonce,
        struct.pack(
            "<5q",
            handle.sequence.choice,
            handle.sequence.attempt,
            handle.source_incarnation,
            handle.destination_incarnation,
            handle.expires_ms,
        ),
    ]
    framed = b"".join(struct.pack("<I", len(p)) + p for p in parts)
    return hmac.new(key, framed, hashlib.sha256).digest()


def sign(key: bytes, handle: Handle) -> Handle:
    return replace(handle, signature=_digest(key, handle))


def verify(
    key: bytes,
    handle: Handle,
    *,
    sequence: SequenceId,
    source: str,
    destination: str,
    incarnation: int,
    now_ms: float,
    source_incarnation: int,
) -> None:
    """Checks that `handle` allows this incarnation of `source` to hand `sequence` over to this incarnation of
    `destination`: a restarted source cannot use old handles.

    Raises:
        StaleHandle: forged, expired, or made for another sequence, source, destination or incarnation.
    """
    try:
        signed = hmac.compare_digest(_digest(key, handle), handle.signature)
    except (struct.error, UnicodeError, TypeError, AttributeError):  # a field that `sign` could not have signed
        signed = False
    if not signed:
        raise StaleHandle(f"the handle of {sequence} is not signed by this cluster", param="signature")
    for name, claimed, true in (
        ("sequence", handle.sequence, sequence),
        ("source_worker", handle.source_worker, source),
        ("source_incarnation", handle.source_incarnation, source_incarnation),
        ("destination_worker", handle.destination_worker, destination),
        ("destination_incarnation", handle.destination_incarnation, incarnation),
    ):
        if claimed != true:
            raise StaleHandle(f"the handle of {sequence} names another {name}: {claimed}, not {true}", param=name)
    if now_ms >= handle.expires_ms:
        raise StaleHandle(f"the handle of {sequence} has expired", param="expires_ms")


class SpentHandles:
    """Makes each handle valid once."""

    def __init__(self) -> None:
        self._until: dict[bytes, int] = {}  # signature -> expiry, after which `verify` refuses the handle
        self._sweep_at = 0.0

    def __len__(self) -> int:
        return len(self._until)

    def spend(self, handle: Handle, now_ms: float) -> None:
        """Records the use of a verified handle.

        Raises:
            StaleHandle: it was used before.
        """
        if now_ms >= self._sweep_at:
            self._until = {s: until for s, until in self._until.items() if until > now_ms}
            self._sweep_at = now_ms + SWEEP_EVERY_MS
        if handle.signature in self._until:
            raise StaleHandle(f"the handle of {handle.sequence} was already used", param="nonce")
        self._until[handle.signature] = handle.expires_ms
