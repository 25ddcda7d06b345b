"""The last layer of compiled kernels is computed for sampled tokens only: the same bits as for all, and all KV."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.core.request import SequenceId
from baton.core.step import Row, StepPlan
from baton.engine.batch import Batch, RowLimits, make_batch
from baton.engine.checkpoint import Checkpoint, read_model_config
from baton.engine.kernels.native import load
from baton.engine.kv_pool import KVPool
from baton.engine.model_native import NativeModel
from baton.engine.parallel import TPGroup
from baton.engine.weights import WeightReader
from tests.support.engine_driver import GREEDY, bfloat16_levels, float32_levels, random_tokens, tiny_runner

CPU = torch.device("cpu")
BLOCKS = 4  # of a row
# A chunk with nothing to sample, a prompt's end, one with scored tokens (which come first in `sampled`), rows of a
# token, one with draft tokens: (first position, tokens, sampled, scored).
ROWS = ((0, 21, 0, 0), (3, 30, 1, 0), (0, 9, 1, 4), (40, 1, 1, 0), (17, 4, 4, 0), (50, 1, 1, 0), (0, 5, 0, 0))


def cases() -> list[tuple[str, str]]:
    return [("float32", level) for level in float32_levels()] + [("bfloat16", level) for level in bfloat16_levels()]


def model_and_pools(model_dir: Path, dtype: str, level: str, threads: int) -> tuple[NativeModel, KVPool, KVPool]:
    """The pools have the same random contents."""
    config, group = read_model_config(model_dir), TPGroup(0, 1)
    reader = WeightReader(Checkpoint(model_dir), config, group, getattr(torch, dtype), CPU)
    model = NativeModel(config, reader, group, load(level), 64, threads)
    first, second = (tiny_runner(model_dir, dtype=dtype, kernels=level).kv for _ in range(2))
    for pair, same in zip(first.layers, second.layers, strict=True):
        for tensor, other in zip(pair, same, strict=True):
            other.copy_(tensor.copy_(torch.randn(tensor.shape).to(tensor.dtype)))
    return model, first, second


def batch_of(pool: KVPool, rows: tuple[tuple[int, int, int, int], ...]) -> Batch:
    limits = RowLimits(pool.layout.block_size, BLOCKS * len(ROWS), 320, 64)
    plan = StepPlan(
        1,
        tuple(
            Row(
                SequenceId(str(index)),
                start,
                tuple(random_tokens(length, seed=index)),
                tuple(range(BLOCKS * index, BLOCKS * (index + 1))),
                GREEDY,
                sampled,
                scored=tuple(random_tokens(scored)),
            )
            for index, (start, length, sampled, scored) in enumerate(rows)
        ),
    )
    return make_batch(plan, limits, CPU)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("arch", ["llama", "mistral"])
@pytest.mark.parametrize(("dtype", "level"), cases())
def test_logits_and_kv_have_the_bits_of_a_whole_last_layer(
    checkpoint: Callable[..., Path], dtype: str, level: str, arch: str, threads: int
) -> None:
    model, pool, other = model_and_pools(checkpoint(arch, dtype=dtype), dtype, level, threads)
    batch = batch_of(pool, ROWS)
    logits, _ = model.forward_pooled(other, batch)
    assert model.last_layer_tokens == sum(length for _, length, _, _ in ROWS)
    assert torch.equal(model.forward(pool, batch), logits)
    assert model.last_layer_tokens == 1 + 9 + 1 + 4 + 1
    for pair, same in zip(pool.layers, other.layers, strict=True):
        assert all(torch.equal(tensor, twin) for tensor, twin in zip(pair, same, strict=True))


def test_a_step_that_samples_nothing_computes_no_token_of_the_last_layer(checkpoint: Callable[..., Path]) -> None:
    level = float32_levels()[-1]
    model, pool, other = model_and_pools(checkpoint("llama"), "float32", level, 1)
    batch = batch_of(pool, ((0, 21, 0, 0), (7, 30, 0, 0)))
    model.forward_pooled(other, batch)
    assert model.forward(pool, batch).shape == (0, 320)
    assert model.last_layer_tokens == 0
    assert all(torch.equal(*twins) for twins in zip(pool.layers[-1], other.layers[-1], strict=True))
