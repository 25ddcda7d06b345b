"""Sizes of a KV layout, and the identity of a chunk."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.handover import Chunk, chunk_identity
from baton.core.request import SequenceId
from tests.support.builders import make_chunk, make_layout


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_cover_all_tokens_and_no_more(tokens: int, blocks: int) -> None:
    assert make_layout(4).blocks_for(tokens) == blocks


def test_block_bytes_are_k_and_v_of_all_layers() -> None:
    assert make_layout(4, layers=3, heads=2, head_dim=8).bytes_per_block == 4 * 3 * (2 * 2 * 8 * 4)


PLACE = ["start_token", "end_token", "start_layer", "end_layer", "edge_generation", "prefill_rank", "decode_rank"]


def test_chunk_identity_depends_on_sequence_place_and_generation() -> None:
    chunk = make_chunk()
    chunks: list[Chunk] = [replace(chunk, **{name: getattr(chunk, name) + 1}) for name in PLACE]
    names = [SequenceId("r2"), SequenceId(""), SequenceId("r", 1), SequenceId("r", 0, 2), SequenceId("r" + "\0" * 8)]
    chunks += [replace(chunk, sequence=name) for name in names]
    assert len({chunk_identity(c) for c in (chunk, *chunks)}) == 1 + len(PLACE) + len(names)
