"""The token of a draw by the compiled kernels: what sampler.py would say, some thirty times sooner.

Noise is computed only for tokens that can still win, and the survivors of top_k, top_p and min_p are found without a
sort. What is too close for the kernels to decide (cpu/sampling.cpp) is left to sampler.py.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from baton.engine.kernels import native
from baton.engine.kernels.native import Kernels
from baton.engine.processors import Draw
from baton.engine.sampler import Choose

_CLOSE = 4  # tokens closer to the best than float64 may err, after which sampler.py decides


def chooser(kernels: Kernels) -> Choose:
    """A function from processed logits [vocab] and a draw that is not greedy to its token; None: undecided."""
    ids = (ctypes.c_int64 * _CLOSE)()

    def choose(logits: NDArray[np.float32], draw: Draw) -> int | None:
        logits = np.ascontiguousarray(logits)
        count = kernels.choose(logits.ctypes.data, len(logits), ctypes.byref(as_struct(draw)), ids, _CLOSE)
        return ids[0] if count == 1 else None

    return choose


def as_struct(draw: Draw) -> native.Draw:
    """What the kernels need to know of a draw from processed logits."""
    params = draw.sampling
    return native.Draw(
        temperature=params.temperature,
        top_p=params.top_p,
        min_p=params.min_p,
        top_k=params.top_k,
        key_low=params.seed & 0xFFFFFFFF,
        key_high=(params.seed >> 32) & 0xFFFFFFFF,
        output_index=draw.output_index,
        choice=draw.choice,
    )
