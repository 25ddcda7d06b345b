"""Reported log-probabilities: those of the model's own distribution, before bias, masks, penalties and temperature,
computed in float64 one row at a time (so they do not depend on other rows) and rounded to float32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from baton.core.request import TokenLogprob
from baton.core.step import StepPlan
from baton.engine.sampler import leading


def token_logprob(logits: NDArray[np.float32], token: int, top: int) -> TokenLogprob:
    """The log-probabilities of `token` and the `top` likeliest, from one row of raw logits [vocab]."""
    largest = np.float64(logits.max())
    total = largest + np.log(np.exp(logits.astype(np.float64) - largest).sum())
    ids = leading(logits, min(top, len(logits))) if top else np.empty(0, dtype=np.int64)
    values = (logits[np.append(ids, token)].astype(np.float64) - total).astype(np.float32).tolist()
    rank = int(np.count_nonzero(logits > logits[token])) + 1
    return TokenLogprob(token, values[-1], rank, tuple(ids.tolist()), tuple(values[:-1]))


def scored_rows(plan: StepPlan, logits: Tensor) -> tuple[tuple[TokenLogprob, ...], ...]:
    """StepOutcome.scored, from raw logits [number of scored tokens, vocab]; empty when no row scores tokens."""
    if not any(row.scored for row in plan.rows):
        return ()
    lines = iter(logits.cpu().numpy())
    return tuple(
        tuple(token_logprob(next(lines), token, row.sampling.prompt_logprobs or 0) for token in row.scored)
        for row in plan.rows
    )


def asked(plan: StepPlan) -> list[int]:
    """The indexes, among all samples of a plan in row order, of those reported with log-probabilities."""
    found: list[int] = []
    number = 0
    for row in plan.rows:
        if row.sampling.logprobs is not None:
            found += range(number, number + row.num_sampled)
        number += row.num_sampled
    return found


def sampled_rows(
    plan: StepPlan, logits: Tensor, sampled: Sequence[tuple[int, ...]]
) -> tuple[tuple[TokenLogprob, ...], ...]:
    """StepOutcome.logprobs, from the raw logits [len(asked(plan)), vocab] and the tokens of all rows; empty when no row
    requests them."""
    if all(row.sampling.logprobs is None for row in plan.rows):
        return ()
    lines = iter(logits.cpu().numpy())
    return tuple(
        () if (top := row.sampling.logprobs) is None else tuple(token_logprob(next(lines), t, top) for t in tokens)
        for row, tokens in zip(plan.rows, sampled, strict=True)
    )
