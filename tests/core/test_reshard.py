"""A resharding plan covers each (layer, head) of every destination rank exactly once, from the right place."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import StartupError
from baton.core.reshard import local_heads, reshard

SIZES = st.sampled_from([1, 2, 4, 8])


@given(heads=st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=1, max_size=4), prefill=SIZES, decode=SIZES)
def test_every_destination_head_is_sent_once_and_from_its_own_source(
    heads: list[int], prefill: int, decode: int
) -> None:
    covered: Counter[tuple[int, int, int]] = Counter()
    for edge in reshard(heads, prefill, decode):
        for piece in edge.slices:
            source = local_heads(heads[piece.layer], prefill, edge.prefill_rank)
            destination = local_heads(heads[piece.layer], decode, edge.decode_rank)
            for i in range(piece.count):
                assert source[piece.source_start + i] == destination[piece.destination_start + i]
                covered[edge.decode_rank, piece.layer, piece.destination_start + i] += 1
    assert set(covered.values()) == {1}
    wanted = {
        (rank, layer, i)
        for rank in range(decode)
        for layer, count in enumerate(heads)
        for i in range(len(local_heads(count, decode, rank)))
    }
    assert set(covered) == wanted


@given(
    heads=st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=1, max_size=6),
    prefill=SIZES,
    decode=SIZES,
    cut=st.integers(0, 6),
)
def test_an_edge_split_between_two_layers_covers_the_whole_edge(
    heads: list[int], prefill: int, decode: int, cut: int
) -> None:
    cut = min(cut, len(heads))
    for edge in reshard(heads, prefill, decode):
        first, rest = edge.of_layers(0, cut), edge.of_layers(cut, len(heads))
        assert first.slices + rest.slices == edge.slices and first.key == rest.key == edge.key
        assert all(s.layer < cut for s in first.slices) and all(s.layer >= cut for s in rest.slices)
        assert edge.slices_of(0, cut) == (0, len(first.slices))
        assert edge.slices_of(cut, len(heads)) == (len(first.slices), len(edge.slices))


@given(heads=st.sampled_from([1, 2, 4, 8]), prefill=SIZES, decode=SIZES)
def test_replicas_share_the_sends(heads: int, prefill: int, decode: int) -> None:
    """With as many sources as destinations for a head, no source sends twice."""
    senders = Counter(edge.prefill_rank for edge in reshard([heads], prefill, decode))
    assert max(senders.values()) <= max(decode // prefill, 1)


def test_equal_sizes_have_one_edge_per_rank() -> None:
    plan = reshard([8, 8], 4, 4)
    assert [(e.prefill_rank, e.decode_rank) for e in plan] == [(r, r) for r in range(4)]
    assert all(piece.count == 2 for edge in plan for piece in edge.slices)


@pytest.mark.parametrize(("heads", "tp"), [(3, 2), (6, 4), (2, 3)])
def test_heads_that_do_not_divide_are_refused_with_the_numbers(heads: int, tp: int) -> None:
    with pytest.raises(StartupError, match=f"{heads} KV heads .* {tp} "):
        reshard([heads], tp, 1)
