"""Decode steps as CUDA graphs, without kernel-by-kernel launches: each shape of step is captured once, then replayed.

A shape is (rows, tokens per row, key splits), each rounded up to one of a few values: row counts up to the most
sequences of a step, tokens per row as drafting needs them. Inputs that differ between steps of one shape are at fixed
addresses: tokens, and the start, length and line in the block tables of each row; positions and slots are derived from
them on the device. All shapes read the same tables, which steps update by what has changed. Padding (rows, tokens of
shorter rows, table entries) uses the pool's spare block, which the kernel never reads for real rows. Steps of other
shapes, above all prompts, are launched kernel by kernel.

All shapes are captured when the worker loads, before it has edges to other workers: a capture waits for the whole
device, including a receive whose sender has not started. All graphs share one memory pool and one logits buffer, so
only one may be in use at a time; the single stream and thread of a runner ensure that. Captures run on a stream of
their own: torch takes it from the pool of the streams of edges, which pass over it (baton.transfer.stream_pool).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.engine.attention_triton import Prepared, TritonAttention
from baton.engine.batch import Batch
from baton.engine.block_tables import BlockTables, BlockTablesMirror
from baton.engine.device_stream import to_device
from baton.engine.kernels.paged_attention import Tiles
from baton.engine.kv_pool import KVPool
from baton.engine.model import Model

log = logging.getLogger("baton.engine")
MAX_LONG_TOKENS = 320
"""The most tokens of a shape with several per row: with more sequences speculation seldom pays."""


def row_sizes(max_rows: int) -> list[int]:
    """The numbers of rows for which steps are captured, up to `max_rows`: doubling, and beyond 256, where padding costs
    time, in steps of half that."""
    powers = [1 << power for power in range(max_rows.bit_length())]
    between = [power // 2 * 3 for power in powers if power >= 256]
    return sorted({size for size in (*powers, *between) if size < max_rows} | {max_rows})


@dataclass(frozen=True, slots=True)
class Shape:
    rows: int
    length: int
    splits: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True, slots=True)
class Captured:
    """`inputs` int32, on the device: tokens [rows * length], starts [rows], lengths [rows], lines [rows]. `replay`
    computes and returns logits [rows * length, vocab], valid until the next replay. A graph reads everything in `reads`
    by address, so `reads` keeps these objects alive."""

    inputs: Tensor
    replay: Callable[[], Tensor]
    reads: tuple[Any, ...]


def most_rows(length: int, max_rows: int) -> int:
    """The most rows of a captured step with rows of `length` tokens."""
    return max_rows if length == 1 else min(max_rows, 1 << ((MAX_LONG_TOKENS // length).bit_length() - 1))


class DecodeGraphs:
    """`compute` is equivalent to `model.forward`, for batches made with `tables`. `max_positions` bounds a sequence,
    `max_rows` the sequences of a decode step; `lengths` are the possible numbers of tokens per row. `replayed` and
    `launched` count steps."""

    def __init__(
        self,
        model: Model,
        kv: KVPool,
        attention: TritonAttention,
        tables: BlockTables,
        max_positions: int,
        max_rows: int,
        lengths: tuple[int, ...] = (1,),
    ) -> None:
        self._model, self._kv, self._attention = model, kv, attention
        self._block_size = kv.layout.block_size
        self._max_positions = max_positions
        self._lengths = tuple(sorted(lengths))
        self._sizes = {length: row_sizes(most_rows(length, max_rows)) for length in self._lengths}
        self._device = kv.storage[0][0].device
        self._mirror = BlockTablesMirror(tables, kv.zero_block, self._device)
        self._captured: dict[Shape, Captured] = {}
        self._logits: Tensor | None = None
        cuda = self._device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if cuda else None
        self._stream = torch.cuda.Stream(self._device, priority=-1) if cuda else None  # type: ignore[no-untyped-call]
        self.replayed = self.launched = 0

    def shapes(self) -> list[Shape]:
        """All shapes to capture, largest first: later ones fit into the memory of earlier ones."""
        unsorted = [
            Shape(rows, length, splits)
            for length in self._lengths
            for rows in self._sizes[length]
            for splits in self._attention.split_buckets(rows, self._max_positions)
        ]
        return sorted(unsorted, key=lambda shape: (shape.tokens, shape.splits), reverse=True)

    def capture(self, vocab_size: int) -> None:
        """Captures all shapes. Under tensor parallelism every rank calls it at the same time. Nothing is captured
        later."""
        started, shapes = time.perf_counter(), self.shapes()
        max_tokens = max(shape.tokens for shape in shapes)
        self._attention.reserve(max(shape.rows * self._tiles_per_row(shape) for shape in shapes))
        self._logits = torch.empty((max_tokens, vocab_size), dtype=torch.float32, device=self._device)
        for shape in shapes:
            self._captured[shape] = self._capture(shape)
        log.info("captured %d shapes of decode steps in %.1f s", len(shapes), time.perf_counter() - started)

    def compute(self, batch: Batch) -> Tensor:
        """Returns logits [S, vocab] in float32 at the sampled positions; none on tensor-parallel followers."""
        shape = self.shape_of(batch)
        captured = None if shape is None else self._captured.get(shape)
        if shape is None or captured is None:
            self.launched += 1
            return self._model.forward(batch, self._kv, self._attention)
        packed = self._fill(captured, shape, batch)
        self.replayed += 1
        logits = captured.replay()
        if not len(logits):
            return logits
        if packed is None:
            return logits.index_select(0, batch.sampled)
        at = torch.tensor([packed[index] for index in batch.sampled_at])
        return logits.index_select(0, to_device(at, self._device))

    def shape_of(self, batch: Batch) -> Shape | None:
        """The shape whose graph computes this batch, or None if no shape fits: no graph contains LoRA adapters."""
        lengths = batch.lengths
        if not len(lengths) or batch.adapters:
            return None
        longest = int(lengths.max())
        length = next((known for known in self._lengths if known >= longest), 0)
        rows = next((size for size in self._sizes.get(length, ()) if size >= len(lengths)), 0)
        if not rows or max(batch.lines) >= self._mirror.spare_line:
            return None
        splits = self._attention.split_buckets(rows, int((batch.starts + lengths).max()))[-1]
        return Shape(rows, length, splits)

    def _tiles_per_row(self, shape: Shape) -> int:
        return -(-shape.length // self._attention.long_tile)

    def _fill(self, captured: Captured, shape: Shape, batch: Batch) -> list[int] | None:
        """Copies a batch into a graph's inputs. Returns the index in the shape of each packed token, None if each has
        the same index in both."""
        self._mirror.update()
        # New memory each time: the device may not have read the previous step's yet, and the host does not wait for it.
        host, rows, tokens = self._inputs(shape), len(batch.rows), shape.tokens
        inputs = host.numpy()
        uniform = bool((batch.lengths == shape.length).all())
        packed = None
        if not uniform:
            packed = [r * shape.length + j for r, row in enumerate(batch.rows) for j in range(len(row.tokens))]
        inputs[slice(rows * shape.length) if packed is None else packed] = batch.token_ids
        for number, column in enumerate((batch.starts, batch.lengths, batch.lines)):
            first = tokens + number * shape.rows
            inputs[first : first + rows] = column
        captured.inputs.copy_(host, non_blocking=True)
        if batch.device_tokens is not None and packed is None:
            captured.inputs[: rows * shape.length] = batch.device_tokens
        elif batch.device_tokens is not None:
            where = to_device(torch.tensor(packed), self._device)
            captured.inputs.index_copy_(0, where, batch.device_tokens.to(torch.int32))
        return packed

    def _inputs(self, shape: Shape) -> Tensor:
        """The inputs of padding rows: one token at position 0 of the spare block. In host memory, pinned for a GPU."""
        tokens, rows = shape.tokens, shape.rows
        inputs = torch.zeros(tokens + 3 * rows, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        inputs[tokens + rows : tokens + 2 * rows] = 1
        inputs[tokens + 2 * rows :] = self._mirror.spare_line
        return inputs

    def _capture(self, shape: Shape) -> Captured:
        inputs = self._inputs(shape).to(self._device, copy=True)
        step, reads = self._step(shape, inputs)
        if self._stream is None:
            return Captured(inputs, step, reads)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            step()  # compiles kernels and lets libraries allocate memory, which a capture must not do
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: their calls must not invalidate this capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            logits = step()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

        def replay() -> Tensor:
            graph.replay()
            return logits

        return Captured(inputs, replay, reads)

    def _step(self, shape: Shape, inputs: Tensor) -> tuple[Callable[[], Tensor], tuple[Any, ...]]:
        """Returns a capturable function that computes a step from `inputs`, and the other objects that it reads."""
        size, count = self._block_size, shape.tokens
        number = torch.arange(shape.rows, dtype=torch.int32, device=self._device)
        queries, tiles_per_row = min(shape.length, self._attention.long_tile), self._tiles_per_row(shape)
        tile_row = number.repeat_interleave(tiles_per_row, output_size=shape.rows * tiles_per_row)
        offset = torch.arange(tiles_per_row, dtype=torch.int32, device=self._device).repeat(shape.rows) * queries
        first = number * shape.length
        steps = torch.arange(shape.length, dtype=torch.int32, device=self._device)
        everything = torch.arange(count, device=self._device)
        logits = None if self._logits is None else self._logits[:count]
        tokens, start, length, line = torch.split(inputs, [count, shape.rows, shape.rows, shape.rows])
        table = self._mirror.table
        width, flat = table.shape[1], table.view(-1)
        least_split = self._attention.split_plan(shape.rows, self._max_positions)[1]
        plan = shape.splits, least_split, queries, self._attention.tile_rows
        tiles = Tiles(tile_row, offset, first, start, length, line, table, *plan)

        def step() -> Tensor:
            live = steps < length[:, None]
            positions = torch.where(live, start[:, None] + steps, 0).long()
            block = flat.gather(0, (line.long()[:, None] * width + positions // size).flatten()).view_as(positions)
            slots = block.long() * size + positions % size
            slots = torch.where(live, slots, self._kv.zero_block * size)
            return self._model.compute(
                tokens.long(),
                positions.flatten(),
                slots.flatten(),
                everything,
                self._kv,
                self._attention,
                {window: Prepared((tiles,), (), window) for window in self._model.windows},
                logits,
            )

        return step, (number, tile_row, offset, first, steps, everything, tiles, self._attention.arrived, logits)
