"""How the bytes that a chunk has on one edge are cut, so that one section is packed, another moves, and a third is
checked and stored, all at the same time. Pure.

Both ends cut for themselves, from what they agree on anyway: the layers that the edge carries, and the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

SECTION_BYTES = 4 << 20
"""Larger ones overlap less; each costs processor time of its own (benchmarks/results/handover.md)."""


@dataclass(frozen=True, slots=True)
class Section:
    """Layers [first, last) of those that the edge carries: bytes [start, end) of the chunk."""

    first: int
    last: int
    start: int
    end: int


def early_layers(layer_bytes: Sequence[int], section_bytes: int) -> int:
    """How many layers of a chunk of `layer_bytes` are worth being sent while the others are computed: all but the last
    section, none where there is but one (decision 0044)."""
    sections = cut_sections(layer_bytes, section_bytes)
    return sections[-1].first if sections else 0


def cut_sections(layer_bytes: Sequence[int], section_bytes: int) -> tuple[Section, ...]:
    """Whole layers of `layer_bytes` each (all positive), in order, in sections of about one size: at most as many as
    would hold the whole with `section_bytes` each."""
    ends = list(accumulate(layer_bytes))
    total = ends[-1] if ends else 0
    most = -(-total // section_bytes)
    sections: list[Section] = []
    first = start = 0
    for index, end in enumerate(ends):
        if end * most >= total * (len(sections) + 1):
            sections.append(Section(first, index + 1, start, end))
            first, start = index + 1, end
    return tuple(sections)
