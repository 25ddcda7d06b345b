"""What the leader of a worker orders from the ends of edges at its followers, and what they report.

An end is named by `edge`, a number never used again. Every order but AbortEdge and DropEdge carries the number `order`
and is answered by one EdgeDone with it; a FillEdge and a TakeEdge by one EdgeBegun before. Orders for one end follow
each other: the leader waits for the answer to one before it gives the next, except that AbortEdge may come at any time,
and a SendEdge once a FillEdge has begun.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.handover import Chunk, chunk_identity
from baton.core.reshard import EdgePlan


@dataclass(frozen=True, slots=True)
class Part:
    """What one edge carries of tokens [start_token, end_token) of a sequence whose KV lies in `block_ids`: `num_bytes`,
    in sections with a checksum over `identity`, their layers and their bytes. Its layers are [first_layer, last_layer)
    of those that the edge carries, counted from 0; without a `last_layer` to the end."""

    block_ids: tuple[int, ...]
    start_token: int
    end_token: int
    num_bytes: int
    identity: bytes
    first_layer: int = 0
    last_layer: int | None = None


def part_of(chunk: Chunk, plan: EdgePlan, block_ids: tuple[int, ...]) -> Part:
    """What the edge of `plan` carries of a chunk, from or into `block_ids`."""
    slices = plan.slices_of(chunk.start_layer, chunk.end_layer)
    return Part(block_ids, chunk.start_token, chunk.end_token, chunk.num_bytes, chunk_identity(chunk), *slices)


@dataclass(frozen=True, slots=True)
class OpenEdge:
    """Make the end of one edge and meet the peer at the decode worker's store; the fields are those of `EdgeSpec`."""

    order: int
    edge: int
    plan: EdgePlan
    side: str
    host: str
    port: int
    prefix: str
    generation: int
    connect_timeout_s: float
    operation_timeout_s: float


@dataclass(frozen=True, slots=True)
class FillEdge:
    """Pack the part, once `after_step` is computed."""

    order: int
    edge: int
    part: Part
    after_step: int


@dataclass(frozen=True, slots=True)
class SendEdge:
    """Send what was packed last, or is being packed."""

    order: int
    edge: int


@dataclass(frozen=True, slots=True)
class DropEdge:
    """What was packed last will not be sent. Has no answer."""

    edge: int


@dataclass(frozen=True, slots=True)
class TakeEdge:
    """Receive the part and store what matches its checksums: the answer's value is 1 where all did, else 0. Once it is
    answered nothing is written any more, whatever the answer."""

    order: int
    edge: int
    part: Part


@dataclass(frozen=True, slots=True)
class AbortEdge:
    """The end is given up; what is ordered from it fails soon. Has no answer of its own."""

    edge: int
    reason: str


@dataclass(frozen=True, slots=True)
class CloseEdge:
    """End it in order; the answer's value is 1 when its thread has ended."""

    order: int
    edge: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class EdgeBegun:
    """The receive of this TakeEdge is open to the peer, or what this FillEdge packs may be sent."""

    order: int


@dataclass(frozen=True, slots=True)
class EdgeDone:
    """`error` is empty when it went well; `dead` says whether the end is of no further use."""

    order: int
    value: int = 0
    error: str = ""
    dead: bool = False
