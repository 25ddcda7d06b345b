"""The block tables of the sequences of recent steps, in one array that each step updates by what has changed.

Most rows of a step continue a row of the step before, with the same block table, or one block more. A plan states the
whole table of each row; converting these took 0.17 us a block, 20 ms for 64 sequences of 30,000 tokens. Here a sequence
keeps a line of the array for as long as its rows come often enough; a table that is the same tuple as in the step
before costs nothing, and a longer one what was appended. `BlockTablesMirror` is a copy of the lines on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.core.errors import InvariantError
from baton.core.request import SequenceId
from baton.core.step import Row
from baton.engine.device_stream import to_device

LINES = 64
Change = tuple[int, int, int]
"""(line, first, end): entries of [first, end) of a line have been written, and none outside."""
_NO_SEQUENCE = SequenceId("")


@dataclass(slots=True, eq=False)
class _Line:
    number: int
    sequence_id: SequenceId
    block_ids: tuple[int, ...]
    step: int


class BlockTables:
    """`array` int64 [lines, width]: line i starts with the blocks of its sequence; what follows is invalid. A step with
    more rows than `lines` makes the array larger; its additional lines are forgotten in the next step."""

    def __init__(self, width: int, num_blocks: int, lines: int = LINES) -> None:
        self.width, self.lines, self._num_blocks = width, lines, num_blocks
        self.array: NDArray[np.int64] = np.zeros((lines, width), dtype=np.int64)
        self._of: dict[SequenceId, _Line] = {}
        self._last: list[_Line] = []  # those of the last step, in the order of its rows
        self._free = list(range(lines - 1, -1, -1))
        self._to_free: list[int] = []  # in the next step
        self._step = 0
        # By line, the range that a mirror has not taken yet: bounded, however many steps it has no part in. None
        # without a mirror.
        self._changes: dict[int, tuple[int, int]] | None = None

    def place(self, rows: Sequence[Row]) -> list[int]:
        """Returns the line of each row, which then has its block table.

        Raises:
            InvariantError: a block id is outside the pool; the line's content is then invalid, and not used again.
        """
        self._step += 1
        step, last, placed = self._step, self._last, list[_Line]()
        self._free += self._to_free
        self._to_free = []
        if len(self.array) > self.lines:
            self._shrink()
            last = []
        for index, row in enumerate(rows):
            line = last[index] if index < len(last) else None
            if line is None or line.sequence_id is not row.sequence_id:
                line = self._of.get(row.sequence_id) or self._new(row.sequence_id, len(rows))
            if line.block_ids is not row.block_ids:
                line = self._update(line, row, len(rows))
            line.step = step
            placed.append(line)
        self._last = placed
        return [line.number for line in placed]

    def record_changes(self) -> None:
        """Makes `take_changes` available."""
        self._changes = {}

    def take_changes(self) -> list[Change]:
        """Returns one range for each line that was written since the last call, but no additional lines."""
        changes, self._changes = self._changes or {}, {}
        return [(line, first, end) for line, (first, end) in changes.items()]

    def _update(self, line: _Line, row: Row, needed: int) -> _Line:
        known, blocks = line.block_ids, row.block_ids
        common = len(known)
        if blocks[:common] != known:
            common = next((i for i, (a, b) in enumerate(zip(known, blocks, strict=False)) if a != b), len(blocks))
            if line.step == self._step and common < min(len(known), len(blocks)):
                # Two rows of this step name one sequence, with different blocks: the second gets a line for this step.
                if not self._free:
                    self._make_room(needed)
                self._to_free.append(self._free.pop())
                line, common = _Line(self._to_free[-1], SequenceId(*row.sequence_id), (), self._step), 0
        added = blocks[common : self.width]
        if added:
            if min(added) < 0 or max(added) > self._num_blocks:  # that number itself is the null block
                line.block_ids = ()
                raise InvariantError(f"{row.sequence_id}: block id outside the pool of {self._num_blocks}")
            end = common + len(added)
            self.array[line.number, common:end] = added
            if self._changes is not None and line.number < self.lines:
                first, last = self._changes.get(line.number, (common, end))
                self._changes[line.number] = min(first, common), max(last, end)
        line.block_ids = blocks
        return line

    def _new(self, sequence_id: SequenceId, needed: int) -> _Line:
        if not self._free:
            self._make_room(needed)
        line = self._of[sequence_id] = _Line(self._free.pop(), sequence_id, (), self._step)
        return line

    def _make_room(self, needed: int) -> None:
        """Frees the lines of sequences that have had no row for longest, or adds lines."""
        old = sorted((line for line in self._of.values() if line.step < self._step), key=lambda line: line.step)
        for line in old[: max(len(old) // 2, 1)]:
            del self._of[line.sequence_id]
            self._free.append(line.number)
            line.sequence_id = _NO_SEQUENCE  # it may be among `_last`
        if not self._free:
            had = len(self.array)
            self.array = np.concatenate([self.array, np.zeros((max(needed, had), self.width), dtype=np.int64)])
            self._free = list(range(len(self.array) - 1, had - 1, -1))

    def _shrink(self) -> None:
        self.array = self.array[: self.lines].copy()
        self._of = {name: line for name, line in self._of.items() if line.number < self.lines}
        used = {line.number for line in self._of.values()}
        self._free = [number for number in range(self.lines - 1, -1, -1) if number not in used]


class BlockTablesMirror:
    """`table` int32 [lines + 1, width] on a device, at a fixed address: the lines of `tables`, and a last one of
    `spare_block` alone. Of the additional lines of a large step nothing is copied."""

    def __init__(self, tables: BlockTables, spare_block: int, device: torch.device) -> None:
        self._tables, self._device = tables, device
        self.spare_line = tables.lines
        self.table: Tensor = torch.zeros((tables.lines + 1, tables.width), dtype=torch.int32, device=device)
        self.table[self.spare_line] = spare_block
        tables.record_changes()

    def update(self) -> None:
        """Enqueues what has changed since the last call, in one copy. Does not wait."""
        changes = self._tables.take_changes()
        if not changes:
            return
        width, flat = self._tables.width, self._tables.array.reshape(-1)
        places = np.concatenate([np.arange(line * width + a, line * width + b) for line, a, b in changes])
        both = to_device(torch.from_numpy(np.stack([places, flat[places]])), self._device)
        self.table.view(-1).index_copy_(0, both[0], both[1].int())
