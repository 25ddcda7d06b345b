"""Philox-4x32-10, a counter-based random generator (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as
1, 2, 3", SC 2011): ten rounds of multiply and xor turn a 128-bit counter and a 64-bit key into 128 random bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counter: tuple[Words, int, int, int], key: tuple[int, int]) -> Words:
    """Four words of 32 random bits for each counter, [n, 4] in uint64. The first counter word is an array [n]."""
    c0 = counter[0].astype(np.uint64)
    c1, c2, c3 = (np.full_like(c0, word) for word in counter[1:])
    k0, k1 = key
    for _ in range(ROUNDS):
        product_0, product_1 = np.uint64(MULTIPLIERS[0]) * c0, np.uint64(MULTIPLIERS[1]) * c2
        c0, c2 = (product_1 >> _SHIFT) ^ c1 ^ np.uint64(k0), (product_0 >> _SHIFT) ^ c3 ^ np.uint64(k1)
        c1, c3 = product_1 & _LOW, product_0 & _LOW
        k0, k1 = (k0 + WEYL[0]) & 0xFFFFFFFF, (k1 + WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1)
