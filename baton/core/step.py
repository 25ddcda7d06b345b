"""One step of the engine as a value: rows of tokens to compute, and what came out.

A prefill chunk is a long row, a decode step a row of 1, verification a row of 1+k, recompute again a long row: one
runner serves both pools (design, section 1.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.request import SamplingParams, SequenceId


@dataclass(frozen=True, slots=True)
class Row:
    """Compute `tokens` at positions [start, start + len(tokens)) of a sequence.

    `block_ids` is the sequence's block table and covers at least start + len(tokens) positions; KV of positions
    before `start` is already there. Of the last `num_sampled` positions a token is sampled each; the first of these
    samples is output index `output_index` of (sampling.seed, choice). `num_sampled` 0 computes KV only.
    """

    sequence_id: SequenceId
    start: int
    tokens: tuple[int, ...]
    block_ids: tuple[int, ...]
    sampling: SamplingParams
    num_sampled: int = 0
    output_index: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    step_id: int
    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """`sampled[i]` holds the tokens sampled for `plan.rows[i]`, `num_sampled` of them. `elapsed_s` is wall time."""

    step_id: int
    sampled: tuple[tuple[int, ...], ...]
    elapsed_s: float = 0.0
