"""The Triton kernel against the plain attention, through Triton's interpreter: no GPU is needed, and none is used.

The interpreter multiplies bfloat16 as if it were integers, so float16 stands for it here; tests/gpu has the rest.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.core.model_config import ModelConfig, parse_model_config
from baton.engine.attention import FastAttention
from baton.engine.batch import Span

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="with a GPU the kernel is compiled: see tests/gpu"
)
CPU = torch.device("cpu")
ROWS = [(0, 1), (5, 1), (37, 1), (100, 3), (0, 40), (33, 29), (1100, 2)]
"""(start, length): decode, verification and prefill rows, one of them in two splits."""


def triton_attention(config: ModelConfig, block_size: int) -> Any:
    from baton.engine.attention_triton import TritonAttention

    return TritonAttention(config, block_size, CPU)


def shape(num_heads: int, num_kv_heads: int, head_dim: int) -> ModelConfig:
    return parse_model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 8,
            "hidden_size": num_heads * head_dim,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": 2048,
        }
    )


def paged(config: ModelConfig, block_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, list[Span]]:
    """Queries, keys, values and rows whose blocks are scattered; what no row wrote is NaN."""
    generator = torch.Generator().manual_seed(7)
    num_blocks = sum(-(-(start + length) // block_size) for start, length in ROWS)
    pool = (num_blocks + 1, block_size, config.num_kv_heads, config.head_dim)
    keys, values = (torch.randn(pool, generator=generator).to(dtype) for _ in range(2))
    free = torch.randperm(num_blocks, generator=generator).tolist()
    spans: list[Span] = []
    packed = 0
    for start, length in ROWS:
        end = start + length
        used = tuple(free.pop() for _ in range(-(-end // block_size)))
        for cache in (keys, values):
            if end % block_size:
                cache[used[-1], end % block_size :] = float("nan")
        spans.append(Span(packed, start, end, used))
        packed += length
    keys[num_blocks] = values[num_blocks] = 0.0
    queries = torch.randn((packed, config.num_heads, config.head_dim), generator=generator).to(dtype)
    return queries, keys, values, spans


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "window", "dtype"),
    [
        (4, 2, 16, 16, 0, torch.float32),
        (9, 3, 64, 16, 0, torch.float32),
        (8, 1, 80, 32, 20, torch.float32),
        (4, 4, 96, 16, 7, torch.float16),
    ],
)
def test_the_kernel_agrees_with_the_plain_attention(
    heads: int, kv_heads: int, head_dim: int, block_size: int, window: int, dtype: torch.dtype
) -> None:
    config = shape(heads, kv_heads, head_dim)
    queries, keys, values, spans = paged(config, block_size, dtype)
    kernel = triton_attention(config, block_size)
    plain = FastAttention(config, block_size, len(keys) - 1, dtype, CPU)
    found = kernel.attend(queries, keys, values, kernel.prepare(spans, window))
    expected = plain.attend(queries, keys, values, plain.prepare(spans, window))
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    assert torch.allclose(found.float(), expected.float(), rtol=0, atol=tolerance)


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    config = shape(4, 2, 16)
    queries, keys, values, spans = paged(config, 16, torch.float32)
    kernel = triton_attention(config, 16)
    together = kernel.attend(queries, keys, values, kernel.prepare(spans, 0))
    for span in spans:
        alone = Span(0, span.start, span.end, span.block_ids)
        part = slice(span.first, span.first + span.length)
        assert torch.equal(kernel.attend(queries[part], keys, values, kernel.prepare([alone], 0)), together[part])
