"""Messages of a link between a prefill and a decode worker: its set-up, and one KV hand-over per sequence.

Order of a hand-over: Offer -> Accept | Refuse; then per chunk Chunk -> Posted -> bytes on the edge -> Ack. The sender
announces a chunk before it packs it. Nothing is sent before Posted, and at most one operation is in flight on an edge,
so no wait depends on another edge. Chunks are sent in token order, and chunks of the same tokens in layer order. The
bytes are sent in sections (baton.core.edge_orders), each followed by its checksum over `chunk_identity`, its layers and
its bytes. The last chunk carries the first token. Either side may send AbortTransfer at any time; a posted chunk is
still sent (or the edge torn down), so a posted receive never waits for ever.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from baton.core.codes import ErrorCode
from baton.core.compatibility import Compatibility
from baton.core.handles import Handle
from baton.core.request import GenerateRequest, SequenceId, TokenLogprob


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
