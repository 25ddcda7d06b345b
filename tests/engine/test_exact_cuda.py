"""Exact mode on CUDA, in Triton's interpreter: a row has the same bits in every shape of step.

`benchmarks/exact_on_cuda.py` runs more shapes, models and dtypes, and records hashes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.core.request import SequenceId
from baton.core.step import Row, StepPlan
from baton.engine.attention import FastAttention
from baton.engine.batch import RowSpan
from baton.engine.layers import PlainLinear
from baton.engine.weights import Projection
from tests.support import exact_kernels
from tests.support.attention import shape
from tests.support.engine_driver import GREEDY, Job, all_logits, random_tokens, run, tiny_runner
from tests.support.exact_kernels import interpreted_runner

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="with a GPU the kernels are compiled: see benchmarks/gpu.py"
    ),
]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _lockstep() -> Iterator[None]:
    from tests.support.interpreter import lockstep

    with lockstep():
        yield


def randn(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs", "bias"), [(96, 40, True), (70, 130, False), (8, 3, True)])
def test_row_of_a_linear_layer_has_the_same_bits_among_any_number_of_rows(
    inputs: int, outputs: int, bias: bool, dtype: torch.dtype
) -> None:
    from baton.engine.kernels.linear import FixedLinear

    projection = Projection(randn(outputs, inputs, dtype=dtype), randn(outputs, seed=1, dtype=dtype) if bias else None)
    linear, x = FixedLinear(projection), randn(131, inputs, seed=2, dtype=dtype)
    whole = linear(x)
    assert whole.dtype == dtype and whole.shape == (131, outputs)
    expected = PlainLinear(projection)(x).float()
    assert torch.allclose(whole.float(), expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
    for first, last in ((0, 1), (130, 131), (17, 19), (3, 67), (64, 131), (1, 130)):
        assert torch.equal(linear(x[first:last]), whole[first:last])


def test_linear_layer_accepts_rows_and_weights_with_strides() -> None:
    from baton.engine.kernels.linear import FixedLinear

    weight, x = randn(30, 80), randn(5, 80)
    found = FixedLinear(Projection(weight.T.contiguous().T, None))(x.T.contiguous().T)
    assert torch.equal(found, FixedLinear(Projection(weight, None))(x))


def scattered(lengths: list[tuple[int, int]], block_size: int, heads: tuple[int, int, int], dtype: torch.dtype) -> Any:
    """Queries, keys, values and spans of rows (start, length), in scattered blocks; what follows a row's end is NaN."""
    num_heads, kv_heads, head_dim = heads
    needed = [-(-(start + length) // block_size) for start, length in lengths]
    keys, values = (randn(sum(needed) + 1, block_size, kv_heads, head_dim, seed=s, dtype=dtype) for s in (1, 2))
    free = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(3)).tolist()
    spans, packed = [], 0
    for (start, length), count in zip(lengths, needed, strict=True):
        blocks = tuple(free.pop() for _ in range(count))
        for cache in (keys, values):
            cache[blocks[-1], (start + length - 1) % block_size + 1 :] = float("nan")
        spans.append(RowSpan(packed, start, start + length, blocks))
        packed += length
    keys[-1] = values[-1] = 0.0
    return randn(packed, num_heads, head_dim, seed=4, dtype=dtype), keys, values, spans


@pytest.mark.parametrize(
    ("heads", "window", "dtype"),
    [
        ((4, 2, 16), 0, torch.float32),
        pytest.param((7, 1, 16), 20, torch.float32, marks=pytest.mark.long),
        ((6, 2, 24), 150, torch.bfloat16),
    ],
)
def test_attention_of_a_query_has_the_same_bits_in_any_tile_and_batch(
    heads: tuple[int, int, int], window: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Splits have 128 tokens: contexts end before, at and after the ends of splits, and rows cross them."""
    from baton.engine import attention_triton

    config = shape(*heads)
    rows = [(0, 1), (127, 1), (128, 1), (120, 20), (255, 2), (390, 1), (250, 9)]
    queries, keys, values, spans = scattered(rows, 16, heads, dtype)
    kernel = attention_triton.TritonAttention(config, 16, dtype, CPU, exact=True)
    assert kernel.exact_split == 128

    def attend(*some: RowSpan) -> Tensor:
        return kernel.attend(queries, keys, values, kernel.prepare(some, window))

    together = attend(*spans)
    plain = FastAttention(16, len(keys) - 1, dtype, CPU)
    expected = plain.attend(queries, keys, values, plain.prepare(spans, window))
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert torch.allclose(together.float(), expected.float(), rtol=0, atol=tolerance)
    for span in spans:
        whole = slice(span.first, span.first + span.length)
        assert torch.equal(attend(span)[whole], together[whole]), "alone"
        for at in range(span.first, whole.stop, 7) if span.length > 1 else ():
            part = slice(at, min(at + 7, whole.stop))
            start = span.start + at - span.first
            piece = RowSpan(at, start, start + part.stop - part.start, span.block_ids)
            assert torch.equal(attend(piece)[part], together[part]), "in pieces of 7"
    monkeypatch.setattr(attention_triton, "_STORED_BYTES", 1)
    prepared = kernel.prepare(spans, window)
    assert len(prepared.tiles) == sum(-(-span.length // kernel.long_tile) for span in spans)
    assert torch.equal(kernel.attend(queries, keys, values, prepared), together), "a launch for each tile"
    assert not kernel.arrived.any()


def test_captured_step_divides_keys_as_a_launched_one() -> None:
    """The number of splits of a launch is larger in captured steps; their length is not."""
    from baton.engine.attention_triton import Prepared, TritonAttention

    heads = (4, 2, 16)
    queries, keys, values, spans = scattered([(390, 1), (12, 1), (200, 1)], 16, heads, torch.float32)
    kernel = TritonAttention(shape(*heads), 16, torch.float32, CPU, exact=True)
    (bucket,) = kernel.split_buckets(3, 391)
    assert bucket == 2048 // 128 and kernel.split_buckets(200, 2048) == [bucket]
    for window in (0, 20):
        (tiles,) = kernel.prepare(spans, window).tiles
        captured = Prepared((replace(tiles, splits=bucket),), (), window)
        launched = kernel.attend(queries, keys, values, kernel.prepare(spans, window))
        assert torch.equal(kernel.attend(queries, keys, values, captured), launched)


@pytest.mark.parametrize(
    ("longest", "tokens"), [(2048, 128), (8192, 128), (8193, 256), (131_072, 2048), (1 << 20, 16_384)]
)
def test_splits_of_a_model_have_one_length_and_reach_its_longest_context(longest: int, tokens: int) -> None:
    from baton.engine.attention_triton import exact_split
    from baton.engine.kernels.paged_attention import MAX_SPLITS

    assert exact_split(longest) == tokens and longest <= tokens * MAX_SPLITS


DECODE = {"decode_rows": 4, "decode_lengths": (1, 3)}
KINDS = [("mistral", "float32"), ("llama", "bfloat16")]


@pytest.mark.parametrize(("arch", "dtype"), KINDS)
def test_chunks_decode_steps_and_batches_do_not_change_bits(
    arch: str, dtype: str, checkpoint: Callable[..., Path]
) -> None:
    runner = interpreted_runner(checkpoint(arch, num_layers=2), exact=True, dtype=dtype, **DECODE)
    graphs = runner._compute.__wrapped__.__self__  # type: ignore[attr-defined]
    tokens = random_tokens(30)
    alone = all_logits(runner, tokens, [30], seed=1)
    assert torch.isfinite(alone).all() and graphs.replayed == 0
    assert torch.equal(all_logits(runner, tokens, [17, 1, 2, 7, 3], seed=2), alone)
    assert graphs.replayed == 3, "steps of 1, 2 (padded to 3) and 3 tokens"
    together = [Job(random_tokens(n, seed=n), 2, chunk=chunk) for n, chunk in ((3, 100), (9, 4), (1, 9))]
    run(runner, together)
    again = Job(together[1].prompt, 2)
    run(runner, [again], seed=5)
    assert torch.equal(torch.cat(again.logits), torch.cat(together[1].logits))


@pytest.mark.parametrize("exact", [True, False])
def test_only_without_exact_mode_the_batch_changes_where_keys_are_split(exact: bool) -> None:
    from baton.engine.attention_triton import TritonAttention

    heads = (4, 2, 16)
    queries, keys, values, spans = scattered([(390, 1), *[(n, 1) for n in range(16)]], 16, heads, torch.float32)
    kernel = TritonAttention(shape(*heads), 16, torch.float32, CPU, exact=exact)
    alone, together = (kernel.attend(queries, keys, values, kernel.prepare(some, 0))[0] for some in (spans[:1], spans))
    assert torch.equal(alone, together) == exact and torch.allclose(alone, together, rtol=0, atol=1e-5)


def test_exact_mode_is_accepted_on_a_gpu_in_both_dtypes_and_tested_at_start(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the CPU in place of the GPU, and without the self-test, which takes minutes in the interpreter."""
    from baton.engine import loading, opening
    from baton.engine.device import choose_device

    proved = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda", 3) == choose_device("auto", 1) == torch.device("cuda", 1)
    monkeypatch.setattr(opening, "is_gpu", lambda _: True)
    monkeypatch.setattr(opening, "check_triton", lambda: None)
    monkeypatch.setattr(opening, "check_capability", lambda _: None)
    monkeypatch.setattr(loading, "peak_bytes", lambda *_: 1 << 20)
    monkeypatch.setattr(loading, "kv_budget", lambda *_: 4 << 20)
    monkeypatch.setattr(loading, "warm_up", lambda *_: None)
    monkeypatch.setattr(loading, "prove_row_invariance", lambda *given: proved.append(given[2:]))
    for dtype in ("bfloat16", "float32"):
        runner = tiny_runner(checkpoint("llama"), exact=True, kernels="torch", dtype=dtype, block_size=24)
        assert runner.dtype_name == dtype
    assert len(proved) == 2


def test_verification_rows_have_the_bits_of_decode_steps(checkpoint: Callable[..., Path]) -> None:
    runner = interpreted_runner(checkpoint("llama", num_layers=2), exact=True, dtype="float32", **DECODE)
    tokens = random_tokens(13)
    alone = all_logits(runner, tokens, [10, 1], seed=1)
    prompt = Row(SequenceId("v"), 0, tuple(tokens[:10]), (1,), GREEDY, 0)
    runner.step_logits(StepPlan(0, (prompt,)))
    row = Row(SequenceId("v"), 10, tuple(tokens[10:]), (1,), GREEDY, 3)
    other = Row(SequenceId("o"), 0, (7,), (4,), GREEDY, 1)
    assert torch.equal(runner.step_logits(StepPlan(1, (other, row)))[1], alone[10:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", exact_kernels.PORTABLE)
def test_kernels_have_the_recorded_bits(name: str, dtype: str) -> None:
    """A part of the table of benchmarks/results/exact-on-cuda.md."""
    page = (Path(__file__).parents[2] / "benchmarks" / "results" / "exact-on-cuda.md").read_text()
    part = page.partition(f"## kernels, {dtype}\n")[2].partition("\n## ")[0]
    recorded = {cells[0]: cells[2] for line in part.splitlines() if len(cells := line.strip("| ").split(" | ")) == 4}
    kernel = exact_kernels.kernels(getattr(torch, dtype), CPU)[name]
    for lengths in ((exact_kernels.ROWS,), (64,), (90, 1, 1, 1)):
        pieces = f", pieces of {', '.join(map(str, lengths))}" if lengths[0] < exact_kernels.ROWS else ""
        assert exact_kernels.bits(exact_kernels.in_pieces(kernel, lengths)) == recorded[name + pieces], pieces
