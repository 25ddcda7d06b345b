"""Decode steps from fixed arrays, as a CUDA graph holds them, against plain forward passes. Without a GPU nothing is
captured: the same function runs each time, on the arrays that a graph would read."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.core.request import SamplingParams, SequenceId
from baton.core.step import Row, StepPlan
from baton.engine.attention import FastAttention
from baton.engine.batch import Limits, make_batch
from baton.engine.checkpoint import Checkpoint, read_model_config
from baton.engine.kv_pool import KVPool
from baton.engine.layers import FAST, Rotary
from baton.engine.model import Model, shard_config
from baton.engine.parallel import TPGroup
from baton.engine.weights import WeightReader
from tests.engine.driver import GREEDY, random_tokens
from tests.support.checkpoints import make_checkpoint

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="with a GPU the kernel is compiled: see tests/gpu"
)
CPU = torch.device("cpu")
BLOCKS, SIZE, LONGEST = 60, 16, 256


class Twins:
    """One model with two KV pools: `graphs` computes in one, plain forward passes in the other."""

    def __init__(self, model_dir: Path, size: int = SIZE) -> None:
        from baton.engine.attention_triton import TritonAttention
        from baton.engine.decode_graphs import DecodeGraphs

        config, group = read_model_config(model_dir), TPGroup(0, 1)
        weights = WeightReader(Checkpoint.open(model_dir), config, group, torch.float32, CPU)
        self.model = Model(config, weights, group, Rotary(config, LONGEST, torch.float32, CPU), FAST)
        self.pools = [KVPool(config.kv_layout(size, "float32"), BLOCKS, CPU) for _ in range(2)]
        local = shard_config(config, group)
        self.graphs = DecodeGraphs(self.model, self.pools[0], TritonAttention(local, size, CPU), LONGEST)
        self.plain = FastAttention(local, size, BLOCKS, torch.float32, CPU)
        self.limits = Limits(size, BLOCKS, config.vocab_size, LONGEST)
        for keys, values in self.pools[0].storage:
            keys[BLOCKS], values[BLOCKS] = float("nan"), float("nan")  # rows that fill up must not reach anybody

    @torch.no_grad()
    def compute(self, *rows: Row) -> tuple[Tensor, Tensor]:
        batch = make_batch(StepPlan(1, rows), self.limits, CPU)
        return self.graphs.compute(batch), self.model.forward(batch, self.pools[1], self.plain)


def row(name: int, start: int, tokens: list[int], num_sampled: int, sampling: SamplingParams = GREEDY) -> Row:
    blocks = tuple(range(name * 12, name * 12 + 12))
    return Row(SequenceId(f"s{name}"), start, tuple(tokens), blocks, sampling, num_sampled)


@pytest.fixture(scope="module", params=["llama", "mistral"])
def twins(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    return Twins(make_checkpoint(tmp_path_factory.mktemp("m"), request.param))


def test_steps_from_fixed_arrays_equal_plain_ones(twins: Twins) -> None:
    contexts = [40, 17, 130]
    prompts = [row(n, 0, random_tokens(length, seed=n), 1) for n, length in enumerate(contexts)]
    twins.compute(*prompts)
    assert twins.graphs.replayed == 0  # rows of different lengths are launched as usual
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


def test_shapes_are_rounded_up_and_only_for_rows_of_one_short_length(twins: Twins) -> None:
    def shape(*rows: Row) -> Any:
        found = twins.graphs.shape_of(make_batch(StepPlan(1, rows), twins.limits, CPU))
        return None if found is None else (found.rows, found.length, found.splits)

    assert shape(row(0, 1, [1], 1), row(1, 1, [1], 1), row(2, 1, [1], 1)) == (4, 1, 1)
    assert shape(row(0, 100, [1, 2, 3], 3)) == (1, 3, 1)
    assert shape(row(0, 1, [1], 1), row(1, 1, [1, 2], 2)) is None
    assert shape(row(0, 0, list(range(17)), 1)) is None
    assert shape() is None


def test_tokens_that_only_the_device_knows_are_computed(twins: Twins) -> None:
    twins.compute(*(row(n, 0, random_tokens(20, seed=n), 1) for n in range(3)))
    known = [row(n, 20, [7 + n], 1) for n in range(3)]
    batch = make_batch(StepPlan(1, tuple(replace(r, tokens=(0,)) for r in known)), twins.limits, CPU)
    replayed = twins.graphs.replayed
    with torch.no_grad():
        found = twins.graphs.compute(replace(batch, fed=torch.tensor([7, 8, 9])))
    assert torch.equal(found, twins.compute(*known)[0]) and twins.graphs.replayed == replayed + 2


def test_rows_that_only_fill_up_write_into_nobodys_blocks(tmp_path: Path) -> None:
    """However many blocks their tokens come into."""
    twins = Twins(make_checkpoint(tmp_path, "llama"), size=4)
    for cache in (cache for pair in twins.graphs._kv.layers for cache in pair):
        cache[0] = 7.0
    twins.compute(*(row(n, 0, random_tokens(9, seed=n), 1) for n in (1, 2, 3)))
    assert twins.graphs.replayed == 1
    assert all(bool((cache[0] == 7.0).all()) for pair in twins.graphs._kv.layers for cache in pair)
