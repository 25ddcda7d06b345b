"""A resharding plan together with staging, between all tensor-parallel sizes and different block sizes: each (layer, KV
head, token) of the destination is written exactly once, with the source's content, and nothing else is."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.core.kv_layout import KVLayout, LayerKV
from baton.core.reshard import local_heads, reshard_layout
from baton.transfer.edge_endpoint import edge_layers
from baton.transfer.staging import Layers
from tests.support.edges import pack_tokens, unpack_tokens

SIZES = (1, 2, 4, 8)
DIMS = (2, 3)  # of K and of V
UNWRITTEN = -1.0


@dataclass(frozen=True, slots=True)
class HandOver:
    """Tokens [bounds[0], bounds[-1]) of a sequence, one chunk from each bound to the next. `pages` are the block ids at
    the source and at the destination, `block_sizes` their sizes."""

    heads_per_layer: tuple[int, ...]
    block_sizes: tuple[int, int]
    pages: tuple[tuple[int, ...], tuple[int, ...]]
    bounds: tuple[int, ...]


@st.composite
def hand_overs(draw: st.DrawFn) -> HandOver:
    heads = draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=2))
    source, destination = draw(st.permutations([1, 3, 4, 8, 16]))[:2]
    tokens = draw(st.integers(1, 24))
    bounds = draw(st.sets(st.integers(0, tokens), min_size=2, max_size=4))
    pages = []
    for size in (source, destination):
        needed = -(-tokens // size)
        pages.append(tuple(draw(st.permutations(range(needed + 2)))[:needed]))
    return HandOver(tuple(heads), (source, destination), (pages[0], pages[1]), tuple(sorted(bounds)))


def content(layer: int, kv: int, heads: range, tokens: range) -> Tensor:
    """[tokens, heads, DIMS[kv]]: a distinct number for each place of a whole model's KV, exact in float32."""
    place = (layer * 2 + kv) * 8 + torch.tensor(list(heads))
    place = place * 1024 + torch.tensor(list(tokens))[:, None]
    return (place[..., None] * max(DIMS) + torch.arange(DIMS[kv])).float()


def empty(what: HandOver, side: int, tp: int, rank: int) -> Layers:
    """One rank's unwritten caches, with two blocks more than the sequence has."""
    blocks, size = len(what.pages[side]) + 2, what.block_sizes[side]
    counts = [len(local_heads(heads, tp, rank)) for heads in what.heads_per_layer]
    k, v = DIMS
    shapes = [(blocks, size, count) for count in counts]
    return [(torch.full((*s, k), UNWRITTEN), torch.full((*s, v), UNWRITTEN)) for s in shapes]


def write(what: HandOver, side: int, tp: int, rank: int, tokens: range) -> Layers:
    """A rank's caches after `tokens` of its own heads were written, token by token."""
    layers, size = empty(what, side, tp, rank), what.block_sizes[side]
    for index, layer in enumerate(layers):
        heads = local_heads(what.heads_per_layer[index], tp, rank)
        for kv, cache in enumerate(layer):
            for token, rows in zip(tokens, content(index, kv, heads, tokens), strict=True):
                cache[what.pages[side][token // size], token % size] = rows
    return layers


@pytest.mark.parametrize("decode_tp", SIZES)
@pytest.mark.parametrize("prefill_tp", SIZES)
@settings(max_examples=8, deadline=None)
@given(what=hand_overs())
def test_edges_and_staging_cover_the_destination_exactly_once(prefill_tp: int, decode_tp: int, what: HandOver) -> None:
    layout = KVLayout(
        what.block_sizes[0], tuple(LayerKV(n, DIMS[0], "float32", value_dim=DIMS[1]) for n in what.heads_per_layer)
    )
    plans = reshard_layout(layout, prefill_tp, decode_tp)
    here = range(what.bounds[-1])
    sources = [write(what, 0, prefill_tp, rank, here) for rank in range(prefill_tp)]
    arrived = [empty(what, 1, decode_tp, rank) for rank in range(decode_tp)]
    times = [[[torch.zeros(cache.shape) for cache in layer] for layer in layers] for layers in arrived]
    moves = 0
    for start, end in zip(what.bounds, what.bounds[1:], strict=False):
        for plan in plans:
            parts = edge_layers(sources[plan.prefill_rank], plan, "prefill")
            wire = pack_tokens(parts, what.pages[0], what.block_sizes[0], start, end)
            assert wire.numel() == plan.bytes_per_token(layout) * (end - start)
            # Into unwritten caches, so that the writes of this edge are distinguishable from those of others.
            fresh = empty(what, 1, decode_tp, plan.decode_rank)
            unpack_tokens(wire, edge_layers(fresh, plan, "decode"), what.pages[1], what.block_sizes[1], start, end)
            for index, layer in enumerate(fresh):
                for kv, cache in enumerate(layer):
                    written = cache != UNWRITTEN
                    times[plan.decode_rank][index][kv] += written
                    arrived[plan.decode_rank][index][kv][written] = cache[written]
            moves += 1
    assert moves == len(plans) * (len(what.bounds) - 1) >= decode_tp
    for rank in range(decode_tp):
        wanted = write(what, 1, decode_tp, rank, range(what.bounds[0], what.bounds[-1]))
        for layer, counted, expected in zip(arrived[rank], times[rank], wanted, strict=True):
            for cache, count, right in zip(layer, counted, expected, strict=True):
                assert torch.equal(count, (right != UNWRITTEN).float()), f"rank {rank}: not exactly once"
                assert torch.equal(cache, right), f"rank {rank}: from another place"
