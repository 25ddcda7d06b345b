"""A step plan as tensors: all rows packed one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.core.errors import InvariantError
from baton.core.step import Row, StepPlan
from baton.engine.processors import Draw


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


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens with their absolute `positions` and KV `slots`; logits are wanted at packed indexes `sampled` [S]: first
    the `num_scored` that score a known token, then those a token is sampled from, as `draws` says. `tokens` and
    `positions` may be longer than `slots`: then by padding, whose results nobody reads and whose KV is not stored."""

    spans: tuple[Span, ...]
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    sampled: Tensor
    draws: tuple[Draw, ...]
    num_scored: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """What a row must fit into."""

    block_size: int
    num_blocks: int
    vocab_size: int
    max_model_len: int


def make_batch(plan: StepPlan, limits: Limits, device: torch.device, min_tokens: int = 1) -> Batch:
    """Packs a plan. Raises InvariantError if a row does not fit the model (the scheduler's bug, not the client's)."""
    spans: list[Span] = []
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sampled: list[int] = []
    scored: list[int] = []
    draws: list[Draw] = []
    size = limits.block_size
    for row in plan.rows:
        _check(row, limits)
        scored.extend(range(len(tokens), len(tokens) + len(row.scored)))
        spans.append(Span(len(tokens), row.start, row.end, row.block_ids))
        tokens.extend(row.tokens)
        positions.extend(range(row.start, row.end))
        slots.extend(row.block_ids[p // size] * size + p % size for p in range(row.start, row.end))
        sampled.extend(range(len(tokens) - row.num_sampled, len(tokens)))
        drafts = row.tokens[len(row.tokens) - row.num_sampled + 1 :]
        for index in range(row.num_sampled):
            where = (row.sequence_id.choice, row.output_index + index)
            draws.append(Draw(row.sampling, *where, row.history, drafts[:index], row.sequence_id))
    padding = [0] * max(0, min_tokens - len(tokens))

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(device)

    return Batch(
        tuple(spans),
        tensor(tokens + padding),
        tensor(positions + padding),
        tensor(slots),
        tensor(scored + sampled),
        tuple(draws),
        len(scored),
    )


def _check(row: Row, limits: Limits) -> None:
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
