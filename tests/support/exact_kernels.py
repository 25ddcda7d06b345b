"""The kernels of exact mode, one by one, over rows in any pieces: each function of `kernels` returns the results of
rows [first, last) of the same 131, computed without the others. Inputs are fractions that every machine computes alike.

A runner can compute as on CUDA, but on the CPU: fused layers, paged attention, decode steps from fixed arrays and
draws, all in Triton's interpreter (interpreter.py), which executes a kernel's programs with numpy. It shows what a
kernel's source fixes: which keys and inputs a program reads, in which tiles and in which order it adds them up. It does
not show what a compiler makes of it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from baton.engine.batch import RowSpan
from baton.engine.layers import Rotary
from baton.engine.runner import Runner
from baton.engine.weights import Projection
from tests.support.attention import shape
from tests.support.engine_driver import tiny_runner


def interpreted_runner(model_dir: Path, **options: Any) -> Runner:
    """`tiny_runner` on this path, without warm-up and self-test, which would take minutes."""
    from baton.engine import computing, loading, opening
    from baton.engine.kernels.fused import fused
    from baton.engine.layers import Rotary
    from baton.engine.model import Model

    def build_model(config: Any, weights: Any, group: Any, kernels: Any, longest: int, chosen: Any) -> Model:
        rotary = Rotary(config, longest, weights.dtype, weights.device)
        return Model(config, weights, group, fused(rotary, exact=chosen.exact))

    opened = {"build_model": build_model, "check_exact": lambda *_, **__: None}
    loaded = {
        "how_to_compute": computing._on_cuda,
        "prove_row_invariance": lambda *_: None,
        "warm_up": lambda *_: None,
    }
    with mock.patch.multiple(opening, **opened), mock.patch.multiple(loading, **loaded):
        return tiny_runner(model_dir, kernels="torch", **options)


ROWS = 131
PIECES = ((1,), (7,), (16,), (64,), (90, 1, 1, 1), (100, 1, 7, 1, 1, 64))
"""Lengths of pieces, in turn, as the tests of `--exact` divide prompts."""
PORTABLE = ("linear", "add_norm", "sum_ranks")
"""Kernels of sums, products and roots alone, whose bits in the interpreter do not depend on the processor."""
Kernel = Callable[[int, int], Tensor]


def bits(logits: Tensor) -> str:
    return hashlib.sha256(logits.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def fractions(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    count = torch.Size(size).numel()
    return (((torch.arange(count) * 7919 + seed * 104_729) % 997 - 498) / 256).view(size).to(dtype)


def kernels(dtype: torch.dtype, device: torch.device) -> Mapping[str, Kernel]:
    from baton.engine.attention_triton import TritonAttention
    from baton.engine.kernels.fused import FusedHeads, FusedNorm, swiglu
    from baton.engine.kernels.linear import FixedLinear
    from baton.engine.kernels.rank_sum import sum_by_rank

    def make(*size: int, seed: int) -> Tensor:
        return fractions(*size, seed=seed, dtype=dtype).to(device)

    config = replace(shape(6, 2, 24), max_position_embeddings=640)
    linear = FixedLinear(Projection(make(40, 96, seed=1), make(40, seed=2)))
    norm, heads_norm = FusedNorm(make(96, seed=3), 1e-6), FusedNorm(make(24, seed=4), 1e-6)
    heads = FusedHeads(config, (heads_norm, heads_norm), Rotary(config, ROWS, dtype, device))
    x, delta, qkv = make(ROWS, 96, seed=5), make(ROWS, 96, seed=6), make(ROWS, 10, 24, seed=7)
    partials, queries = make(3, ROWS, 96, seed=8), make(ROWS, 6, 24, seed=9)
    cache = make(9, 16, 2, 24, seed=10), make(9, 16, 2, 24, seed=11)
    attention = TritonAttention(config, 16, dtype, device, exact=True)

    def rotate_and_store(first: int, last: int) -> Tensor:
        stored = torch.zeros_like(cache[0]), torch.zeros_like(cache[1])
        at = torch.arange(first, last, device=device)
        turned = heads(qkv[first:last], at, stored, at)
        return torch.cat([turned, *(each.flatten(0, 1)[first:last] for each in stored)], dim=1)

    def attend(window: int) -> Kernel:
        def rows(first: int, last: int) -> Tensor:
            prepared = attention.prepare([RowSpan(0, first, last, tuple(range(9)))], window)
            return attention.attend(queries[first:last], *cache, prepared)

        return rows

    return {
        "linear": lambda first, last: linear(x[first:last]),
        "add_norm": lambda first, last: torch.cat(norm.add(x[first:last], delta[first:last]), dim=1),
        "sum_ranks": lambda first, last: sum_by_rank(partials[:, first:last].contiguous()),
        "silu_mul": lambda first, last: swiglu(x[first:last]),
        "rotate_and_store": rotate_and_store,
        "attend": attend(0),
        "attend, window of 20": attend(20),
    }


def in_pieces(kernel: Kernel, lengths: tuple[int, ...]) -> Tensor:
    results, first = list[Tensor](), 0
    for length in itertools.cycle(lengths):
        last = min(first + length, ROWS)
        results.append(kernel(first, last))
        if (first := last) == ROWS:
            return torch.cat(results)
    raise ValueError(lengths)
