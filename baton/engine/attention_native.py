"""Attention over the paged KV cache by the compiled kernels, for a model whose layers may differ.

What the kernels do not compute, FastAttention does: chunks, softcap, sinks, values of another size than keys, latents.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from baton.engine.attention import PLAIN_SCORES, FastAttention, Group, Scores
from baton.engine.batch import RowSpan
from baton.engine.kernels.native import AttentionShape, Kernels, heads_struct

_LARGEST_HEAD = 1024
KEYS = 64  # of a block in attention.h


class _Prepared:
    """The rows of a step as a kernel reads them, and, if needed, as FastAttention does. A kernel reads keys from a
    multiple of KEYS on, so blocks before that are left out."""

    def __init__(self, fast: FastAttention, spans: Sequence[RowSpan], window: int, chunk: int, block_size: int) -> None:
        self._fast, self._spans, self.window, self.chunk = fast, spans, window, chunk
        self.count = len(spans)
        blocks = array("q")
        places = []
        for span in spans:
            first = max(0, span.start - window + 1) // KEYS * KEYS // block_size if window else 0
            places.append(len(blocks) - first)
            blocks.extend(span.blocks(first, -(-span.end // block_size)))
        self._blocks = blocks
        at = blocks.buffer_info()[0]
        self.rows = array("q")
        for span, place in zip(spans, places, strict=True):
            self.rows.extend((span.first, span.start, span.length, at + 8 * place))

    @cached_property
    def groups(self) -> list[Group]:
        return self._fast.prepare(self._spans, self.window, self.chunk)


class NativeAttention:
    """See FastAttention. `calls` counts layers that the kernels computed."""

    def __init__(self, kernels: Kernels, threads: int, block_size: int, fast: FastAttention) -> None:
        self._attend, self._store = kernels.attend, kernels.store
        self._threads, self._block_size, self._fast = threads, block_size, fast
        self.calls = 0

    def prepare(self, spans: Sequence[RowSpan], window: int, chunk: int = 0) -> _Prepared:
        return _Prepared(self._fast, spans, window, chunk, self._block_size)

    def store(self, pool: tuple[Tensor, Tensor], slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """See FastAttention."""
        dtype, tokens = keys.dtype, len(slots)
        if (
            dtype not in (torch.bfloat16, torch.float32)
            or values.dtype != dtype
            or pool[0].dtype not in (dtype, torch.float8_e4m3fn)
            or not keys.stride(3) == values.stride(3) == 1
            or any(x.shape[1] * x.shape[3] != of.stride(1) for x, of in zip((keys, values), pool, strict=True))
        ):
            self._fast.store(pool, slots, keys, values)
            return
        self._store(
            dtype == torch.bfloat16, pool[0].dtype == torch.float8_e4m3fn,
            *(ctypes.byref(heads_struct(x)) for x in (keys, values)),
            slots.data_ptr(), tokens, keys.shape[3], values.shape[3], pool[0].data_ptr(), pool[1].data_ptr(),
        )  # fmt: skip

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, prepared: _Prepared, scores: Scores = PLAIN_SCORES
    ) -> Tensor:
        tokens, heads, size = queries.shape
        if (
            prepared.chunk
            or scores.softcap is not None
            or scores.sinks is not None
            or values.shape != keys.shape
            or size > _LARGEST_HEAD
            or size % 2
            or queries.dtype not in (torch.bfloat16, torch.float32)
        ):
            return self._fast.attend(queries, keys, values, prepared.groups, scores)
        self.calls += 1
        queries = queries.contiguous()
        scale = 0.0 if scores.scale is None else scores.scale
        shape = AttentionShape(heads, keys.shape[2], size, self._block_size, prepared.window, scale)
        output = torch.empty((tokens, heads * size), dtype=queries.dtype)
        self._attend(
            queries.dtype == torch.bfloat16, keys.dtype == torch.float8_e4m3fn, ctypes.byref(shape),
            prepared.rows.buffer_info()[0], prepared.count, queries.data_ptr(), heads * size, keys.data_ptr(),
            values.data_ptr(), output.data_ptr(), heads * size, self._threads,
        )  # fmt: skip
        return output

    def attend_latents(
        self, queries: Tensor, latents: Tensor, turned: Tensor, prepared: _Prepared, scores: Scores
    ) -> Tensor:
        return self._fast.attend_latents(queries, latents, turned, prepared.groups, scores)
