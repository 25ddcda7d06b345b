"""pack and unpack against a plain twin that moves one token at a time, and the checksum of a chunk."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import HandoffError
from baton.core.kv_layout import KV_DTYPE_BYTES, KVLayout, LayerKV
from baton.transfer import staging
from baton.transfer.sections import checksum, checksum_parts
from baton.transfer.staging import Kind, Layers, PagedLayers, locate, pack, pack_layers, unpack
from tests.support.edges import pack_tokens, unpack_tokens

DTYPES = {name: getattr(torch, name) for name in KV_DTYPE_BYTES}


def random_layers(layout: KVLayout, num_blocks: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def cache(layer: LayerKV, size: int) -> torch.Tensor:
        shape = (num_blocks, layout.block_size, layer.num_kv_heads, size)
        return torch.randn(shape, generator=generator).to(DTYPES[layer.dtype])

    return [(cache(layer, layer.head_dim), cache(layer, layer.value_dim)) for layer in layout.layers]


def plain_pack(layers: Layers, block_ids: list[int], block_size: int, start: int, end: int) -> bytes:
    out = b""
    for layer in layers:
        for cache in layer:
            for p in range(start, end):
                token = cache[block_ids[p // block_size], p % block_size]
                out += token.contiguous().view(torch.uint8).numpy().tobytes()
    return out


@st.composite
def chunks(draw: st.DrawFn) -> tuple[KVLayout, int, list[int], list[int], int, int]:
    sizes, dtypes = st.integers(1, 9), st.sampled_from(sorted(DTYPES))
    layer = st.builds(LayerKV, st.integers(1, 3), sizes, dtypes, value_dim=sizes)
    layout = KVLayout(draw(st.integers(1, 7)), tuple(draw(st.lists(layer, min_size=1, max_size=3))))
    num_blocks = draw(st.integers(1, 9))
    table = st.permutations(range(num_blocks))
    used = draw(st.integers(1, num_blocks))
    start = draw(st.integers(0, used * layout.block_size - 1))
    end = draw(st.integers(start + 1, used * layout.block_size))
    return layout, num_blocks, draw(table)[:used], draw(table)[:used], start, end


@pytest.mark.parametrize("most_runs", [0, 2, 99], ids=["token by token", "some of each", "run by run"])
@settings(max_examples=100, deadline=None)
@given(chunk=chunks())
def test_pack_equals_the_plain_implementation_and_unpack_inverts_it(
    most_runs: int, chunk: tuple[KVLayout, int, list[int], list[int], int, int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "_MOST_RUNS", most_runs)
        check_against_plain_pack(chunk)


def check_against_plain_pack(chunk: tuple[KVLayout, int, list[int], list[int], int, int]) -> None:
    layout, num_blocks, source, target, start, end = chunk
    layers, others = random_layers(layout, num_blocks, 1), random_layers(layout, num_blocks, 2)
    before = [(k.clone(), v.clone()) for k, v in others]

    buf = pack_tokens(layers, source, layout.block_size, start, end)

    assert buf.numpy().tobytes() == plain_pack(layers, source, layout.block_size, start, end)
    assert buf.numel() == layout.bytes_per_token * (end - start)
    unpack_tokens(buf, others, target, layout.block_size, start, end)
    assert torch.equal(pack_tokens(others, target, layout.block_size, start, end), buf)
    written = {(target[p // layout.block_size], p % layout.block_size) for p in range(start, end)}
    for layer, old in zip(others, before, strict=True):
        for cache, was in zip(layer, old, strict=True):
            for block in range(num_blocks):
                for offset in range(layout.block_size):
                    if (block, offset) not in written:
                        assert torch.equal(cache[block, offset], was[block, offset])


@pytest.mark.parametrize(
    ("block_ids", "start", "end", "runs"),
    [
        ([3, 4, 5], 0, 12, [(12, 0, 12)]),
        ([3, 4, 5], 2, 9, [(14, 0, 7)]),
        ([3, 4, 1], 2, 11, [(14, 0, 6), (4, 6, 3)]),
        ([2, 1, 0], 3, 9, [(11, 0, 1), (4, 1, 4), (0, 5, 1)]),
    ],
)
def test_neighbouring_blocks_make_one_run(
    block_ids: list[int], start: int, end: int, runs: list[tuple[int, int, int]]
) -> None:
    assert staging._runs(block_ids, 4, start, end) == runs


@pytest.mark.parametrize("most_runs", [0, 2])
def test_unpack_into_some_heads_does_not_change_the_others(most_runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_MOST_RUNS", most_runs)
    whole = random_layers(KVLayout(4, (LayerKV(3, 8, "bfloat16"),)), 4, 1)
    before = [cache.clone() for cache in whole[0]]
    some = [(k[:, :, 1:2], v[:, :, 1:2]) for k, v in whole]
    sent = torch.arange(7 * 2 * 8 * 2, dtype=torch.int64).to(torch.uint8)
    unpack_tokens(sent, some, [2, 3], 4, 1, 8)
    assert pack_tokens(some, [2, 3], 4, 1, 8).tolist() == sent.tolist()
    for cache, was in zip(whole[0], before, strict=True):
        assert torch.equal(cache[:, :, [0, 2]], was[:, :, [0, 2]])
        assert torch.equal(cache[:2], was[:2]) and torch.equal(cache[2, 0], was[2, 0])


def test_the_two_ends_may_have_different_block_sizes() -> None:
    layer = (LayerKV(2, 8, "bfloat16"),) * 2
    source, target = random_layers(KVLayout(4, layer), 6, 1), random_layers(KVLayout(16, layer), 3, 2)
    buf = pack_tokens(source, [5, 0, 3, 1, 2], 4, 3, 19)
    unpack_tokens(buf, target, [2, 0], 16, 3, 19)
    assert torch.equal(pack_tokens(target, [2, 0], 16, 3, 19), buf)


def test_pack_writes_into_a_given_buffer() -> None:
    layout = KVLayout(4, (LayerKV(2, 8, "float32"),))
    layers = random_layers(layout, 3, 1)
    paged, out = PagedLayers.of(layers), torch.empty(layout.bytes_per_token * 5, dtype=torch.uint8)
    assert pack(paged, locate(paged, [1, 2], 4, 2, 7), out) is out
    assert torch.equal(out, pack_tokens(layers, [1, 2], 4, 2, 7))


@pytest.mark.parametrize("block_ids", [[1, 2, 3], [3, 1, 2]], ids=["one run", "scattered"])
def test_layers_packed_one_by_one_have_the_checksum_of_the_whole_chunk(
    block_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_MOST_RUNS", 1)
    layout = KVLayout(4, (LayerKV(2, 8, "float32"), LayerKV(1, 3, "bfloat16"), LayerKV(3, 8, "bfloat16")))
    layers = random_layers(layout, 4, 1)
    whole = pack_tokens(layers, block_ids, 4, 2, 11)
    paged, out, done = PagedLayers.of(layers), torch.zeros_like(whole), 0
    slots = locate(paged, block_ids, 4, 2, 11)
    for packed in pack_layers(paged, slots, out):
        done += packed.numel()
        assert torch.equal(out[:done], whole[:done]) and not out[done:].any()
    assert done == whole.numel()
    out.zero_()
    assert checksum_parts(b"who", pack_layers(paged, slots, out)) == checksum(b"who", whole)


def test_a_slice_of_the_paged_layers_packs_only_these_layers() -> None:
    layers = random_layers(KVLayout(4, (LayerKV(2, 8, "float32"), LayerKV(1, 3, "bfloat16")) * 2), 4, 1)
    paged = PagedLayers.of(layers)
    for block_ids in ([1, 2], [2, 0]):
        some = pack(paged[1:3], locate(paged, block_ids, 4, 1, 8))
        assert torch.equal(some, pack_tokens(layers[1:3], block_ids, 4, 1, 8))
    assert paged[1:3].layer_bytes(3, 10) == [7 * 2 * 3 * 2, 7 * 2 * 2 * 8 * 4]


@pytest.mark.parametrize(
    ("block_ids", "start", "end"),
    [([0], 0, 5), ([0], 2, 2), ([0], 3, 1), ([0], -1, 2), ([], 0, 1), ([3], 0, 1), ([-1], 0, 1)],
)
def test_tokens_or_blocks_out_of_range_are_refused(block_ids: list[int], start: int, end: int) -> None:
    layers = random_layers(KVLayout(4, (LayerKV(1, 2, "float32"),)), 3, 1)
    with pytest.raises(HandoffError, match="chunk"):
        pack_tokens(layers, block_ids, 4, start, end)


def test_a_buffer_of_the_wrong_size_is_refused_before_anything_is_written() -> None:
    layers = random_layers(KVLayout(4, (LayerKV(1, 2, "float32"),)), 3, 1)
    before = layers[0][0].clone()
    with pytest.raises(HandoffError, match="expected 32"):
        unpack_tokens(torch.zeros(31, dtype=torch.uint8), layers, [1], 4, 0, 2)
    assert torch.equal(layers[0][0], before)


def test_checksum_detects_a_flipped_bit_and_a_different_identity() -> None:
    buf = torch.arange(1000).to(torch.uint8)
    mine = b"request-1"
    good = checksum(mine, buf)
    assert checksum(mine, buf.clone()) == good
    assert good not in [checksum(other, buf) for other in (b"request-2", b"request-1\0", b"")]
    for bit in (0, 1, 4000, 7999):
        flipped = buf.clone()
        flipped[bit // 8] ^= 1 << (bit % 8)
        assert checksum(mine, flipped) != good


def test_layers_with_a_window_carry_only_its_tokens_between_tables_of_groups() -> None:
    """Two groups on both ends, whose blocks have different sizes; of the second only tokens from 5 on are sent."""
    kinds = [Kind(0), Kind(1, has_window=True)]

    def pool(blocks: int, size: int) -> Layers:
        shared = torch.zeros(blocks, size, 1, 2), torch.zeros(blocks, size, 1, 2)
        return [shared, shared]  # of two layers, one of each group

    source, target = PagedLayers.of(pool(8, 4), kinds, 2), PagedLayers.of(pool(14, 2), kinds, 2)
    null, sent = 8, (3, 8, 1, 0, 6, 5)  # three columns; the first block of the group with a window was given back
    received = (9, 14, 2, 14, 4, 0, 7, 1, 3, 5)
    for group, first in ((0, 0), (1, 4)):
        for position in range(first, 10):
            for rows in source.rows[group]:
                slot = sent[position // 4 * 2 + group] * 4 + position % 4
                rows.view(torch.float32)[slot] = 100 * group + position
    slots = locate(source, sent, 4, 1, 10, window_start=5)
    assert source.layer_bytes(1, 10, 5) == [9 * 16, 5 * 16] and null not in (sent[0], sent[2])
    unpack(pack(source, slots), target, locate(target, received, 2, 1, 10, window_start=5))
    for group, first in ((0, 1), (1, 5)):
        for rows in target.rows[group]:
            at = [received[position // 2 * 2 + group] * 2 + position % 2 for position in range(first, 10)]
            assert rows.view(torch.float32)[at].eq(torch.arange(first, 10)[:, None] + 100 * group).all()
    before = locate(target, received, 2, 1, 4, window_start=5)
    assert pack(target, before).numel() == 3 * 16
    with pytest.raises(HandoffError, match="are not in a pool"):
        locate(source, sent, 4, 1, 10)
