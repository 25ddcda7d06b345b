"""The self-test at start that exact mode holds on this machine, with this model, these kernels and these threads.

A sequence of random tokens is computed twice: in one long row among other rows, and alone in short chunks down to
single tokens. Every key and value of every layer, and the logits at the end, must have the same bits. If the order in
which a kernel library sums depends on the number of rows, this test fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from baton.core.errors import StartupError
from baton.core.request import SamplingParams, SequenceId
from baton.core.step import Row, StepPlan
from baton.engine.attention_exact import KEY_STEP
from baton.engine.kv_pool import KVPool

StepLogits = Callable[[StepPlan], list[Tensor]]

_LENGTH = 180
_CHUNKS = (7, 16, 1, 64, 33, 2, 1, 40)
_MATE_LENGTHS = (130, 17, 1)
_LAST = 3  # tokens at the end that are computed as decode steps the second time, and whose logits are compared


def check_exact(block_size: int, dtype: str, kernels_name: str, *, compiled: bool) -> None:
    """Raises StartupError for what exact mode does not support on CPU: torch's kernels, as exact mode uses them, are
    row-invariant only in float32; `compiled` ones always are."""
    if KEY_STEP % block_size:
        raise StartupError(f"exact mode: block-size must divide {KEY_STEP}, not {block_size}")
    if not compiled and dtype != "float32":
        raise StartupError(
            f"exact mode in {dtype} needs compiled kernels, not {kernels_name}: set dtype to auto or float32"
        )


def prove_row_invariance(step_logits: StepLogits, kv: KVPool, vocab_size: int, max_len: int, max_tokens: int) -> None:
    """Raises StartupError if a row's bits depend on what it is computed with. Writes KV into blocks that no sequence
    owns yet; a small pool or step budget shortens the sequences."""
    size, columns = kv.layout.block_size, kv.num_blocks // kv.layout.groups
    length = min(_LENGTH, max_len, max_tokens // 3, max(1, (columns - 4 * len(_MATE_LENGTHS)) // 3) * size)
    if length <= _LAST:
        raise StartupError("exact mode: the KV pool is too small for its self-test")
    generator = random.Random(0)
    free = iter(range(kv.num_blocks))

    def sequence(count: int) -> tuple[list[int], tuple[int, ...]]:
        tokens = [generator.randrange(vocab_size) for _ in range(count)]
        return tokens, tuple(next(free) for _ in range(kv.layout.blocks_for(count)))

    tokens, batched = sequence(length)
    alone = tuple(next(free) for _ in batched)
    mates = [sequence(min(count, length // 3 + 1)) for count in _MATE_LENGTHS]
    rows = [_row(mate, 0, len(mate), blocks, 1) for mate, blocks in mates]
    together = step_logits(StepPlan(0, (*rows, _row(tokens, 0, length, batched, _LAST))))[-1]
    parts: list[Tensor] = []
    start = 0
    while start < length:
        left = length - _LAST - start
        count = min(_CHUNKS[len(parts) % len(_CHUNKS)], left) if left > 0 else 1
        sampled = int(left <= 0)
        parts += step_logits(StepPlan(len(parts) + 1, (_row(tokens, start, count, alone, sampled),)))
        start += count
    for layer, tensors in enumerate(kv.layers):
        own = slice(kv.layout.places[layer][0], None, kv.layout.groups)  # of each column
        for name, cache in zip(("keys", "values"), tensors, strict=True):
            pieces = (_piece(cache, blocks[own], length) for blocks in (batched, alone))
            _compare(f"{name} of layer {layer}", *pieces)
    _compare("logits", together, torch.cat(parts))


def _row(tokens: list[int], start: int, count: int, blocks: tuple[int, ...], sampled: int) -> Row:
    greedy = SamplingParams(temperature=0.0)
    return Row(SequenceId("self-test"), start, tuple(tokens[start : start + count]), blocks, greedy, sampled)


def _piece(cache: Tensor, blocks: tuple[int, ...], length: int) -> Tensor:
    return cache[list(blocks)].flatten(0, 1)[:length].float()  # torch does not compare FP8


def _compare(subject: str, together: Tensor, alone: Tensor) -> None:
    if not torch.equal(together, alone):
        differing = int((together != alone).flatten(1).any(dim=1).sum())
        raise StartupError(
            f"exact mode: self-test failed: {subject} differ between batched and single computation at {differing} of "
            f"{len(together)} positions; the kernels of this machine are not row-invariant"
        )
