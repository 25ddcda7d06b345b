"""Logits and sampling parameters with which every sampler is tested, and the plain sampler as the reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from baton.core.step import Draw
from baton.engine.processors import SeenTables, process
from baton.engine.sampler import Choose, choose_tokens, noised_logits

PARAMS = [
    {},
    {"temperature": 0.1},
    {"temperature": 5.0},
    {"temperature": 1e-5},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 100_000},
    {"top_p": 0.95},
    {"top_p": 0.3, "temperature": 0.5},
    {"top_p": 1e-9},
    {"top_p": 0.999999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "temperature": 1.7},
]


def rows(vocab: int) -> dict[str, NDArray[np.float32]]:
    generator = np.random.default_rng(vocab)
    normal = generator.normal(size=vocab)
    masked = (normal * 3).astype(np.float32)
    masked[generator.random(vocab) < 0.5] = -np.inf
    masked[vocab // 2] = 1.0
    made = {
        "usual": normal * 3,
        "flat": normal * 1e-3,
        "equal": np.zeros(vocab),
        "few values": np.round(normal),
        "one far above": np.where(np.arange(vocab) == vocab // 3, 60.0, normal),
        "long tail": -np.exp(np.abs(normal) * 2),
        "masked": masked,
    }
    return {name: row.astype(np.float32) for name, row in made.items()}


def sample(
    logits: Tensor, draws: Sequence[Draw], tables: SeenTables | None = None, choose: Choose | None = None
) -> list[int]:
    """Samples one token per row of raw logits [S, vocab]."""
    return choose_tokens(process(logits, draws, tables), draws, choose) if draws else []


def plain(row: NDArray[np.float32], draw: Draw) -> int:
    ids, values = noised_logits(row, draw)
    return int(ids[np.argmax(values)])
