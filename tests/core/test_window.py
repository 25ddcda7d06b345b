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
    ("windows", "size"), [((), 0), ((0, 0), 0), ((0, 8, 0), 0), ((8, 8), 8), ((8, 24), 24), ((1, 1), 2)]
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
    assert blocks.num_free == 4 and cache.held(sequence) == table[4:] and not sequence.retired
    assert cache.blocks_given_back == 4


def layout_of(*windows: int, heads: int = 1, odd: int = 0) -> KVLayout:
    return KVLayout(4, tuple(LayerKV(heads + (odd and not w), 8, "float32", window=w) for w in windows))


@pytest.mark.parametrize(
    ("layout", "places"),
    [
        (layout_of(8, 0, 8, 0), ((1, 0), (0, 0), (1, 1), (0, 1))),
        (layout_of(8, 8, 8, 0), ((1, 0), (2, 0), (3, 0), (0, 0))),
        (layout_of(8, 0, 8, 8, 0), ((1, 0), (0, 0), (1, 1), (2, 0), (0, 1))),
        (layout_of(8, 0, 0), ((0, 0), (0, 1), (0, 2))),
        (layout_of(8, 0, 8, odd=1), ((0, 0), (0, 1), (0, 2))),
        (layout_of(8, 8), ((0, 0), (0, 1))),
        (layout_of(0, 0), ((0, 0), (0, 1))),
    ],
)
def test_layers_of_a_group_are_alike_and_as_many_as_have_no_window(layout: KVLayout, places: object) -> None:
    assert layout.places == places
    slots = layout.groups * layout.bytes_per_block
    assert slots >= layout.bytes_per_token * layout.block_size
    assert layout.positions_in(layout.blocks_for(17)) == 20


@given(st.integers(1, 3), st.integers(2, 20), st.integers(1, 8), st.integers(1, 300), st.integers(1, 20))
def test_max_tokens_are_the_most_whose_blocks_fit(
    sliding: int, size: int, block_size: int, num_blocks: int, step_tokens: int
) -> None:
    window = Window(size, block_size, 1 + sliding, 1)
    longest = window.max_tokens(num_blocks, step_tokens)
    assert window.max_blocks(longest, step_tokens) <= num_blocks < window.max_blocks(longest + 1, step_tokens)


def test_a_window_needs_no_more_blocks_for_longer_sequences() -> None:
    window = Window.of(layout_of(8, 8))
    assert window.max_tokens(window.columns_at_once(4), 4) > 1 << 40
    assert window.max_tokens(window.columns_at_once(4) - 1, 4) == 4 * (window.columns_at_once(4) - 1)


def test_a_prefix_needs_all_blocks_without_a_window_and_of_others_those_of_its_end() -> None:
    blocks = BlockTable(40)
    cache = PrefixCache(blocks, 4, window=Window.of(layout_of(8, 8, 0)))
    first = Sequence(make_request("a", 32), State.PREFILLING, 0.0)
    holder = Holder("sequence", first.id)
    assert cache.allocate(first, holder, holder) and len(first.block_ids) == 24
    first.num_computed, table = 32, first.block_ids
    cache.give_back(first, holder)
    assert first.num_dropped == 6 and first.retired == () and cache.blocks_given_back == 12
    assert first.block_ids == tuple(
        40 if column < 6 and group else block
        for column in range(8)
        for group, block in enumerate(table[3 * column :][:3])
    )
    second = Sequence(make_request("b", (*range(1000, 1032), 7)), State.WAITING, 0.0)
    assert cache.matching(second) == first.block_ids
    cache.drop(table[18:19])  # of the layers without a window, behind the windows
    kept = [
        block
        for column in range(6)
        for block in (table[3 * column], *((40,) * 2 if column < 4 else table[3 * column + 1 :][:2]))
    ]
    assert cache.matching(second) == tuple(kept), "what was given back is still stored"
    cache.drop(table[1::3])
    assert cache.num_matching_tokens(second) == 0, "no window is whole"


def test_a_prefix_that_ends_before_the_window_is_received_from_there_on() -> None:
    """Decode has the first 8 positions in layers without a window; of those with one it receives the window only."""
    blocks = BlockTable(40)
    cache = PrefixCache(blocks, 4, window=Window.of(layout_of(8, 8, 0)))
    cached = Sequence(make_request("a", 8), State.RUNNING, 0.0)
    holder = Holder("sequence", cached.id)
    assert cache.allocate(cached, holder, holder)
    cached.num_computed = 8
    cache.store_full_blocks(cached)
    sequence = Sequence(make_request("b", 30), State.RECEIVING, 0.0)
    own = Holder("receiving", sequence.id)
    assert cache.allocate(sequence, Holder("sequence", sequence.id), own, start=23)
    assert sequence.prefix_tokens == 8 and sequence.num_dropped == 5 and sequence.first_whole == 6
    table = [sequence.block_ids[at : at + 3] for at in range(0, 24, 3)]
    assert [column.count(40) for column in table] == [2, 2, 2, 2, 2, 0, 0, 0]
    assert [column[0] for column in table[:2]] == list(cached.block_ids[::3])
    assert len(blocks.held_by(own)) == 6 + 2 * 3
    stored = len(cache)
    blocks.convert(blocks.held_by(own), own, Holder("sequence", sequence.id))
    sequence.num_computed = 30
    cache.store_full_blocks(sequence)
    assert len(cache) - stored == 5 + 2 * 1, "not the blocks of positions 20 to 22, which were not received"
