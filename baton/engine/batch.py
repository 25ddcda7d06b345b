"""A step plan as arrays: all rows packed one after the other.

Rows are processed in Python, and compiled kernels read arrays of the standard library: a step has few rows, and for a
few numbers a numpy or torch operation takes longer, above all when the weights of the last step have evicted its code
from the caches.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.core.errors import InvariantError
from baton.core.step import Draw, Row, StepPlan
from baton.engine.block_tables import LINES, BlockTables
from baton.engine.device_stream import to_device

Ints = NDArray[np.int64]

_FEW = 100  # numbers that Python compares as fast as numpy


@dataclass(frozen=True, slots=True)
class RowSpan:
    """One row in the packed batch: packed index `first`, absolute positions [start, end), the sequence's table. Of its
    columns, of `groups` blocks, layers of one `group` read their own."""

    first: int
    start: int
    end: int
    block_ids: tuple[int, ...]
    group: int = 0
    groups: int = 1

    @property
    def length(self) -> int:
        return self.end - self.start

    def blocks(self, first: int, last: int) -> tuple[int, ...]:
        """Returns the group's blocks in columns [first, last)."""
        return self.block_ids[first * self.groups + self.group : last * self.groups : self.groups]


def packed_tokens(spans: Sequence[RowSpan], device: torch.device) -> slice | Tensor:
    """The packed indexes of the tokens of rows: a slice, or int64 on the device if other rows lie between them."""
    at = spans[0].first
    for span in spans:
        if span.first != at:
            tokens = [token for each in spans for token in range(each.first, each.first + each.length)]
            return to_device(torch.tensor(tokens), device)
        at += span.length
    return slice(spans[0].first, at)


@dataclass(frozen=True)
class Batch:
    """T tokens of R rows; logits are computed at packed indexes `sampled` [S]: first the `num_scored` that score a
    known token, then those from which a token is sampled, one for each of `draws`. Rows with `pooling` need the final
    hidden states at packed indexes `pooled` [N], row by row.

    `table` has four numbers for each row: its first packed index, its first position, its number of tokens, and the
    index in `block_ids` of its first block; `lines` are the lines of the `BlockTables` that `block_ids` is the flat
    array of, valid until the next batch is made. Arrays that only some models need are built on first access.
    `token_ids` and `positions` may be longer than `slots`, by padding whose results are not read and whose KV is not
    stored. `device_tokens` [T] are the tokens if some are only on the device: `token_ids` and the rows' own are then
    invalid.
    """

    rows: tuple[Row, ...]
    token_ids: array[int]
    sampled_at: array[int]
    draws: tuple[Draw, ...]
    table: array[int]
    lines: list[int]
    block_ids: Ints
    block_size: int
    device: torch.device
    groups: int = 1
    num_scored: int = 0
    device_tokens: Tensor | None = None

    @cached_property
    def tokens(self) -> Tensor:
        """[T]"""
        return self._tensor(self.token_ids) if self.device_tokens is None else self.device_tokens

    @cached_property
    def sampled(self) -> Tensor:
        """[S]"""
        return self._tensor(self.sampled_at)

    @cached_property
    def pooled(self) -> Tensor:
        """[N]"""
        at: list[int] = []
        for row, end in zip(self.rows, (self.firsts + self.lengths).tolist(), strict=True):
            if row.pooling:
                at += range(end - (1 if row.pooling == "last" else len(row.tokens)), end)
        return self._tensor(array("q", at))

    @cached_property
    def firsts(self) -> Ints:
        """[R] the first packed index of each row."""
        return self._column(0)

    @cached_property
    def starts(self) -> Ints:
        return self._column(1)

    @cached_property
    def lengths(self) -> Ints:
        return self._column(2)

    @cached_property
    def spans(self) -> tuple[RowSpan, ...]:
        return self.spans_of(0)

    def spans_of(self, group: int) -> tuple[RowSpan, ...]:
        """The rows as layers of one group of the KV read them."""
        return tuple(
            RowSpan(first, row.start, row.end, row.block_ids, group, self.groups)
            for first, row in zip(self.firsts.tolist(), self.rows, strict=True)
        )

    @cached_property
    def positions(self) -> Tensor:
        """[T] absolute positions."""
        positions = np.zeros(len(self.token_ids), dtype=np.int64)
        stored = self._positions
        positions[: len(stored)] = stored
        return to_device(torch.from_numpy(positions), self.device)

    @cached_property
    def slots(self) -> Tensor:
        """[T] the slot for the KV of each token: block id * block_size + offset."""
        return self.slots_of(0)

    def slots_of(self, group: int) -> Tensor:
        """[T] the slots of one group of layers."""
        positions = self._positions
        columns = positions // self.block_size
        indexes = np.repeat(self._column(3), self.lengths) + columns * self.groups + group
        slots = self.block_ids[indexes] * self.block_size + positions % self.block_size
        return to_device(torch.from_numpy(slots), self.device)

    @cached_property
    def adapters(self) -> dict[str, array[int]]:
        """The packed indexes of the rows of each LoRA adapter, by its digest."""
        tokens: dict[str, array[int]] = {}
        for row, first in zip(self.rows, self.table[::4], strict=True):
            if row.adapter:
                tokens.setdefault(row.adapter, array("q")).extend(range(first, first + len(row.tokens)))
        return tokens

    @property
    def _positions(self) -> Ints:
        return _ranges(self.starts, self.lengths)

    def _column(self, number: int) -> Ints:
        return np.asarray(self.table).reshape(-1, 4)[:, number]

    def _tensor(self, numbers: array[int]) -> Tensor:
        return to_device(torch.from_numpy(np.asarray(numbers)), self.device)


