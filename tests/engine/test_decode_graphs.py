"""Decode steps from fixed arrays, as a CUDA graph reads them, against plain forward passes. Without a GPU nothing is
captured: the same function runs each time, on the arrays that a graph would read."""

from __future__ import annotations

import gc
import itertools
import os
import weakref
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.core.request import SamplingParams, SequenceId
from baton.core.step import Row, StepPlan
from baton.engine.attention import FastAttention
from baton.engine.batch import Batch, RowLimits, make_batch
from baton.engine.checkpoint import Checkpoint, read_model_config
from baton.engine.kv_pool import KVPool
from baton.engine.layers import Rotary, plain
from baton.engine.model import Model, shard_config
from baton.engine.options import decode_lengths
from baton.engine.parallel import TPGroup
from baton.engine.weights import WeightReader
from baton.runtime.model_source import may_draft
from tests.support.checkpoints import make_checkpoint
from tests.support.engine_driver import GREEDY, random_tokens

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="with a GPU the kernel is compiled: see tests/gpu"
)
CPU = torch.device("cpu")
BLOCKS, SIZE, LONGEST, SPLITS = 60, 16, 256, 3
"""LONGEST keys fill two splits of 128: one is empty. With the 64 of a GPU nearly all are, and each takes its time."""


class Twins:
    """One model with two KV pools: `graphs` computes in one, plain forward passes in the other."""

    def __init__(
        self,
        model_dir: Path,
        size: int = SIZE,
        max_rows: int = 4,
        lengths: tuple[int, ...] = (1, 3),
        long_tile: int | None = None,
    ) -> None:
        from baton.engine.attention_triton import TritonAttention
        from baton.engine.decode_graphs import DecodeGraphs

        config, group = read_model_config(model_dir), TPGroup(0, 1)
        weights = WeightReader(Checkpoint(model_dir), config, group, torch.float32, CPU)
        self.model = Model(config, weights, group, plain(Rotary(config, LONGEST, torch.float32, CPU), exact=False))
        self.pools = [KVPool(config.kv_layout(size, "float32"), BLOCKS, CPU) for _ in range(2)]
        local = shard_config(config, group)
        attention = TritonAttention(local, size, torch.float32, CPU)
        attention.long_tile = long_tile or attention.long_tile
        attention.split_buckets = lambda rows, longest: [SPLITS]  # type: ignore[method-assign]
        self.limits = RowLimits(size, BLOCKS, config.vocab_size, LONGEST)
        self.tables = self.limits.new_tables(2 * max_rows)
        self.graphs = DecodeGraphs(
            self.model, self.pools[0], attention, self.tables, LONGEST, max_rows=max_rows, lengths=lengths
        )
        with torch.no_grad():
            self.graphs.capture(config.vocab_size)
        self.plain = FastAttention(size, BLOCKS, torch.float32, CPU)
        for keys, values in self.pools[0].storage:
            keys[BLOCKS], values[BLOCKS] = float("nan"), float("nan")  # padding must not affect real rows

    def batch(self, *rows: Row) -> Batch:
        return make_batch(StepPlan(1, rows), self.limits, CPU, 1, self.tables)

    @torch.no_grad()
    def compute(self, *rows: Row) -> tuple[Tensor, Tensor]:
        batch = self.batch(*rows)
        return self.graphs.compute(batch), self.model.forward(batch, self.pools[1], self.plain)


def row(name: int, start: int, tokens: list[int], num_sampled: int, sampling: SamplingParams = GREEDY) -> Row:
    blocks = tuple(range(name * 12, name * 12 + 12))
    return Row(SequenceId(f"s{name}"), start, tuple(tokens), blocks, sampling, num_sampled)


