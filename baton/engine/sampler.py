"""Sampling: a token is a pure function of (logits, parameters, seed, choice, output index, the tokens before it).
docs/numerics.md describes the whole order of processing, for users too.

First processors.py changes the logits: bias, masks, penalties. Then
token = argmax over surviving candidates of (logit + T * g), ties to the lowest id, in float64. That is a draw from
softmax(logit / T) over the survivors, because g is Gumbel noise (the Gumbel-max trick). The noise of a token depends
only on (seed, choice, output index, token id), so it is the same in every subset of the vocabulary, on every worker and
for a draft model. T = 0 is the plain argmax, without noise.

Survivors. Order all tokens by logit, largest first, equal logits by lowest id; masked tokens (-inf) never survive.
1. top_k > 0 keeps the first top_k of that order.
2. top_p < 1 keeps, of those, the shortest prefix whose probability, softmax(logit / T) renormalised over what step 1
   kept, is at least top_p; at least one token. Weights are exp((logit - max) / T) in float64, summed in that order.
3. min_p > 0 keeps, of those, the tokens whose weight is at least min_p (the largest has weight 1).

Noise. Philox-4x32-10, key = seed (low word, high word), counter = (token id >> 2, output index, choice, 0), word
token id & 3 of the four: x. v = (x + 0.5) * 2**-32, g = -log(-log1p(-v)); v is never 0 or 1, so g is finite.

Compiled kernels sample the same tokens about fifty times faster (`chooser`), in one call for all rows of a step. Noise
is computed only for tokens that can still win, and the survivors of top_k, top_p and min_p are found without a sort.
Draws too close for the kernels to decide (cpu/sampling.cpp) are left to the reference here.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.core.request import SamplingParams
from baton.core.step import Draw
from baton.engine.grammar_automaton import Bits
from baton.engine.kernels.native import Kernels
from baton.engine.processors import ApplyMasks

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
Words = NDArray[np.uint64]
Choose = Callable[[Tensor, Sequence[Draw]], list[int | None]]
"""Processed logits [S, vocab] and their draws -> the token of each, or None: undecided."""
Decide = Callable[[Tensor, Sequence[Draw]], Tensor]
"""The same as int64 [S] on the device of the logits, -1 where undecided, without a wait."""

_FIRST_DRAFT = 64  # candidates that top-p examines first; most distributions have their mass in fewer
_GROWTH = 8
_PHILOX_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_PHILOX_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def choose_tokens(logits: Tensor, draws: Sequence[Draw], choose: Choose | None = None) -> list[int]:
    """One token per row of processed logits [S, vocab] (float32), S at least 1. A row's token does not depend on the
    other rows, nor on `choose`, which returns the same token faster, or None."""
    tokens: list[int | None] = [None] * len(draws) if choose is None else choose(logits, draws)
    if None in tokens:
        left = [index for index, token in enumerate(tokens) if token is None]
        rows = logits if len(left) == len(draws) else logits[left]
        for index, token in zip(left, _plain(rows, [draws[index] for index in left]), strict=True):
            tokens[index] = token
    return cast(list[int], tokens)


def _plain(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    tokens: list[int] = torch.argmax(logits, dim=-1).tolist()
    noisy = [index for index, draw in enumerate(draws) if not draw.sampling.greedy]
    if noisy:
        for index, row in zip(noisy, logits[noisy].cpu().numpy(), strict=True):
            ids, values = noised_logits(row, draws[index])
            tokens[index] = int(ids[np.argmax(values)])
    return tokens


def noised_logits(logits: NDArray[np.float32], draw: Draw) -> tuple[Ids, Floats]:
    """Surviving token ids in rising order and logit + T * g of each, from processed logits [vocab]; for T = 0 all ids
    and their plain logits."""
    params = draw.sampling
    if params.greedy:
        return np.arange(len(logits)), logits.astype(np.float64)
    ids = survivors(logits, params)
    return ids, logits[ids] + params.temperature * gumbel(ids, draw)


def numbers(draw: Draw) -> tuple[float, float, float, int, int, int, int, int]:
    """The numbers of a draw that kernels read, in their order. float64 represents each of them exactly."""
    s = draw.sampling
    return s.temperature, s.top_p, s.min_p, s.top_k, *philox_key(s.seed), draw.output_index, draw.choice


def philox_key(seed: int) -> tuple[int, int]:
    """The low word and the high word of the seed."""
    return seed & _LOW, seed >> 32 & _LOW


def gumbel(ids: Ids, draw: Draw) -> Floats:
    """The noise of each token id at this draw. `ids` must be in rising order."""
    blocks = ids >> 2
    new = np.diff(blocks, prepend=-1) != 0  # four neighbouring ids share one counter
    where = np.cumsum(new) - 1
    words = philox4x32((blocks[new], draw.output_index, draw.choice, 0), philox_key(draw.sampling.seed))
    v = (words[where, ids & 3] + 0.5) * 2.0**-32
    noise: Floats = -np.log(-np.log1p(-v))
    return noise


def philox4x32(counter: tuple[Words | Ids, int, int, int], key: tuple[int, int]) -> Words:
    """Four words of 32 random bits for each counter, [n, 4] in uint64, by Philox-4x32-10 (Salmon, Moraes, Dror, Shaw:
    "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The first counter word is an array [n]."""
    c0 = counter[0].astype(np.uint64)
    c1, c2, c3 = (np.full_like(c0, word) for word in counter[1:])
    k0, k1 = key
    low, half = np.uint64(_LOW), np.uint64(32)
    for _ in range(10):
        product_0, product_1 = _PHILOX_MULTIPLIERS[0] * c0, _PHILOX_MULTIPLIERS[1] * c2
        c0, c2 = (product_1 >> half) ^ c1 ^ np.uint64(k0), (product_0 >> half) ^ c3 ^ np.uint64(k1)
        c1, c3 = product_1 & low, product_0 & low
        k0, k1 = (k0 + _PHILOX_WEYL[0]) & _LOW, (k1 + _PHILOX_WEYL[1]) & _LOW
    return np.stack([c0, c1, c2, c3], axis=1)


def survivors(logits: NDArray[np.float32], params: SamplingParams) -> Ids:
    """Ids that top_k, top_p and min_p keep, in rising order. Sorts the whole vocabulary only if top_p needs it all."""
    ids = _nucleus(logits, params)
    values = logits[ids]
    if params.min_p > 0.0:
        return ids[_weights(values, params.temperature, values.max()) >= params.min_p]
    return ids[values > -np.inf] if np.isneginf(values.min()) else ids


def _nucleus(logits: NDArray[np.float32], params: SamplingParams) -> Ids:
    vocab = len(logits)
    kept = min(params.top_k, vocab) if params.top_k > 0 else vocab
    if params.top_p >= 1.0:
        return np.arange(vocab) if kept == vocab else np.sort(leading(logits, kept))
    if kept < vocab:
        ranked = leading(logits, kept)
        weights = _weights(logits[ranked], params.temperature, logits[ranked[0]])
        total = np.cumsum(weights)[-1]
        return np.sort(ranked[: _prefix(weights, params.top_p * total)])
    total = _weights(logits, params.temperature, logits.max()).sum()
    count = min(_FIRST_DRAFT, vocab)
    while True:
        ranked = leading(logits, count)
        weights = _weights(logits[ranked], params.temperature, logits[ranked[0]])
        length = _prefix(weights, params.top_p * total)
        if length <= count or count == vocab:
            return np.sort(ranked[:length])
        count = min(count * _GROWTH, vocab)


def leading(logits: NDArray[np.float32], count: int) -> Ids:
    """The first `count` ids by falling logit, equal logits by lowest id."""
    if count == len(logits):
        candidates = np.arange(count)
    else:
        threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
        candidates = np.flatnonzero(logits >= threshold)
    order = np.lexsort((candidates, -logits[candidates]))
    return candidates[order[:count]]


def _weights(logits: NDArray[np.float32], temperature: float, largest: np.float32) -> Floats:
    weights: Floats = np.exp((logits.astype(np.float64) - np.float64(largest)) / temperature)
    return weights


def _prefix(weights: Floats, mass: float) -> int:
    """Length of the shortest prefix whose sum is at least `mass`; len(weights) + 1 if the whole falls short."""
    return int(np.searchsorted(np.cumsum(weights), mass, side="left")) + 1


_DRAW = struct.Struct("dddqIIII")  # Draw of sampling.h; filling a ctypes struct by names takes four times as long
_PLACE = struct.Struct("qq")  # the fields of Wanted (draft.cpp) after its draw


def chooser(kernels: Kernels, threads: int = 1) -> Choose:
    """Returns a function from processed logits [S, vocab] (float32, on CPU) and draws to tokens; None: undecided."""

    def choose(logits: Tensor, draws: Sequence[Draw]) -> list[int | None]:
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        count = len(draws)
        tokens = (ctypes.c_int64 * count)()
        packed = b"".join([_DRAW.pack(*numbers(draw)) for draw in draws])
        stride, vocab = logits.stride(0), logits.shape[1]
        kernels.choose(logits.data_ptr(), stride, vocab, packed, count, threads, ctypes.byref(tokens))
        return [token if token >= 0 else None for token in tokens]

    return choose


def masker(kernels: Kernels) -> ApplyMasks:
    """`processors.apply_masks` in a fifth of its time: logits that are not masked are neither read nor written."""

    def mask(logits: Tensor, masks: Sequence[tuple[int, Bits]]) -> None:
        for row, bits in masks:
            kernels.mask(logits[row].data_ptr(), bits.ctypes.data, logits.shape[1])

    return mask


def pack_draws(draws: Sequence[Draw], rows: Sequence[int], counts: Sequence[int]) -> bytes:
    """Packs draws as an array of Wanted: `counts[i]` draft tokens after row `rows[i]`."""
    places = map(_PLACE.pack, rows, counts)
    return b"".join([_DRAW.pack(*numbers(draw)) + place for draw, place in zip(draws, places, strict=True)])
