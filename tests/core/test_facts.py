"""The facts that must agree between workers, and the name of the first field that differs."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from baton.core.commands import WorkerFacts
from baton.core.handover import Chunk, chunk_identity
from baton.core.kv_layout import KVLayout, LayerKV
from baton.core.request import SequenceId
from tests.support.builders import make_chunk, make_facts, make_layout

OTHER_LAYER = {"num_kv_heads": 3, "head_dim": 9, "dtype": "bfloat16", "kind": "latent", "window": 128}


def other(value: object) -> object:
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else f"other {value}"


@pytest.mark.parametrize("name", [f.name for f in fields(LayerKV)])
def test_layouts_name_the_layer_field_that_differs(name: str) -> None:
    mine = make_layout(layers=3)
    changed = replace(mine.layers[1], **{name: OTHER_LAYER[name]})
    theirs = KVLayout(mine.block_size, (mine.layers[0], changed, mine.layers[2]))
    expected = f"layers[1].{name}: {getattr(mine.layers[1], name)} and {OTHER_LAYER[name]}"
    assert mine.first_difference(theirs) == expected


def test_layouts_name_block_size_and_number_of_layers() -> None:
    assert make_layout(4).first_difference(make_layout(6)) == "block_size: 4 and 6, neither divides the other"
    assert make_layout(layers=2).first_difference(make_layout(layers=3)) == "layers: 2 and 3"
    assert make_layout().first_difference(make_layout()) is None


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_cover_all_tokens_and_no_more(tokens: int, blocks: int) -> None:
    assert make_layout(4).blocks_for(tokens) == blocks


def test_block_bytes_are_k_and_v_of_all_layers() -> None:
    assert make_layout(4, layers=3, heads=2, head_dim=8).bytes_per_block == 4 * 3 * (2 * 2 * 8 * 4)


@pytest.mark.parametrize("name", sorted({f.name for f in fields(WorkerFacts)} - {"tensor_parallel", "layout"}))
def test_workers_name_the_fact_that_differs(name: str) -> None:
    mine = make_facts()
    value = other(getattr(mine, name))
    assert mine.first_difference(replace(mine, **{name: value})) == f"{name}: {getattr(mine, name)} and {value}"


def test_workers_name_the_layout_field_that_differs() -> None:
    assert (
        make_facts().first_difference(make_facts(layout=make_layout(3)))
        == "block_size: 4 and 3, neither divides the other"
    )


@pytest.mark.parametrize(("mine", "theirs"), [(16, 32), (32, 16), (1, 7), (8, 8)])
def test_block_sizes_may_differ_where_one_divides_the_other(mine: int, theirs: int) -> None:
    assert make_facts(layout=make_layout(mine)).first_difference(make_facts(layout=make_layout(theirs))) is None


def test_protocol_version_is_named_before_anything_else() -> None:
    theirs = make_facts(model_digest="x", layout=make_layout(16), protocol_version=99)
    assert (make_facts().first_difference(theirs) or "").startswith("protocol_version: ")


def test_tensor_parallel_may_differ() -> None:
    assert make_facts(tensor_parallel=1).first_difference(make_facts(tensor_parallel=4)) is None


PLACE = ["start_token", "end_token", "start_layer", "end_layer", "edge_generation", "prefill_rank", "decode_rank"]


def test_chunk_identity_depends_on_sequence_place_and_generation() -> None:
    chunk = make_chunk()
    chunks: list[Chunk] = [replace(chunk, **{name: getattr(chunk, name) + 1}) for name in PLACE]
    names = [SequenceId("r2"), SequenceId(""), SequenceId("r", 1), SequenceId("r", 0, 2), SequenceId("r" + "\0" * 8)]
    chunks += [replace(chunk, sequence=name) for name in names]
    assert len({chunk_identity(c) for c in (chunk, *chunks)}) == 1 + len(PLACE) + len(names)
