"""Samples the tokens of all draws of a step in one GPU kernel; the reference implementation is sampler.py.

A program handles one row of logits. It finds the row's maximum; with top_k or top_p, the value of the last kept token,
by a four-way search over the 32-bit order of floats, with counts and sums over the row; then the two best kept tokens
after adding noise.

What decides is computed in float64, but float64 is slow, on some GPUs 64 times slower than float32: so the search of
top_p sums in float32, and two sums in float64 confirm its result, or move it to the next value; and noise is computed
in float32 first, and again in float64 only for the tokens around one that may be the best. Sums and logarithms in
float64 may differ from numpy's in the last bits: a draw with a smaller margin than that (at a cut of top_p or min_p, or
between the two best tokens) is undecided, -1, and left to the plain sampler.

Runs on CUDA; under TRITON_INTERPRET=1 also on CPU tensors, which is how it is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.core.step import Draw
from baton.engine.device_stream import to_device
from baton.engine.sampler import numbers

_BLOCK = 2048
_CUT = 1e-10  # relative to the sum of all weights: 2**17 of them are summed to within 2e-11
_PART = 1e-9  # relative to 1 + |noised logit|: the logarithms of two libraries differ by 1e-15
_MOVES = 8  # from one value to the next after the search in float32; then the draw is undecided


def decide(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Implements sampler.Decide, for processed logits float32 [S, vocab]."""
    vocab = logits.shape[1]
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    table = to_device(torch.tensor([numbers(draw) for draw in draws], dtype=torch.float64), logits.device)
    _choose[len(logits),](
        logits, table, tokens, logits.stride(0), vocab, _CUT, _PART, BLOCK=block, MOVES=_MOVES, num_warps=8
    )
    return tokens


@triton.jit
def _key(x):
    """Returns signed integers in the order of the float32 values; -0.0 counts as 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _words(ids, seed_low, seed_high, output_index, choice):
    """Returns 32 random bits in int64 from Philox-4x32-10 (Salmon et al. 2011), keyed as in sampler.py."""
    mask = 0xFFFFFFFF
    c0, c1 = (ids // 4).to(tl.int64), ids.to(tl.int64) * 0 + output_index
    c2, c3 = ids.to(tl.int64) * 0 + choice, ids.to(tl.int64) * 0
    k0, k1 = seed_low, seed_high
    for _ in tl.static_range(10):
        one, two = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # signed, modulo 2**64: masked below
        c0, c2 = ((two >> 32) & mask) ^ c1 ^ k0, ((one >> 32) & mask) ^ c3 ^ k1
        c1, c3 = two & mask, one & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    place = ids % 4
    return tl.where(place == 0, c0, tl.where(place == 1, c1, tl.where(place == 2, c2, c3)))


@triton.jit
def _noise(word):
    """Returns Gumbel noise in float64."""
    # 1 - v is exact, so that its logarithm is log1p(-v).
    v = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log(-tl.log(1.0 - v))


@triton.jit
def _noise32(word):
    """Returns the same within 1e-4: a GPU's float32 logarithms have absolute errors of 2**-22 around 1."""
    v = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    complement = ((0xFFFFFFFF - word).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = v * (1.0 + v * (0.5 + v * (0.33333334 + v * (0.25 + v * 0.2))))
    return -tl.log(tl.where(v < 0.0625, series, -tl.log(complement)))


@triton.jit
def _above(row_ptr, vocab, pivot, peak, temperature, BLOCK: tl.constexpr):
    """Returns the number of tokens with keys above `pivot`, and the sum of their weights."""
    count = tl.zeros([BLOCK], tl.int64)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + at, mask=at < vocab, other=float("-inf"))
        over = (_key(x) > pivot) & (at < vocab)
        count += over.to(tl.int64)
        total += tl.where(over, tl.exp((x.to(tl.float64) - peak) / temperature), 0.0)
    return tl.sum(count, 0), tl.sum(total, 0)


