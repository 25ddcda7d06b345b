"""One vector for each row that requests one (`Row.pooling`): a final hidden state, the sum of those of a row's tokens,
or the scores of a classification head.

A prompt's mean adds the sums of its rows, so its bits could depend on where chunks end. Sums are therefore exact:
states are rounded to multiples of 2^-24 before they are added in float64, which holds such sums up to 2^29. The
rounding error, at most 2^-25 a token, is below that of float32.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import torch
from torch import Tensor

from baton.engine.batch import Batch

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
