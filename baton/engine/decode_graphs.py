"""Decode steps on CUDA without launching a kernel at a time: each shape of step is captured once and then replayed.

A shape is (rows, tokens per row, key splits), rows and splits rounded up to a power of two. What differs between steps
of one shape is three arrays at fixed addresses: tokens, where each row starts, and its block table; positions and slots
follow from them on the device. Rows that only fill up the shape compute in the pool's spare block, which the kernel
never reads for anybody else. Steps of other shapes (prompts, mixed lengths) are launched as usual.

A graph is made when its shape comes for the first time. All share one memory pool, so only one may be in use at a time:
the one stream and the one thread of a runner see to that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.attention import Attention
from baton.engine.attention_triton import Prepared
from baton.engine.batch import Batch
from baton.engine.kernels.paged_attention import SPLIT_TOKENS, Tiles
from baton.engine.kv_pool import KVPool
from baton.engine.model import Model

log = logging.getLogger("baton.engine")
MAX_ROWS = 256
MAX_LENGTH = 16


@dataclass(frozen=True, slots=True)
class Shape:
    rows: int
    length: int
    splits: int


@dataclass(frozen=True, slots=True)
class Captured:
    """`on_device` int32: tokens [rows * length], starts [rows], table [rows * W]. `replay` computes and returns logits
    [rows * length, vocab], valid until the next replay."""

    on_device: Tensor
    replay: Callable[[], Tensor]


class DecodeGraphs:
    """`compute` does what `model.forward` does; `attention` is a TritonAttention. `max_positions` bounds a sequence."""

    def __init__(self, model: Model, kv: KVPool, attention: Attention, max_positions: int) -> None:
        self._model, self._kv, self._attention = model, kv, attention
        self._block_size = kv.layout.block_size
        self._max_splits = -(-max_positions // SPLIT_TOKENS)
        self._device = kv.storage[0][0].device
        self._captured: dict[Shape, Captured] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        self.replayed = 0

    def compute(self, batch: Batch) -> Tensor:
        """Logits [S, vocab] in float32 at the sampled positions."""
        shape = self.shape_of(batch)
        if shape is None:
            return self._model.forward(batch, self._kv, self._attention)
        captured = self._captured.get(shape)
        if captured is None:
            captured = self._captured[shape] = self._capture(shape)
        self._fill(captured, shape, batch)
        self.replayed += 1
        # Rows are of one length and packed in order, so the batch's indexes hold here too.
        return captured.replay().index_select(0, batch.sampled)

    def shape_of(self, batch: Batch) -> Shape | None:
        """The shape whose graph computes this batch, or None where there is none."""
        lengths = batch.lengths
        if not len(lengths) or len(lengths) > MAX_ROWS or lengths[0] > MAX_LENGTH or (lengths != lengths[0]).any():
            return None
        splits = -(-int((batch.starts + lengths).max()) // SPLIT_TOKENS)
        rounded = min(1 << (splits - 1).bit_length(), self._max_splits)
        return Shape(1 << (len(lengths) - 1).bit_length(), int(lengths[0]), rounded)

    def _width(self, shape: Shape) -> int:
        return -(-shape.splits * SPLIT_TOKENS // self._block_size)

    def _fill(self, captured: Captured, shape: Shape, batch: Batch) -> None:
        # New memory each time: the device may not have read that of the step before, and nothing waits for it here.
        host, tokens, rows = self._inputs(shape), shape.rows * shape.length, len(batch.lengths)
        inputs = host.numpy()
        inputs[: rows * shape.length] = [token for row in batch.rows for token in row.tokens]
        inputs[tokens : tokens + rows] = batch.starts
        table = inputs[tokens + shape.rows :].reshape(shape.rows, -1)
        for number, row in enumerate(batch.rows):
            used = row.block_ids[: table.shape[1]]
            table[number, : len(used)] = used
        captured.on_device.copy_(host, non_blocking=True)
        if batch.fed is not None:
            captured.on_device[: rows * shape.length] = batch.fed

    def _inputs(self, shape: Shape) -> Tensor:
        """Of rows that only fill up, in host memory, for a GPU pinned."""
        tokens = shape.rows * shape.length
        size = tokens + shape.rows * (1 + self._width(shape))
        inputs = torch.zeros(size, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        inputs[tokens + shape.rows :] = self._kv.zero_block
        return inputs

    def _capture(self, shape: Shape) -> Captured:
        on_device = self._inputs(shape).to(self._device, copy=True)
        step = self._step(shape, on_device)
        if self._device.type != "cuda":
            return Captured(on_device, step)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            step()  # compiles kernels and lets libraries allocate what a capture may not
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may copy KV to other workers meanwhile: their calls are none of this capture's business.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = step()
        log.info("captured a decode step of %d rows of %d, %d splits", shape.rows, shape.length, shape.splits)

        def replay() -> Tensor:
            graph.replay()
            return logits

        return Captured(on_device, replay)

    def _step(self, shape: Shape, on_device: Tensor) -> Callable[[], Tensor]:
        """All of a step that is computed from `on_device`, as a graph can hold it."""
        count, size = shape.rows * shape.length, self._block_size
        number = torch.arange(shape.rows, dtype=torch.int32, device=self._device)
        offset = torch.zeros_like(number)
        first, length = number * shape.length, torch.full_like(number, shape.length)
        everything = torch.arange(count, device=self._device)

        def step() -> Tensor:
            tokens, start, flat = torch.split(on_device, [count, shape.rows, shape.rows * self._width(shape)])
            table = flat.view(shape.rows, -1)
            positions = (start[:, None] + torch.arange(shape.length, device=self._device)).long()
            slots = table.gather(1, positions // size).long() * size + positions % size
            tiles = Tiles(number, offset, first, start, length, table, shape.splits, shape.length)
            return self._model.compute(
                tokens.long(),
                positions.flatten(),
                slots.flatten(),
                everything,
                self._kv,
                self._attention,
                {window: Prepared((tiles,), window) for window in self._model.windows},
            )

        return step
