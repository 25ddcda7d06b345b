"""KV in FP8: what is stored, that every path attends to exactly that, and what it costs and saves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.core.kv_layout import DTYPE_BYTES, KV_DTYPES, stored_dtype
from baton.engine import kv_error
from baton.engine.attention import FastAttention
from baton.engine.attention_exact import ExactAttention
from baton.engine.batch import RowSpan
from baton.engine.kv_pool import store
from tests.support.attention import shape
from tests.support.engine_driver import Job, all_logits, kv_bytes, random_tokens, run, tiny_runner
from tests.support.transformers_models import make_transformers_checkpoint

CPU, FP8 = torch.device("cpu"), torch.float8_e4m3fn


def test_every_value_of_the_option_is_auto_or_e4m3() -> None:
    for dtype in DTYPE_BYTES:
        assert [stored_dtype(value, dtype) for value in KV_DTYPES] == [dtype, "float8_e4m3fn", "float8_e4m3fn"]  # type: ignore[arg-type]


def test_what_is_beyond_the_range_saturates_and_nan_stays() -> None:
    cache = torch.zeros((1, 4, 1, 2), dtype=FP8)
    numbers = [1e30, -torch.inf, 449.0, -17.0, 17.0, 0.0, torch.nan, 2.0**-10]
    store(cache, torch.tensor([2, 0, 3, 1]), torch.tensor(numbers).view(4, 1, 2))
    expected = torch.tensor([448.0, -16.0, torch.nan, 0.0, 448.0, -448.0, 16.0, 0.0])  # ties to even
    assert torch.equal(cache.float().flatten().nan_to_num(7.0), expected.nan_to_num(7.0))


def pools() -> tuple[tuple[Tensor, Tensor], Tensor, list[RowSpan]]:
    """A pool in FP8 with NaN where nothing is written, queries, and rows of one, several and many tokens."""
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn((8, 16, 2, 16), generator=generator).mul(40).to(FP8) for _ in range(2))
    spans = [RowSpan(0, 37, 38, (5, 1, 6)), RowSpan(1, 20, 23, (0, 2)), RowSpan(4, 0, 18, (3, 4))]
    for span in spans:
        for cache in (keys, values):
            cache.view(torch.uint8)[span.block_ids[-1], span.end % 16 :] = 0x7F
            cache[7] = 0
    return (keys, values), torch.randn((22, 4, 16), generator=generator), spans


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 9])
def test_plain_attention_has_the_bits_of_the_widened_pool(dtype: torch.dtype, window: int) -> None:
    stored, queries, spans = pools()
    queries = queries.to(dtype)
    config = shape(4, 2, 16)
    kinds = (FastAttention(16, 7, dtype, CPU), ExactAttention(config, 16, 7, CPU))
    for attention in kinds if dtype == torch.float32 else kinds[:1]:
        prepared = attention.prepare(spans, window)
        found = attention.attend(queries, *stored, prepared)
        expected = attention.attend(queries, *(cache.to(dtype) for cache in stored), prepared)
        assert torch.equal(found, expected) and not found.isnan().any()


WAYS = [("torch", "float32"), ("auto", "float32"), ("auto", "bfloat16")]


@pytest.mark.parametrize(("kernels", "dtype"), WAYS)
def test_logits_stay_near_and_as_much_memory_holds_more_blocks(
    kernels: str, dtype: str, checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoint("qwen3")
    wide = tiny_runner(path, kernels=kernels, dtype=dtype, kv_memory_bytes=1 << 20)
    with caplog.at_level(logging.INFO, "baton.engine"):
        runner = tiny_runner(path, kernels=kernels, dtype=dtype, kv_memory_bytes=1 << 20, kv_dtype="fp8")
    (message,) = [record.getMessage() for record in caplog.records if "KV in float8" in record.getMessage()]
    assert message.endswith(f"of their spread from those with KV in {dtype}")
    assert runner.num_blocks // DTYPE_BYTES[dtype] == wide.num_blocks
    assert kv_bytes(runner) <= kv_bytes(wide)
    assert {cache.dtype for pair in runner.kv.storage for cache in pair} == {FP8}
    tokens = random_tokens(100)
    error = kv_error.median_error(all_logits(runner, tokens, [100]), all_logits(wide, tokens, [100]))
    assert 0.001 < error < 0.1


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_both_kinds_of_kernels_store_the_same(kernels: str, checkpoint: Callable[..., Path]) -> None:
    """Of KV of the first layer, before any rounding could have changed an input. A float32 that kernels compute in
    another order may lie on the other side of the middle between two numbers: one step apart."""
    path, tokens = checkpoint("llama"), random_tokens(40)
    stored: list[list[Tensor]] = []
    for kv_dtype in ("fp8", "auto"):
        runner = tiny_runner(path, kernels=kernels, kv_dtype=kv_dtype)
        job = Job(tokens, 1)
        run(runner, [job])
        caches = runner.kv.layers[0]
        stored.append([cache[list(job.blocks)].flatten(0, 1)[: len(tokens)] for cache in caches])
    for rounded, exact in zip(*stored, strict=True):
        assert torch.equal(rounded.float(), exact.clamp(-448, 448).to(FP8).float())


def test_saturated_values_are_counted_and_named(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_error, "FP8_MAX", 0.1)
    tiny_runner(checkpoint("llama"), kv_dtype="fp8_e4m3")
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "of keys and values are beyond 0.1 and saturate; --kv-dtype auto keeps them" in warning.getMessage()


# reused KV, latents, sinks
@pytest.mark.parametrize("kind", ["gemma3n_text", "deepseek_v3", pytest.param("gpt_oss", marks=pytest.mark.long)])
def test_models_of_transformers_store_fp8_too(kind: str, tmp_path: Path) -> None:
    path = make_transformers_checkpoint(tmp_path / kind, kind)
    wide, runner = (tiny_runner(path, kv_dtype=kv_dtype) for kv_dtype in ("auto", "fp8"))
    assert runner.layout.bytes_per_token * 4 == wide.layout.bytes_per_token
    tokens = random_tokens(60)
    whole, chunks = (all_logits(runner, tokens, lengths) for lengths in ([60], [13, 1, 9]))
    assert kv_error.median_error(whole, all_logits(wide, tokens, [60])) < 0.15
    assert kv_error.median_error(chunks, whole) < 0.05, "a chunk attends to what is stored, its own tokens included"