@dataclass(frozen=True, slots=True)
class RowLimits:
    """The limits that each row must respect. A column of a table has `groups` blocks."""

    block_size: int
    num_blocks: int
    vocab_size: int
    max_model_len: int
    groups: int = 1

    def new_tables(self, lines: int = LINES) -> BlockTables:
        return BlockTables(-(-self.max_model_len // self.block_size) * self.groups, self.num_blocks, lines)


def make_batch(
    plan: StepPlan, limits: RowLimits, device: torch.device, min_tokens: int = 1, tables: BlockTables | None = None
) -> Batch:
    """Packs a plan; `tables` are those of the plans before it. Raises InvariantError if a row does not fit the model
    (the scheduler's bug, not the client's)."""
    rows = plan.rows
    tables = tables or limits.new_tables()
    tokens: list[int] = []
    table: list[int] = []
    scored: list[int] = []
    sampled: list[int] = []
    for row in rows:
        _check_row(row, limits)
    lines = tables.place(rows)
    for row, line in zip(rows, lines, strict=True):
        first = len(tokens)
        tokens += row.tokens
        table += first, row.start, len(tokens) - first, line * tables.width
        if row.scored:
            scored += range(first, first + len(row.scored))
        if row.num_sampled:
            sampled += range(len(tokens) - row.num_sampled, len(tokens))
    if rows and len(tokens) < min_tokens:
        tokens += [0] * (min_tokens - len(tokens))
    packed = array("q", tokens)
    if _beyond(packed, limits.vocab_size):
        for row in rows:
            if min(row.tokens) < 0 or max(row.tokens) >= limits.vocab_size:
                raise InvariantError(f"{row.sequence_id}: token id outside the vocabulary of {limits.vocab_size}")
    return Batch(
        rows=rows,
        token_ids=packed,
        sampled_at=array("q", scored + sampled),
        draws=_draws(plan),
        table=array("q", table),
        lines=lines,
        block_ids=tables.array.reshape(-1),
        block_size=limits.block_size,
        device=device,
        groups=limits.groups,
        num_scored=len(scored),
    )


def _draws(plan: StepPlan) -> tuple[Draw, ...]:
    if plan.drafted:
        _check_drafted(plan)
    draws: list[Draw] = []
    for row in plan.rows:
        drafts = () if plan.drafted else row.tokens[len(row.tokens) - row.num_sampled + 1 :]
        for index in range(row.num_sampled):
            where = (row.sequence_id.choice, row.output_index + index)
            draws.append(Draw(row.sampling, *where, row.history, drafts[:index], row.sequence_id))
    return tuple(draws)


def _check_drafted(plan: StepPlan) -> None:
    """Checks that no row of a plan whose draft tokens are only on the device has draft tokens known to the host, too:
    later draws would need both."""
    if len(plan.drafted) != len(plan.rows):
        raise InvariantError(
            f"step {plan.step_id}: draft tokens for {len(plan.drafted)} rows, but it has {len(plan.rows)} rows"
        )
    for row, count in zip(plan.rows, plan.drafted, strict=True):
        if row.num_sampled != 1 + count and (count or row.num_sampled):
            raise InvariantError(
                f"{row.sequence_id}: {row.num_sampled} samples do not match {count} draft tokens on the device"
            )


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """Concatenates the ranges [start, start + length)."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def _beyond(numbers: array[int], limit: int) -> bool:
    if len(numbers) <= _FEW:
        return len(numbers) > 0 and (min(numbers) < 0 or max(numbers) >= limit)
    many = np.asarray(numbers)
    return bool(many.min() < 0 or many.max() >= limit)


def _check_row(row: Row, limits: RowLimits) -> None:
    """Checks everything but the ids."""
    length = len(row.tokens)
    end = row.start + length
    if not length or row.start < 0 or end > limits.max_model_len:
        raise InvariantError(f"{row.sequence_id}: positions {row.start}..{end} outside 0..{limits.max_model_len}")
    if not 0 <= row.num_sampled <= length:
        raise InvariantError(f"{row.sequence_id}: {row.num_sampled} samples of {length} tokens")
    if row.scored and (len(row.scored) > length or max(row.scored) >= limits.vocab_size):
        raise InvariantError(f"{row.sequence_id}: invalid tokens to score: {len(row.scored)} in a row of {length}")
    groups, column = limits.groups, row.start // limits.block_size
    if len(row.block_ids) // groups * limits.block_size < end:
        raise InvariantError(f"{row.sequence_id}: {len(row.block_ids)} blocks do not cover {end} positions")
    if limits.num_blocks in row.block_ids[column * groups : (column + 1) * groups]:
        raise InvariantError(f"{row.sequence_id}: its block at position {row.start} was given back")
