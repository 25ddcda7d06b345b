"""The Triton kernels, compiled, against their plain twins on the same GPU."""

from __future__ import annotations

import os

import pytest
import torch

from tests.engine.test_attention_triton import ROWS, paged
from tests.support.attention import shape
from tests.support.one_gpu import DEVICE, ON_GPU, REHEARSAL

pytestmark = ON_GPU
HALF = torch.float16 if REHEARSAL else torch.bfloat16  # Triton's interpreter multiplies bfloat16 as integers


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "window"),
    [(32, 8, 128, 16, 0), (9, 3, 64, 16, 0), (8, 1, 80, 32, 20), (4, 4, 96, 16, 7)],
)
def test_the_kernel_agrees_with_the_plain_attention(
    heads: int, kv_heads: int, head_dim: int, block_size: int, window: int, dtype: torch.dtype
) -> None:
    from baton.engine.attention import FastAttention
    from baton.engine.attention_triton import TritonAttention

    device = torch.device(DEVICE)
    config = shape(heads, kv_heads, head_dim)
    queries, keys, values, spans = paged(config, block_size, torch.float32)
    queries, keys, values = (tensor.to(device, dtype) for tensor in (queries, keys, values))
    kernel = TritonAttention(config, block_size, dtype, device)
    plain = FastAttention(block_size, len(keys) - 1, dtype, device)
    expected = plain.attend(queries, keys, values, plain.prepare(spans, window))
    tolerance = 1e-3 if dtype == torch.float32 else 2e-2
    prepared = kernel.prepare(spans, window)
    for _ in range(20):  # the splits of a row are joined by whichever program ends last
        found = kernel.attend(queries, keys, values, prepared)
        assert torch.allclose(found.float(), expected.float(), rtol=0, atol=tolerance)
        if REHEARSAL:
            break
    assert len(spans) == len(ROWS) and not kernel.arrived.any()


@pytest.mark.skipif(REHEARSAL, reason="torch has FlashAttention on CUDA alone")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window"), [(32, 8, 128, 0), (32, 8, 128, 7), (8, 1, 80, 0), (4, 4, 96, 20)]
)
def test_flash_attention_of_long_rows_agrees_with_the_plain_attention(
    heads: int, kv_heads: int, head_dim: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from baton.engine import attention_triton
    from baton.engine.attention import FastAttention

    monkeypatch.setattr(attention_triton, "_FLASH_TOKENS", 29)
    device, dtype = torch.device(DEVICE), torch.bfloat16
    config = shape(heads, kv_heads, head_dim)
    queries, keys, values, spans = paged(config, 16, torch.float32)
    queries, keys, values = (tensor.to(device, dtype) for tensor in (queries, keys, values))
    kernel = attention_triton.TritonAttention(config, 16, dtype, device)
    plain = FastAttention(16, len(keys) - 1, dtype, device)
    prepared = kernel.prepare(spans, window)
    assert len(prepared.flash) == 2, "rows of 29 and 40 tokens"
    found = kernel.attend(queries, keys, values, prepared)
    expected = plain.attend(queries, keys, values, plain.prepare(spans, window))
    assert torch.allclose(found.float(), expected.float(), rtol=0, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_over_ranks_have_the_bits_of_the_plain_ones(dtype: torch.dtype, ranks: int) -> None:
    from baton.engine.kernels.rank_sum import sum_by_rank
    from baton.engine.parallel import _sum_by_rank

    partials = torch.randn(ranks, 64, 4096).to(dtype)
    assert torch.equal(sum_by_rank(partials.to(DEVICE)).cpu(), _sum_by_rank(partials))


@pytest.mark.skipif(
    REHEARSAL or os.environ.get("CUDA_LAUNCH_BLOCKING") == "1",
    reason="two kernels that wait for each other must overlap",
)
@pytest.mark.parametrize("shared", [False, True])
def test_sums_in_one_kernel_have_the_bits_of_the_plain_ones(shared: bool) -> None:
    """Two ranks on two streams of one GPU, in place of two GPUs that reach each other."""
    from baton.engine.kernels.symmetric_sum import SymmetricMemory, flag_bytes, symmetric_sum
    from baton.engine.parallel import _sum_by_rank

    half_bytes, ranks = 1 << 20, range(2)
    blocks = [torch.zeros(flag_bytes(2) + 2 * half_bytes, dtype=torch.uint8, device=DEVICE) for _ in ranks]
    addresses = torch.tensor([block.data_ptr() for block in blocks], device=DEVICE)
    memories = [SymmetricMemory(r, addresses, torch.zeros(2).long().to(DEVICE), half_bytes, blocks) for r in ranks]
    streams = [torch.cuda.Stream() for _ in ranks]  # type: ignore[no-untyped-call]
    for rows in (1, 64, 1000, 3, 64):  # of one piece and of several
        partials = torch.randn(2, rows, 4096).bfloat16()
        given, found = [part.to(DEVICE) for part in partials], []
        torch.cuda.synchronize()
        for rank in ranks:
            with torch.cuda.stream(streams[rank]):
                found.append(symmetric_sum(given[rank], memories[rank], shared))
        torch.cuda.synchronize()
        assert all(torch.equal(total.cpu(), _sum_by_rank(partials)) for total in found)


@pytest.mark.parametrize("num_bytes", [4, 100_000, 4 << 20])
def test_checksums_on_the_device_match_the_reference(num_bytes: int) -> None:
    from baton.transfer.sections import device_checksum, plain_device_checksum

    num_bytes = min(num_bytes, 200_000) if REHEARSAL else num_bytes
    buf = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    out = torch.empty(1, dtype=torch.int64, device=DEVICE)
    device_checksum(b"who", buf.to(DEVICE), out)
    assert int(out) == plain_device_checksum(b"who", buf)
