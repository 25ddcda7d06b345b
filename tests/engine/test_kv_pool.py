"""The paged KV cache: where values are stored, isolation between sequences, and how many blocks fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.core.errors import InvariantError, StartupError
from baton.core.kv_layout import KVLayout, LayerKV
from baton.core.request import SequenceId
from baton.core.step import Row, StepPlan
from baton.engine.kv_pool import KVPool
from baton.engine.memory import plan_blocks
from baton.engine.runner import Runner
from tests.support.engine_driver import GREEDY, Job, random_tokens, run, tiny_runner

LAYOUT = KVLayout(4, (LayerKV(2, 8, "float32"), LayerKV(1, 8, "bfloat16")))


def test_kv_pool_larger_than_memory_is_refused_in_one_line() -> None:
    with pytest.raises(StartupError, match=r"cpu: cannot allocate \S+ GiB for KV; lower --kv-memory-gib"):
        KVPool(LAYOUT, 1 << 50, torch.device("cpu"))


def test_layers_have_the_shape_that_transfer_relies_on() -> None:
    pool = KVPool(LAYOUT, 10, torch.device("cpu"))
    for (keys, values), layer in zip(pool.layers, LAYOUT.layers, strict=True):
        for tensor in (keys, values):
            assert tensor.shape == (10, 4, layer.num_kv_heads, 8)
            assert tensor.is_contiguous()
            assert tensor.dtype == getattr(torch, layer.dtype)
            tensor[9, 3] = 1.0  # writable from outside the engine


def test_number_of_blocks_fits_the_memory_or_is_refused() -> None:
    assert plan_blocks(LAYOUT, LAYOUT.bytes_per_block * 10 + 5, max_model_len=40) == 10
    with pytest.raises(StartupError, match=r"KV memory of 0\.0 MiB is too small: 41 tokens need"):
        plan_blocks(LAYOUT, LAYOUT.bytes_per_block * 10, max_model_len=41)
    with pytest.raises(StartupError, match="too small"):
        plan_blocks(LAYOUT, LAYOUT.bytes_per_block - 1, max_model_len=None)


def poison(runner: Runner) -> None:
    for keys, values in runner.kv.layers:
        keys.fill_(torch.nan)
        values.fill_(torch.nan)


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("arch", ["llama", "mistral"])
def test_slots_that_a_sequence_has_not_written_do_not_affect_it(
    checkpoint: Callable[..., Path], arch: str, exact: bool
) -> None:
    """Every other slot holds NaN, including those after the end of the sequence in its last block."""
    runner = tiny_runner(checkpoint(arch), exact=exact)
    lengths = [3, 16, 17, 50, 90]
    poison(runner)
    jobs = [Job(random_tokens(n, seed=n), 20, chunk=11) for n in lengths]
    run(runner, jobs)
    assert all(torch.isfinite(logits).all() for job in jobs for logits in job.logits)
    for layer, _ in enumerate(runner.kv.layers):
        assert not runner.kv.storage[layer][0][runner.kv.zero_block].any()
    clean = [Job(job.prompt, 20, chunk=11) for job in jobs]
    run(tiny_runner(checkpoint(arch), exact=exact), clean)
    for job, other in zip(jobs, clean, strict=True):
        assert torch.equal(torch.cat(job.logits), torch.cat(other.logits))


def test_a_step_writes_its_own_slots_only(checkpoint: Callable[..., Path]) -> None:
    runner = tiny_runner(checkpoint("llama"), exact=True)
    poison(runner)
    row = Row(SequenceId("x"), 0, tuple(random_tokens(21)), (5, 2, 9), GREEDY, num_sampled=1)
    runner.step(StepPlan(1, (row,)))
    for keys, values in runner.kv.layers:
        for tensor in (keys, values):
            written = tensor.isfinite().all(dim=3).all(dim=2)
            assert written[5].all() and written[2, :5].all()
            assert written.sum() == 21


BAD_ROWS = {
    "too few blocks": Row(SequenceId("x"), 16, (1,), (0,), GREEDY),
    "past the model's length": Row(SequenceId("x"), 4096, (1,), tuple(range(300)), GREEDY),
    "negative start": Row(SequenceId("x"), -1, (1,), (0,), GREEDY),
    "no tokens": Row(SequenceId("x"), 0, (), (0,), GREEDY),
    "token id too large": Row(SequenceId("x"), 0, (320,), (0,), GREEDY),
    "token id negative": Row(SequenceId("x"), 0, (-1,), (0,), GREEDY),
    "more samples than tokens": Row(SequenceId("x"), 0, (1,), (0,), GREEDY, num_sampled=2),
    "block that is not in the pool": Row(SequenceId("x"), 0, (1,), (1 << 40,), GREEDY),
    "the zero block": Row(SequenceId("x"), 0, (1,), (10_922,), GREEDY),
    "step too large": Row(SequenceId("x"), 0, (1,) * 101, tuple(range(7)), GREEDY),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_invalid_plan_is_refused_before_kv_is_written(checkpoint: Callable[..., Path], case: str) -> None:
    runner = tiny_runner(checkpoint("llama"), max_num_tokens=100)
    BAD_ROWS["the zero block"] = Row(SequenceId("x"), 0, (1,), (runner.kv.zero_block,), GREEDY)
    poison(runner)
    with pytest.raises(InvariantError):
        runner.step(StepPlan(1, (BAD_ROWS[case],)))
    assert all(keys.isnan().all() and values.isnan().all() for keys, values in runner.kv.layers)