@pytest.fixture(scope="module", params=["llama", pytest.param("mistral", marks=pytest.mark.long)])
def twins(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    return Twins(make_checkpoint(tmp_path_factory.mktemp("m"), request.param, num_layers=2))


def test_replayed_steps_match_plain_forward_passes(twins: Twins) -> None:
    contexts = [40, 17, 130]
    prompts = [row(n, 0, random_tokens(length, seed=n), 1) for n, length in enumerate(contexts)]
    twins.compute(*prompts)
    assert twins.graphs.replayed == 0  # prompts are launched kernel by kernel
    steps = [
        [row(n, length, [5 + n], 1) for n, length in enumerate(contexts)],
        [row(2, 131, [9], 1)],
        [row(n, length + 1 + n // 2, [7, 8, 9], 3) for n, length in enumerate(contexts)],
        [row(1, 21, [3, 4], 0), row(0, 44, [1, 2], 1)],
    ]
    for step in steps:
        found, expected = twins.compute(*step)
        assert found.shape == expected.shape == (sum(r.num_sampled for r in step), twins.limits.vocab_size)
        assert torch.allclose(found, expected, rtol=0, atol=1e-4)
    assert twins.graphs.replayed == len(steps)


def test_rows_of_different_lengths_share_a_graph(twins: Twins) -> None:
    """A verification step in which some sequences have fewer draft tokens, or none."""
    contexts = [40, 17, 130]
    twins.compute(*(row(n, 0, random_tokens(length, seed=n), 1) for n, length in enumerate(contexts)))
    replayed = twins.graphs.replayed
    tokens = [[5], [6, 7], [8, 9, 10]]
    rows = [row(n, length, tokens[n], len(tokens[n])) for n, length in enumerate(contexts)]
    found, expected = twins.compute(*rows)
    assert found.shape == expected.shape == (6, twins.limits.vocab_size)
    assert torch.allclose(found, expected, rtol=0, atol=1e-4) and twins.graphs.replayed == replayed + 1
    batch = twins.batch(*(replace(r, tokens=(0,) * len(r.tokens)) for r in rows))
    with torch.no_grad():
        found_again = twins.graphs.compute(replace(batch, device_tokens=torch.tensor([5, 6, 7, 8, 9, 10])))
    assert torch.equal(found_again, found)


def test_captured_rows_with_more_queries_than_a_tile_take_several_tiles(checkpoint: Callable[..., Path]) -> None:
    """One tile for 9 queries of 16 heads a group would have 256 rows, more than the registers hold."""
    twins = Twins(checkpoint("llama", num_layers=1), max_rows=2, lengths=(5,), long_tile=2)
    twins.compute(*(row(n, 0, random_tokens(40 + n, seed=n), 1) for n in range(2)))
    found, expected = twins.compute(row(0, 40, [5, 6, 7, 8, 9], 5), row(1, 41, [5, 6, 7], 3))
    assert torch.allclose(found, expected, rtol=0, atol=1e-4) and twins.graphs.replayed == 1
    assert not twins.graphs._attention.arrived.any()


def test_shapes_are_rounded_up_to_captured_shapes(twins: Twins) -> None:
    def shape(*rows: Row) -> Any:
        found = twins.graphs.shape_of(twins.batch(*rows))
        return None if found is None else (found.rows, found.length)

    assert shape(row(0, 1, [1], 1), row(1, 1, [1], 1), row(2, 1, [1], 1)) == (4, 1)
    assert shape(row(0, 100, [1, 2], 2)) == (1, 3)
    assert shape(row(0, 1, [1], 1), row(1, 1, [1, 2], 2)) == (2, 3)
    assert shape(row(0, 0, list(range(4)), 1)) is None, "the tail of a prompt is launched"
    assert shape(*(row(n, 1, [1], 1) for n in range(4))) == (4, 1)
    assert shape(*(row(n % 5, 1, [1], 1) for n in range(6))) is None, "more rows than were captured"
    assert shape() is None
    assert all(found in twins.graphs._captured for found in twins.graphs.shapes())


def test_all_shapes_write_their_logits_into_one_buffer(twins: Twins) -> None:
    found = {captured.replay().untyped_storage().data_ptr() for captured in twins.graphs._captured.values()}
    assert len(found) == 1 and len(twins.graphs._captured) == len(twins.graphs.shapes()) > 2


@pytest.mark.parametrize("rows", [1, 2, 64, 256])
@pytest.mark.parametrize("longest", [4096, 8192, 131072])
def test_every_context_length_has_a_captured_shape(rows: int, longest: int) -> None:
    from baton.engine.attention_triton import split_buckets, split_plan

    buckets = split_buckets(rows * 8, longest)
    for context in (1, 128, 129, 1024, 1025, longest - 1, longest):
        bucket = split_buckets(rows * 8, context)[-1]
        splits, least = split_plan(rows * 8, context)
        assert bucket in buckets
        assert splits == min(bucket, -(-context // least)), "captured or not, a row divides its keys in the same way"


@pytest.mark.parametrize("kv_heads", [1, 2, 8, 32])
@pytest.mark.parametrize(("draft", "draft_tokens"), [("none", 0), ("ngram", 0), ("ngram", 4), ("ngram", 8)])
@pytest.mark.parametrize("max_rows", [1, 64, 300, 1024])
def test_captured_sizes_reach_the_most_sequences_in_few_shapes(
    kv_heads: int, draft: str, draft_tokens: int, max_rows: int
) -> None:
    from baton.engine.attention_triton import split_buckets
    from baton.engine.decode_graphs import MAX_LONG_TOKENS, most_rows, row_sizes

    lengths = decode_lengths(may_draft(draft, Path()), draft_tokens)
    shapes = [
        (rows, length, splits)
        for length in lengths
        for rows in row_sizes(most_rows(length, max_rows))
        for splits in split_buckets(rows * kv_heads, 131_072)
    ]
    if draft == "none" or (draft_tokens and max_rows <= 64):
        assert lengths[1:] == ((1 + draft_tokens,) if draft_tokens else ()) and len(shapes) < 40
    assert len(shapes) < 55
    assert max(rows for rows, length, _ in shapes if length == 1) == max_rows
    assert all(rows * length <= MAX_LONG_TOKENS for rows, length, _ in shapes if length > 1)
    assert max(lengths) == 1 + (draft_tokens or 8) if draft != "none" else lengths == (1,)
    sizes = row_sizes(max_rows)
    assert all(big <= 2 * small for small, big in itertools.pairwise(sizes))
    assert all(big <= 1.5 * small for small, big in itertools.pairwise(sizes) if small >= 256)


def test_replay_reads_tokens_that_are_only_on_the_device(twins: Twins) -> None:
    twins.compute(*(row(n, 0, random_tokens(20, seed=n), 1) for n in range(3)))
    known = [row(n, 20, [7 + n], 1) for n in range(3)]
    batch = twins.batch(*(replace(r, tokens=(0,)) for r in known))
    replayed = twins.graphs.replayed
    with torch.no_grad():
        found = twins.graphs.compute(replace(batch, device_tokens=torch.tensor([7, 8, 9])))
    assert torch.equal(found, twins.compute(*known)[0]) and twins.graphs.replayed == replayed + 2


def test_padding_rows_write_only_into_the_spare_block(tmp_path: Path) -> None:
    """Padding tokens write only into the spare block, whatever the number of blocks that they span."""
    twins = Twins(make_checkpoint(tmp_path, "llama", num_layers=2), size=4)
    for cache in (cache for pair in twins.graphs._kv.layers for cache in pair):
        cache[0] = 7.0
    twins.compute(*(row(n, 0, random_tokens(4 - n, seed=n), 1) for n in (1, 2, 3)))
    assert twins.graphs.replayed == 1
    assert all(bool((cache[0] == 7.0).all()) for pair in twins.graphs._kv.layers for cache in pair)


class FakeGraph:
    """Holds no reference to tensors: a graph reads memory by address."""

    replays = 0

    def replay(self) -> None:
        self.replays += 1


class FakeStream:
    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.priority = priority

    def wait_stream(self, other: object) -> None: ...


def test_captured_graph_keeps_every_tensor_that_it_reads_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch.cuda mocked, as on a GPU: `Captured` alone keeps every tensor alive that was made before the capture,
    because the graph continues to read its memory."""
    from contextlib import nullcontext

    from baton.engine.decode_graphs import DecodeGraphs

    twins = Twins(make_checkpoint(tmp_path, "llama", num_layers=1))
    graphs: Any = twins.graphs
    captured_with: list[Any] = []
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(cuda, "current_stream", lambda device=None: FakeStream())
    monkeypatch.setattr(cuda, "stream", lambda stream: nullcontext())

    def graph(made: object, **named: object) -> object:
        captured_with.append(named)
        return nullcontext()

    monkeypatch.setattr(cuda, "graph", graph)
    graphs._stream, graphs._pool = FakeStream(priority=-1), (0, 1)
    seen: list[Any] = []
    compute = twins.model.compute

    def recording(*arguments: Any) -> Tensor:
        seen.append(arguments)
        return compute(*arguments)

    monkeypatch.setattr(twins.model, "compute", recording)
    with torch.no_grad():
        captured = DecodeGraphs._capture(graphs, graphs.shapes()[0])
    assert [named["stream"] for named in captured_with] == [graphs._stream], "one stream for warm-up and capture"
    _, _, _, everything, _, _, prepared, logits = seen[-1]
    tiles = next(iter(prepared.values())).tiles[0]
    read = [everything, logits, tiles.row, tiles.offset, tiles.first, tiles.start, tiles.length, tiles.table]
    alive = [weakref.ref(tensor) for tensor in read]
    del read, everything, prepared, logits, tiles
    seen.clear()
    gc.collect()
    assert all(reference() is not None for reference in alive)
    held = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(captured.reads)} | {
        captured.inputs.untyped_storage().data_ptr()
    }
    assert {reference().untyped_storage().data_ptr() for reference in alive} <= held, "held by what lives with it"
    arrived = graphs._attention.arrived
    assert any(tensor is arrived for tensor in tensors_in(captured.reads))


def tensors_in(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif is_dataclass(value):
            found += tensors_in([getattr(value, f.name) for f in fields(value)])
    return found
