"""Orders from the leader of a worker to the endpoints of edges at its followers, and the followers' reports.

An endpoint is identified by `edge`, a number that is never reused. Every order except AbortEdge and DropEdge carries
the number `order` and is answered by one EdgeDone with it; for FillEdge and TakeEdge one EdgeBegun may come before.
Orders for one endpoint are sequential: the leader waits for the answer to an order before it sends the next, but it may
send SendEdge once FillEdge has begun, and AbortEdge and DropEdge at any time.

A part of a chunk goes over an edge in sections, so that one section is packed, another is sent, and a third is checked
and stored, all at the same time. Both ends compute the same split from what they agree on anyway: the layers that the
edge carries, and the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from baton.core.handover import Chunk, chunk_identity
from baton.core.reshard import EdgePlan

SECTION_BYTES = 4 << 20
"""Larger sections overlap less; each section costs processor time of its own (benchmarks/results/handover.md)."""


@dataclass(frozen=True, slots=True)
class Section:
    """Layers [first, last) of those that the edge carries: bytes [start, end) of the chunk."""

    first: int
    last: int
    start: int
    end: int


def early_layers(layer_bytes: Sequence[int], section_bytes: int) -> int:
    """Returns how many layers of a chunk of `layer_bytes` are worth sending while the others are computed: all but
    those of the last section, none if there is only one (decision 0007)."""
    sections = cut_sections(layer_bytes, section_bytes)
    return sections[-1].first if sections else 0


def cut_sections(layer_bytes: Sequence[int], section_bytes: int) -> tuple[Section, ...]:
    """Splits layers of `layer_bytes` each, whole and in order, into sections of about equal size, none of them empty:
    at most as many as sections of `section_bytes` each would need."""
    ends = list(accumulate(layer_bytes))
    total = ends[-1] if ends else 0
    max_sections = -(-total // section_bytes)
    sections: list[Section] = []
    first = start = 0
    for index, end in enumerate(ends):
        if end > start and end * max_sections >= total * (len(sections) + 1):
            sections.append(Section(first, index + 1, start, end))
            first, start = index + 1, end
    return tuple(sections)


@dataclass(frozen=True, slots=True)
class Part:
    """What one edge carries of tokens [start_token, end_token) of a sequence whose block table is `block_ids`:
    `num_bytes`, in sections, each with a checksum over `identity`, its layers and its bytes. The part has layers
    [first_layer, last_layer) of those that the edge carries, counted from 0; without `last_layer`, all from
    `first_layer` on; those with a window only from token `window_start` on."""

    block_ids: tuple[int, ...]
    start_token: int
    end_token: int
    num_bytes: int
    identity: bytes
    first_layer: int = 0
    last_layer: int | None = None
    window_start: int = 0


def part_of(chunk: Chunk, plan: EdgePlan, block_ids: tuple[int, ...], window_start: int = 0) -> Part:
    """Returns the part of a chunk that the edge of `plan` carries, from or into `block_ids`."""
    slices = plan.slices_of(chunk.start_layer, chunk.end_layer)
    identity = chunk_identity(chunk)
    return Part(block_ids, chunk.start_token, chunk.end_token, chunk.num_bytes, identity, *slices, window_start)


@dataclass(frozen=True, slots=True)
class OpenEdge:
    """Create one endpoint of an edge and connect it to the peer at the decode worker's store; fields as in
    `EdgeSpec`."""

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
    """Send the part that was packed last, or is being packed."""

    order: int
    edge: int


@dataclass(frozen=True, slots=True)
class DropEdge:
    """Discard the part that was packed last, without sending it. Has no answer."""

    edge: int


@dataclass(frozen=True, slots=True)
class TakeEdge:
    """Receive the part and store each section that matches its checksum: the answer's value is 1 if all did, else 0.
    After the answer nothing is written, whatever its value or error."""

    order: int
    edge: int
    part: Part


@dataclass(frozen=True, slots=True)
class AbortEdge:
    """Abort the endpoint; its outstanding orders fail soon. Has no answer of its own."""

    edge: int
    reason: str


@dataclass(frozen=True, slots=True)
class CloseEdge:
    """Close the endpoint in order; the answer's value is 1 when its thread has ended."""

    order: int
    edge: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class EdgeBegun:
    """The receive of this TakeEdge is posted, or the part of this FillEdge may be sent."""

    order: int


@dataclass(frozen=True, slots=True)
class EdgeDone:
    """`error` is empty on success; `dead` says whether the endpoint can no longer be used."""

    order: int
    value: int = 0
    error: str = ""
    dead: bool = False
