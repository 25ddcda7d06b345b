"""Messages of a link between a prefill and a decode worker: its set-up, and one KV hand-over per sequence.

Order of a hand-over: Offer -> Accept | Refuse; then per chunk Chunk -> Posted -> bytes on the edge -> Ack. The sender
announces a chunk before it packs it. Nothing is sent before Posted, and at most one operation is in flight on an edge,
so no wait depends on another edge. Chunks are sent in token order, and chunks of the same tokens in layer order. The
bytes are sent in sections (baton.core.edge_orders), each followed by its checksum over `chunk_identity`, its layers and
its bytes. The last chunk carries the first token. Either side may send AbortTransfer at any time; a posted chunk is
still sent (or the edge torn down), so a posted receive never waits for ever.

A handle is the signed right to one sequence's KV: signed by the coordinator, checked at both ends. It binds the
sequence (including its attempt), both workers with their incarnations, a nonce and its expiry. The expiry is a time of
the coordinator's clock: a worker receives that clock's time when it joins and advances it by its own clock, so a
worker's copy is never ahead, and clocks of different hosts are never compared.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass, field, replace

from baton.core.codes import ErrorCode
from baton.core.compatibility import Compatibility
from baton.core.errors import StaleHandle
from baton.core.request import GenerateRequest, SequenceId, TokenLogprob

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


class ExpiredHandle(StaleHandle):
    """Handles are valid until the deadline of their request."""


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
        StaleHandle: forged, or made for another sequence, source, destination or incarnation.
        ExpiredHandle: the deadline of its request has passed.
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
        raise ExpiredHandle(f"the handle of {sequence} has expired", param="expires_ms")


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


@dataclass(frozen=True, slots=True)
class LinkHello:
    prefill_worker: str
    prefill_incarnation: int
    run_id: str
    facts: Compatibility
    tensor_parallel: int
    token: str = field(default="", repr=False)
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LinkWelcome:
    decode_worker: str
    store_host: str
    store_port: int
    store_nonce: str
    tensor_parallel: int
    facts: Compatibility
    staging_bytes: int


@dataclass(frozen=True, slots=True)
class EdgeOpen:
    """Build (or rebuild) an edge under a generation never used before."""

    prefill_rank: int
    decode_rank: int
    generation: int
    prefix: str


@dataclass(frozen=True, slots=True)
class EdgeReady:
    prefill_rank: int
    decode_rank: int
    generation: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Ping:
    nonce: int


@dataclass(frozen=True, slots=True)
class Offer:
    """KV of the first `num_tokens` positions of `request` (prompt and output so far) will be sent."""

    request: GenerateRequest
    handle: Handle
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Accept:
    sequence: SequenceId
    prefix_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Refuse:
    sequence: SequenceId
    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """Announces KV of layers [start_layer, end_layer) and tokens [start_token, end_token), `num_bytes` in one
    contiguous buffer. `first_token` is set on the last chunk, as are `cached_tokens`, the number of tokens before it
    that the prefill worker did not compute, and `first_logprob`, if requested."""

    sequence: SequenceId
    index: int
    start_token: int
    end_token: int
    start_layer: int
    end_layer: int
    num_bytes: int
    edge_generation: int
    prefill_rank: int = 0
    decode_rank: int = 0
    first_token: int | None = None
    last: bool = False
    first_logprob: TokenLogprob | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Posted:
    sequence: SequenceId
    index: int
    edge_generation: int
    prefill_rank: int = 0
    decode_rank: int = 0


@dataclass(frozen=True, slots=True)
class Ack:
    """`ok` False: the checksum did not match, send the chunk once more. `complete`: all KV has arrived."""

    sequence: SequenceId
    index: int
    ok: bool = True
    complete: bool = False
    prefill_rank: int = 0
    decode_rank: int = 0


@dataclass(frozen=True, slots=True)
class AbortTransfer:
    sequence: SequenceId
    reason: str
    tombstone_s: float = 60.0


FromDecode = LinkWelcome | EdgeReady | Ping | Accept | Refuse | Posted | Ack | AbortTransfer


def chunk_identity(chunk: Chunk) -> bytes:
    """Returns what the checksum of a chunk covers besides its bytes, so that even intact KV of another request,
    position or edge generation is detected."""
    name = chunk.sequence.request_id.encode()
    return name + struct.pack(
        "<11q",
        chunk.sequence.choice,
        chunk.sequence.attempt,
        chunk.start_token,
        chunk.end_token,
        chunk.start_layer,
        chunk.end_layer,
        chunk.edge_generation,
        chunk.prefill_rank,
        chunk.decode_rank,
        -1 if chunk.first_token is None else chunk.first_token,
        chunk.last,
    )
