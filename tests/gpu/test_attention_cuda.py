"""The Triton kernel, compiled, against the plain attention on the same GPU."""

from __future__ import annotations

import pytest
import torch

from tests.engine.test_attention_triton import ROWS, paged, shape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "window"),
    [(32, 8, 128, 16, 0), (9, 3, 64, 16, 0), (8, 1, 80, 32, 20), (4, 4, 96, 16, 7)],
)
def test_the_kernel_agrees_with_the_plain_attention(
    heads: int, kv_heads: int, head_dim: int, block_size: int, window: int, dtype: torch.dtype
) -> None:
    from baton.engine.attention import FastAttention
    from baton.engine.attention_triton import TritonAttention
    from baton.engine.batch import Span

    device = torch.device("cuda")
    config = shape(heads, kv_heads, head_dim)
    queries, keys, values, spans = paged(config, block_size, torch.float32)
    queries, keys, values = (tensor.to(device, dtype) for tensor in (queries, keys, values))
    kernel = TritonAttention(config, block_size, device)
    plain = FastAttention(config, block_size, len(keys) - 1, dtype, device)
    found = kernel.attend(queries, keys, values, kernel.prepare(spans, window))
    expected = plain.attend(queries, keys, values, plain.prepare(spans, window))
    assert torch.allclose(found.float(), expected.float(), rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 1e-3)
    assert len(spans) == len(ROWS)
    for span in spans:
        alone = Span(0, span.start, span.end, span.block_ids)
        part = slice(span.first, span.first + span.length)
        assert torch.equal(kernel.attend(queries[part], keys, values, kernel.prepare([alone], window)), found[part])
