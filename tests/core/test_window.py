"""Which blocks are behind the window, and which cached blocks a prefix needs then."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.blocks import BlockTable, Holder
from baton.core.kv_layout import KVLayout, LayerKV
from baton.core.prefix_cache import PrefixCache
from baton.core.sequence import Sequence, State
from baton.core.window import Window
from tests.support.builders import make_layout, make_request


@pytest.mark.parametrize(
    ("windows", "size"), [((), 0), ((0, 0), 0), ((8, 0), 0), ((8, 8), 8), ((8, 24), 24), ((1, 1), 2)]
)
def test_a_model_has_a_window_if_all_its_layers_have_one(windows: tuple[int, ...], size: int) -> None:
    layout = KVLayout(4, tuple(LayerKV(1, 8, "float32", window=window) for window in windows))
    assert Window.of(layout) == Window(size, 4)


@given(st.integers(2, 40), st.integers(1, 8), st.integers(0, 200))
def test_blocks_behind_hold_nothing_that_a_query_attends_to(size: int, block_size: int, query: int) -> None:
    window = Window(size, block_size)
    behind, attended = window.num_behind(query), range(max(0, query - size + 1), query + 1)
    assert all(position // block_size >= behind for position in attended)
    assert behind == attended[0] // block_size, "a block is kept that nothing attends to"


@given(st.integers(2, 40), st.integers(1, 8), st.integers(0, 200), st.integers(1, 20))
def test_max_blocks_hold_a_row_and_its_window(size: int, block_size: int, start: int, length: int) -> None:
    window = Window(size, block_size)
    used = -(-(start + length) // block_size) - window.num_behind(start)
    assert used <= window.max_blocks(start + length, length)


@given(st.integers(0, 9), st.integers(1, 4), st.sets(st.integers(0, 9)), st.integers(1, 40))
def test_the_longest_prefix_is_matched_whose_window_is_cached(
    size: int, block_size: int, stored: set[int], length: int
) -> None:
    size = max(size, 2) if size else 0
    blocks = BlockTable(10)
    cache = PrefixCache(blocks, block_size, window=Window(size, block_size))
    filled = Sequence(make_request("filled", 10 * block_size), State.WAITING, 0.0)
    holder = Holder("sequence", filled.id)
    filled.block_ids = blocks.allocate(10, holder) or ()
    keys = cache._keys(filled, 10 * block_size)
    for index in stored:
        cache.store([keys[index]], filled.block_ids[index : index + 1])
    sequence = Sequence(make_request("r", length), State.WAITING, 0.0)

    def reusable(end: int) -> bool:
        return stored >= set(range(cache.window.num_behind(end * block_size), end))

    longest = max(end for end in range(min(10, (length - 1) // block_size) + 1) if reusable(end))
    first = cache.window.num_behind(longest * block_size)
    expected = (cache.null_block,) * first + filled.block_ids[first:longest]
    assert cache.matching(sequence) == expected
    cache.reuse(sequence, Holder("sequence", sequence.id))
    assert (sequence.num_dropped, sequence.num_computed) == (first, longest * block_size)
    assert set(blocks.held_by(Holder("sequence", sequence.id))) == set(filled.block_ids[first:longest])


def test_null_block_is_no_block_of_the_pool() -> None:
    assert PrefixCache(BlockTable(7), make_layout().block_size).null_block == 7


def test_blocks_in_the_table_of_an_outstanding_step_are_held_until_it_is_done() -> None:
    blocks = BlockTable(8)
    cache = PrefixCache(blocks, 4, enabled=False, window=Window(4, 4))
    sequence = Sequence(make_request("r", 32), State.PREFILLING, 0.0, num_computed=16, step_id=7)
    holder = Holder("sequence", sequence.id)
    sequence.block_ids = table = blocks.allocate(8, holder) or ()
    cache.give_back(sequence, holder)
    assert sequence.block_ids == (8, 8, 8, *table[3:]), "position 16 attends to 13"
    assert blocks.num_free == 0 and sequence.retired == table[:3]
    sequence.num_computed, sequence.step_id = 20, None
    cache.give_back(sequence, holder)
    assert blocks.num_free == 4 and sequence.held_blocks == table[4:] and not sequence.retired
    assert cache.blocks_given_back == 4
