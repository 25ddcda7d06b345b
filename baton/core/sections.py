"""How the bytes of a chunk on one edge are split into sections, so that one section is packed, another is sent, and a
third is checked and stored, all at the same time. Pure.

Both ends compute the same split from what they agree on anyway: the layers that the edge carries, and the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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
    """Splits layers of `layer_bytes` each (all positive), whole and in order, into sections of about equal size: at
    most as many as sections of `section_bytes` each would need."""
    ends = list(accumulate(layer_bytes))
    total = ends[-1] if ends else 0
    max_sections = -(-total // section_bytes)
    sections: list[Section] = []
    first = start = 0
    for index, end in enumerate(ends):
        if end * max_sections >= total * (len(sections) + 1):
            sections.append(Section(first, index + 1, start, end))
            first, start = index + 1, end
    return tuple(sections)