@triton.jit
def _three_above(row_ptr, vocab, a, b, c, peak, temperature, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns, for three keys in one pass, the numbers of tokens above them, or with WEIGHTS the sums of their weights;
    in float32, which counts up to 2**24 exactly."""
    zero = tl.zeros([BLOCK], tl.float32)
    of_a, of_b, of_c = zero, zero, zero
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + at, mask=at < vocab, other=float("-inf"))
        key = _key(x)
        value = (at < vocab).to(tl.float32)
        if WEIGHTS:
            value = tl.where(at < vocab, tl.exp((x - peak) / temperature), 0.0)
        of_a += tl.where(key > a, value, 0.0)
        of_b += tl.where(key > b, value, 0.0)
        of_c += tl.where(key > c, value, 0.0)
    return tl.sum(of_a, 0), tl.sum(of_b, 0), tl.sum(of_c, 0)


@triton.jit
def _search(row_ptr, vocab, low, high, bound, peak, temperature, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the least key in (low, high] above which the count or sum is below `bound`; for `high` it must be. All
    but the keys are float32."""
    while high - low > 1:
        quarter = tl.maximum((high - low) // 4, 1)
        a = low + quarter
        b, c = tl.minimum(a + quarter, high - 1), tl.minimum(a + 2 * quarter, high - 1)
        of_a, of_b, of_c = _three_above(row_ptr, vocab, a, b, c, peak, temperature, WEIGHTS, BLOCK)
        new_high = tl.where(of_a < bound, a, tl.where(of_b < bound, b, tl.where(of_c < bound, c, high)))
        low = tl.where(of_a < bound, low, tl.where(of_b < bound, a, tl.where(of_c < bound, b, c)))
        high = new_high
    return high


@triton.jit
def _next_key(row_ptr, vocab, key, BLOCK: tl.constexpr):
    """Returns the greatest key of any token below `key`, and the least above it."""
    lower = tl.full([BLOCK], -(1 << 40), tl.int64)
    higher = tl.full([BLOCK], 1 << 40, tl.int64)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        other = _key(tl.load(row_ptr + at, mask=at < vocab, other=float("-inf")))
        lower = tl.maximum(lower, tl.where((other < key) & (at < vocab), other, -(1 << 40)))
        higher = tl.minimum(higher, tl.where((other > key) & (at < vocab), other, 1 << 40))
    return tl.max(lower, 0), tl.min(higher, 0)


@triton.jit
def _of_key(row_ptr, vocab, floor, BLOCK: tl.constexpr):
    """Returns the least key of any token that is at least `floor`, and the number of tokens that have it."""
    least = tl.full([BLOCK], 1 << 40, tl.int64)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        key = _key(tl.load(row_ptr + at, mask=at < vocab, other=float("-inf")))
        least = tl.minimum(least, tl.where((key >= floor) & (at < vocab), key, 1 << 40))
    nearest = tl.min(least, 0)
    count = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        key = _key(tl.load(row_ptr + at, mask=at < vocab, other=float("-inf")))
        count += ((key == nearest) & (at < vocab)).to(tl.int64)
    return nearest, tl.sum(count, 0)


@triton.jit(do_not_specialize=["logits_ptr", "vocab", "stride"])
def _choose(logits_ptr, draws_ptr, token_ptr, stride, vocab, cut, part, BLOCK: tl.constexpr, MOVES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_ptr, draw_ptr = logits_ptr + row * stride, draws_ptr + row * 8
    temperature, top_p, min_p = tl.load(draw_ptr), tl.load(draw_ptr + 1), tl.load(draw_ptr + 2)
    top_k = tl.load(draw_ptr + 3).to(tl.int64)
    seed_low, seed_high = tl.load(draw_ptr + 4).to(tl.int64), tl.load(draw_ptr + 5).to(tl.int64)
    output_index, choice = tl.load(draw_ptr + 6).to(tl.int64), tl.load(draw_ptr + 7).to(tl.int64)

    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.full([BLOCK], 1 << 40, tl.int64)
    strange = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + at, mask=at < vocab, other=float("-inf"))
        strange += (x != x).to(tl.int32)
        higher = x > best
        where = tl.where(higher, at, where)
        best = tl.where(higher, x, best)
    peak32 = tl.max(best, 0)
    token = tl.min(tl.where(best == peak32, where, 1 << 40), 0)
    finite = (peak32 > float("-inf")) & (peak32 < float("inf")) & (tl.sum(strange, 0) == 0)
    if not finite:
        tl.store(token_ptr + row, -1)
    elif temperature == 0.0:
        tl.store(token_ptr + row, token)
    else:
        peak = peak32.to(tl.float64)
        lowest: tl.constexpr = -(1 << 33)
        floor = tl.zeros([], tl.int64) + lowest  # kept: keys above `floor`, and the first `ties` of that key
        ties = tl.zeros([], tl.int64)
        near = tl.zeros([], tl.int32)
        highest = _key(peak32)
        temperature32 = temperature.to(tl.float32)
        if (top_k > 0) & (top_k < vocab):
            floor = _search(row_ptr, vocab, highest * 0 + lowest, highest, top_k, peak32, temperature32, False, BLOCK)
            floor, _ = _of_key(row_ptr, vocab, floor, BLOCK)
            above, _ = _above(row_ptr, vocab, floor, peak, temperature, BLOCK)
            ties = top_k - above
        if top_p < 1.0:
            staying, total = _above(row_ptr, vocab, floor, peak, temperature, BLOCK)
            if ties > 0:
                at_floor = _value(floor)
                total += ties.to(tl.float64) * tl.exp((at_floor - peak) / temperature)
            bound = top_p * total
            lower = tl.maximum(floor - 1, lowest)
            last = _search(row_ptr, vocab, lower, highest, bound.to(tl.float32), peak32, temperature32, True, BLOCK)
            last, have = _of_key(row_ptr, vocab, last, BLOCK)
            above_last, before = _above(row_ptr, vocab, last, peak, temperature, BLOCK)
            moves = 0
            moving = 1
            while moving > 0:
                if last == floor:
                    have = tl.minimum(have, ties)
                through = before + have.to(tl.float64) * tl.exp((_value(last) - peak) / temperature)
                down, up = (through < bound) & (last > floor), (before >= bound) & (last < highest)
                moving = ((down | up) & (moves < MOVES)).to(tl.int32)
                near += ((down | up) & (moves >= MOVES)).to(tl.int32)
                if moving > 0:
                    next_lower, next_higher = _next_key(row_ptr, vocab, last, BLOCK)
                    goal = tl.where(up, next_higher, tl.maximum(next_lower, floor))
                    moving = (goal > lower).to(tl.int32)  # else all tokens are kept
                    last, have = _of_key(row_ptr, vocab, tl.where(moving > 0, goal, last), BLOCK)
                    above_last, before = _above(row_ptr, vocab, last, peak, temperature, BLOCK)
                    moves += 1
            if last == floor:
                have = tl.minimum(have, ties)
            weight = tl.exp((_value(last) - peak) / temperature)
            kept = tl.zeros([], tl.int64) + 1
            while (kept < have) & (before + kept.to(tl.float64) * weight < bound):
                kept += 1
            below = before + (kept - 1).to(tl.float64) * weight
            beyond = before + kept.to(tl.float64) * weight
            near += (tl.abs(below - bound) <= cut * total).to(tl.int32)
            # The token after the last kept one would begin at `beyond`.
            more = above_last + kept < staying + ties
            near += (more & (tl.abs(beyond - bound) <= cut * total)).to(tl.int32)
            floor, ties = last, kept

        first = tl.full([BLOCK], float("-inf"), tl.float64)
        second = tl.full([BLOCK], float("-inf"), tl.float64)
        ids = tl.full([BLOCK], 1 << 40, tl.int64)
        edges = tl.zeros([BLOCK], tl.int32)
        seen = tl.zeros([], tl.int64)
        best32 = tl.full([], float("-inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + at, mask=at < vocab, other=float("-inf"))
            key = _key(x)
            tied = ((key == floor) & (at < vocab)).to(tl.int64)
            rank = seen + tl.cumsum(tied, 0) - tied
            seen += tl.sum(tied, 0)
            survives = (key > floor) | ((tied > 0) & (rank < ties))
            survives = survives & (x > float("-inf")) & (at < vocab)
            if min_p > 0.0:
                weight32 = tl.exp((x - peak32) / temperature32)
                unsure = survives & (tl.abs(weight32 - min_p.to(tl.float32)) <= 1e-4 * min_p.to(tl.float32))
                enough = weight32 >= min_p.to(tl.float32)
                if tl.sum(unsure.to(tl.int32), 0) > 0:
                    weight = tl.exp((x.to(tl.float64) - peak) / temperature)
                    edges += (unsure & (weight < 1.0) & (tl.abs(weight - min_p) <= cut)).to(tl.int32)
                    enough = tl.where(unsure, weight >= min_p, enough)
                survives = survives & enough
            if tl.sum(survives.to(tl.int32), 0) > 0:
                word = _words(at, seed_low, seed_high, output_index, choice)
                noised32 = tl.where(survives, x + temperature32 * _noise32(word), float("-inf"))
                here = tl.max(noised32, 0)
                best32 = tl.maximum(best32, here)
                if here >= best32 - 1e-3 * temperature32 - 1e-5 * tl.abs(best32):
                    noised = tl.where(survives, x.to(tl.float64) + temperature * _noise(word), float("-inf"))
                    higher = noised > first
                    second = tl.where(higher, first, tl.maximum(second, noised))
                    ids = tl.where(higher, at, ids)
                    first = tl.where(higher, noised, first)
        one = tl.max(first, 0)
        token = tl.min(tl.where(first == one, ids, 1 << 40), 0)
        two = tl.maximum(tl.max(second, 0), tl.max(tl.where(ids == token, float("-inf"), first), 0))
        near += tl.sum(edges, 0)
        decided = (near == 0) & (one - two > part * (1.0 + tl.abs(one)))
        tl.store(token_ptr + row, tl.where(decided, token, -1))


@triton.jit
def _value(key):
    """Returns the float64 value of a token's key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True).to(tl.float64)
