"""A step plan as arrays: all rows packed one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.core.errors import InvariantError
from baton.core.step import Row, StepPlan
from baton.engine.processors import Draw

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """One row in the packed batch: packed index `first`, absolute positions [start, end), the sequence's blocks."""

    first: int
    start: int
    end: int
    block_ids: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Batch:
    """T tokens of R rows; logits are wanted at packed indexes `sampled` [S]: first the `num_scored` that score a known
    token, then those a token is sampled from, as `draws` says.

    Row r has packed indexes `firsts[r]` and on, positions `starts[r]` and on, `lengths[r]` of them, and the blocks
    `block_ids[first_block_ids[r]]` and on. What only some models need is made when it is asked for. `tokens` and
    `positions` may be longer than `slots`: then by padding, whose results nobody reads and whose KV is not stored.
    """

    rows: tuple[Row, ...]
    tokens: Tensor
    sampled: Tensor
    draws: tuple[Draw, ...]
    firsts: Ints
    starts: Ints
    lengths: Ints
    block_ids: Ints
    first_block_ids: Ints
    block_size: int
    num_scored: int = 0

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        firsts = self.firsts.tolist()
        return tuple(
            Span(first, row.start, row.end, row.block_ids) for first, row in zip(firsts, self.rows, strict=True)
        )

    @cached_property
    def positions(self) -> Tensor:
        """[T] absolute positions."""
        positions = np.zeros(len(self.tokens), dtype=np.int64)
        stored = self._positions
        positions[: len(stored)] = stored
        return torch.from_numpy(positions).to(self.tokens.device)

    @cached_property
    def slots(self) -> Tensor:
        """[T] where the KV of each token goes: block id * block_size + offset."""
        positions = self._positions
        blocks = self.block_ids[np.repeat(self.first_block_ids, self.lengths) + positions // self.block_size]
        return torch.from_numpy(blocks * self.block_size + positions % self.block_size).to(self.tokens.device)

    @property
    def _positions(self) -> Ints:
        return _ranges(self.starts, self.lengths)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a row must fit into."""

    block_size: int
    num_blocks: int
    vocab_size: int
    max_model_len: int


def make_batch(plan: StepPlan, limits: Limits, device: torch.device, min_tokens: int = 1) -> Batch:
    """Packs a plan. Raises InvariantError if a row does not fit the model (the scheduler's bug, not the client's)."""
    rows = plan.rows
    tokens = _flat([row.tokens for row in rows])
    block_ids = _flat([row.block_ids for row in rows])
    starts, lengths, tables, num_sampled = _ints(
        [(row.start, len(row.tokens), len(row.block_ids), row.num_sampled) for row in rows]
    )
    _check(rows, tokens, block_ids, starts, lengths, tables, num_sampled, limits)
    ends = np.cumsum(lengths)
    num_scored = np.array([len(row.scored) for row in rows], dtype=np.int64)
    wanted = np.concatenate([_ranges(ends - lengths, num_scored), _ranges(ends - num_sampled, num_sampled)])
    if len(tokens) < min_tokens and rows:
        tokens = np.pad(tokens, (0, min_tokens - len(tokens)))
    return Batch(
        rows=rows,
        tokens=torch.from_numpy(tokens).to(device),
        sampled=torch.from_numpy(wanted).to(device),
        draws=_draws(rows),
        firsts=ends - lengths,
        starts=starts,
        lengths=lengths,
        block_ids=block_ids,
        first_block_ids=np.cumsum(tables) - tables,
        block_size=limits.block_size,
        num_scored=len(wanted) - int(num_sampled.sum()),
    )


def _draws(rows: Sequence[Row]) -> tuple[Draw, ...]:
    draws: list[Draw] = []
    for row in rows:
        drafts = row.tokens[len(row.tokens) - row.num_sampled + 1 :]
        for index in range(row.num_sampled):
            where = (row.sequence_id.choice, row.output_index + index)
            draws.append(Draw(row.sampling, *where, row.history, drafts[:index], row.sequence_id))
    return tuple(draws)


def _flat(parts: Sequence[Sequence[int]]) -> Ints:
    return np.fromiter(chain.from_iterable(parts), dtype=np.int64, count=sum(map(len, parts)))


def _ints(records: Iterable[tuple[int, int, int, int]]) -> Ints:
    """One array for each field of the records."""
    return np.array(list(records), dtype=np.int64).reshape(-1, 4).T.copy()


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """start, start + 1, … for each start, `length` numbers each, one after the other."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def _check(
    rows: Sequence[Row],
    tokens: Ints,
    block_ids: Ints,
    starts: Ints,
    lengths: Ints,
    tables: Ints,
    num_sampled: Ints,
    limits: Limits,
) -> None:
    ends = starts + lengths
    outside = (lengths == 0) | (starts < 0) | (ends > limits.max_model_len)
    sampling = (num_sampled < 0) | (num_sampled > lengths)
    short = tables * limits.block_size < ends
    unknown = _beyond(block_ids, limits.num_blocks) or _beyond(tokens, limits.vocab_size)
    if unknown or any(row.scored for row in rows) or (outside | sampling | short).any():
        for row in rows:
            _check_row(row, limits)


def _beyond(numbers: Ints, limit: int) -> bool:
    return len(numbers) > 0 and bool(numbers.min() < 0 or numbers.max() >= limit)


def _check_row(row: Row, limits: Limits) -> None:
    if not row.tokens or row.start < 0 or row.end > limits.max_model_len:
        raise InvariantError(f"{row.sequence_id}: positions {row.start}..{row.end} outside 0..{limits.max_model_len}")
    if not 0 <= row.num_sampled <= len(row.tokens):
        raise InvariantError(f"{row.sequence_id}: {row.num_sampled} samples of {len(row.tokens)} tokens")
    if len(row.scored) > len(row.tokens) or max(row.scored, default=0) >= limits.vocab_size:
        raise InvariantError(f"{row.sequence_id}: {len(row.scored)} tokens to score after {len(row.tokens)}")
    if min(row.block_ids, default=0) < 0 or max(row.block_ids, default=0) >= limits.num_blocks:
        raise InvariantError(f"{row.sequence_id}: block id outside the pool of {limits.num_blocks}")
    if len(row.block_ids) * limits.block_size < row.end:
        raise InvariantError(f"{row.sequence_id}: {len(row.block_ids)} blocks do not cover {row.end} positions")
    if min(row.tokens) < 0 or max(row.tokens) >= limits.vocab_size:
        raise InvariantError(f"{row.sequence_id}: token id outside the vocabulary of {limits.vocab_size}")
