"""What rows report besides tokens: log-probabilities, and vectors.

Log-probabilities are those of the model's own distribution, before bias, masks, penalties and temperature, computed in
float64 one row at a time (so they do not depend on other rows) and rounded to float32. On a device `reports` computes
the same for all rows of a step, and only its numbers are copied to the host: a copy of the logits and `token_logprob`,
its reference implementation, would take 2 ms a row of 128,000 tokens.

A row that requests pooling (`Row.pooling`) has one vector: a final hidden state, the sum of those of its tokens, or the
scores of a classification head. A prompt's mean adds the sums of its rows, so its bits could depend on where chunks
end. Sums are therefore exact: states are rounded to multiples of 2^-24 before they are added in float64, which holds
such sums up to 2^29. The rounding error, at most 2^-25 a token, is below that of float32.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.core.request import TokenLogprob
from baton.core.step import StepPlan
from baton.engine.batch import Batch
from baton.engine.sampler import leading

OfLine = Callable[[int, int, int], TokenLogprob]
"""(the line's number, its token, how many of the likeliest to list) -> its log-probabilities."""
_ROWS = 64  # at once: float64 and integers take five times the memory of their logits


def token_logprob(logits: NDArray[np.float32], token: int, top: int) -> TokenLogprob:
    """The log-probabilities of `token` and the `top` likeliest, from one row of raw logits [vocab]."""
    largest = np.float64(logits.max())
    total = largest + np.log(np.exp(logits.astype(np.float64) - largest).sum())
    ids = leading(logits, min(top, len(logits))) if top else np.empty(0, dtype=np.int64)
    values = (logits[np.append(ids, token)].astype(np.float64) - total).astype(np.float32).tolist()
    rank = int(np.count_nonzero(logits > logits[token])) + 1
    return TokenLogprob(token, values[-1], rank, tuple(ids.tolist()), tuple(values[:-1]))


def reports(logits: Tensor, tokens: Tensor, top: int) -> Tensor:
    """int32 [N, 2 + 2 top], from which `reported` reads the log-probabilities of `tokens` int64 [N] and the `top`
    likeliest of each row of raw logits float32 [N, vocab], on the same device, without a wait."""
    top = min(top, logits.shape[1])
    pairs = zip(torch.split(logits, _ROWS), torch.split(tokens, _ROWS), strict=True)
    return torch.cat([_reports(some, of, top) for some, of in pairs])


def _reports(logits: Tensor, tokens: Tensor, top: int) -> Tensor:
    total = logits.double().logsumexp(1, keepdim=True)
    picked = logits.gather(1, tokens[:, None])
    ranks = (logits > picked).sum(1, keepdim=True) + 1
    ids = torch.empty((len(tokens), 0), dtype=torch.int64, device=logits.device)
    if top:
        # Distinct integers in the order of the list: by falling logit (-0.0 as 0.0), then by rising id.
        bits = (logits + 0.0).view(torch.int32)
        order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
        order += torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
        ids = logits.shape[1] - 1 - (order.topk(top).values & 0xFFFFFFFF)
    values = torch.cat([picked, logits.gather(1, ids)], 1).double() - total
    return torch.cat([ranks.int(), ids.int(), values.float().view(torch.int32)], 1)


def reported(line: NDArray[np.int32], token: int, top: int) -> TokenLogprob:
    """The log-probabilities of `token`, for which `reports` computed this line, with the `top` likeliest, at most as
    many as it has."""
    max_top = len(line) // 2 - 1
    values, listed = line[1 + max_top :].view(np.float32).tolist(), line[1 : 1 + min(top, max_top)].tolist()
    return TokenLogprob(token, values[0], int(line[0]), tuple(listed), tuple(values[1 : 1 + len(listed)]))


def scored_rows(plan: StepPlan, of_line: OfLine) -> tuple[tuple[TokenLogprob, ...], ...]:
    """StepOutcome.scored; empty when no row scores tokens. `of_line` is called for each scored token in turn."""
    if not any(row.scored for row in plan.rows):
        return ()
    lines = count()
    return tuple(
        tuple(of_line(next(lines), token, row.sampling.prompt_logprobs or 0) for token in row.scored)
        for row in plan.rows
    )


def most_listed(plan: StepPlan) -> int:
    """The most likeliest tokens that any row of a plan lists."""
    tops = [row.sampling.logprobs for row in plan.rows] + [
        row.sampling.prompt_logprobs for row in plan.rows if row.scored
    ]
    return max((top or 0 for top in tops), default=0)


def asked(plan: StepPlan) -> list[int]:
    """The indexes, among all samples of a plan in row order, of those reported with log-probabilities."""
    samples: list[int] = []
    number = 0
    for row in plan.rows:
        if row.sampling.logprobs is not None:
            samples += range(number, number + row.num_sampled)
        number += row.num_sampled
    return samples


def sampled_rows(
    plan: StepPlan, of_line: OfLine, sampled: Sequence[tuple[int, ...]]
) -> tuple[tuple[TokenLogprob, ...], ...]:
    """StepOutcome.logprobs, from the tokens of all rows; empty when no row requests them. `of_line` is called for each
    of asked(plan) in turn."""
    if all(row.sampling.logprobs is None for row in plan.rows):
        return ()
    lines = count()
    return tuple(
        () if (top := row.sampling.logprobs) is None else tuple(of_line(next(lines), t, top) for t in tokens)
        for row, tokens in zip(plan.rows, sampled, strict=True)
    )


SCALE = float(1 << 24)
TOKENS_AT_ONCE = 256
"""Tokens whose states are converted to float64 at once."""


def pool_rows(batch: Batch, states: Tensor, head: Tensor | None) -> Tensor:
    """Returns float64 [rows with pooling, width] of a batch whose `pooled` tokens have the final hidden states `states`
    [N, hidden]. With a classification head, float64 [labels, hidden], the width is `labels`, else `hidden`."""
    vectors, first = list[Tensor](), 0
    for row in batch.rows:
        if not row.pooling:
            continue
        if row.pooling == "last":
            vector = states[first].double()
            vectors.append(vector if head is None else head @ vector)
            first += 1
        else:
            vectors.append(_sum(states[first : first + len(row.tokens)]))
            first += len(row.tokens)
    return torch.stack(vectors)


def _sum(states: Tensor) -> Tensor:
    parts = [part.double().mul_(SCALE).round_().sum(0) for part in torch.split(states, TOKENS_AT_ONCE)]
    return torch.stack(parts).sum(0).div_(SCALE)


def pooled_arrays(batch: Batch, vectors: Tensor | None) -> Mapping[int, array[float]]:
    """Returns the vectors of `pool_rows`, in host memory, by the index of their row; empty for None."""
    if vectors is None:
        return {}
    indexes = [index for index, row in enumerate(batch.rows) if row.pooling]
    return {index: array("d", vector.numpy().tobytes()) for index, vector in zip(indexes, vectors, strict=True)}
