"""Cutting a chunk's bytes into sections."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from baton.core.edge_orders import Section, cut_sections, early_layers

LAYERS = st.lists(st.integers(1, 1000), min_size=1, max_size=80)


@given(LAYERS, st.integers(1, 5000))
def test_sections_hold_all_layers_once_and_in_order(layer_bytes: list[int], section_bytes: int) -> None:
    sections = cut_sections(layer_bytes, section_bytes)
    assert (sections[0].first, sections[0].start) == (0, 0)
    assert (sections[-1].last, sections[-1].end) == (len(layer_bytes), sum(layer_bytes))
    assert all((a.last, a.end) == (b.first, b.start) for a, b in pairwise(sections))
    for s in sections:
        assert s.first < s.last and s.end - s.start == sum(layer_bytes[s.first : s.last])


@given(LAYERS, st.integers(1, 5000))
def test_number_and_size_of_sections_are_bounded(layer_bytes: list[int], section_bytes: int) -> None:
    sections = cut_sections(layer_bytes, section_bytes)
    assert len(sections) <= -(-sum(layer_bytes) // section_bytes)
    assert max(s.end - s.start for s in sections) < section_bytes + max(layer_bytes)


@given(st.integers(1, 10), st.integers(1, 8), st.integers(1, 1000))
def test_equal_layers_make_equal_sections(each: int, count: int, layer: int) -> None:
    sections = cut_sections([layer] * each * count, each * layer)
    assert [s.last - s.first for s in sections] == [each] * count


def test_a_chunk_that_fits_is_one_section_and_an_empty_chunk_has_none() -> None:
    assert cut_sections([3, 4, 5], 12) == (Section(0, 3, 0, 12),)
    assert cut_sections([], 12) == ()


@given(LAYERS, st.integers(1, 5000))
def test_all_but_the_last_section_may_be_sent_early(layer_bytes: list[int], section_bytes: int) -> None:
    early = early_layers(layer_bytes, section_bytes)
    left = sum(layer_bytes[early:])
    assert 0 <= early < len(layer_bytes) and left < section_bytes + max(layer_bytes)
    assert (early == 0) == (len(cut_sections(layer_bytes, section_bytes)) == 1)
