"""The self-check at start that a model which transformers computes may be served over pages, in any chunks and batches.

transformers' own forward pass of a random sequence, whole, without a cache and with its plain attention, is the
reference. The same sequence is computed over pages twice: whole, beside others, and in chunks down to single tokens,
beside others again. A window, softcap, sink, scale, position or reused KV that is lost shows in the logits, and so does
state that is kept beside the KV, or that rows of a step share.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count

import torch
from torch import Tensor

from baton.core.errors import StartupError
from baton.core.request import SamplingParams, SequenceId
from baton.core.step import Row, StepPlan
from baton.engine.runner import Runner

_LENGTH, _MATE_LENGTH = 40, 23
_CHUNKS = (13, 9, 7, 5)  # then single tokens
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Of the median, over positions, of the error's share of the logits' own spread. Measured on 43 architectures, tiny and
random: at most 2e-6 and 0.04. Planted faults (tests/engine/test_transformers.py) are at 0.016 to 1.3: in bfloat16 those
that change a little, such as a lost scale, are below the tolerance."""


def check_against_reference(runner: Runner, reference: Callable[[Tensor], Tensor]) -> None:
    """Raises StartupError if logits over pages differ from those of `reference`, of tokens [T] -> [T, vocab]. Writes KV
    into blocks that no sequence owns yet; a small pool shortens the sequences."""
    generator, size = random.Random(0), runner.layout.block_size
    length = min(_LENGTH, runner.max_model_len, runner.max_num_tokens // 2, runner.num_blocks // 4 * size)
    if length < 4:
        raise StartupError(f"the self-check needs 16 KV blocks, not {runner.num_blocks}: raise --kv-memory-gib")
    tokens, mate = (
        [generator.randrange(runner.model_config.vocab_size) for _ in range(n)]
        for n in (length, min(_MATE_LENGTH, length))
    )
    free = count()
    num_blocks = runner.layout.blocks_for(length)
    whole, parts, of_mate, again = (tuple(next(free) for _ in range(num_blocks)) for _ in range(4))
    expected = reference(torch.tensor(tokens, device=runner.kv.device)).cpu()
    beside = _row("mate", mate, 0, len(mate), of_mate)
    together = runner.step_logits(StepPlan(0, (beside, _row("whole", tokens, 0, length, whole))))[1]
    chunks: list[Tensor] = []
    start = 0
    for step in range(length):
        chunk = min(_CHUNKS[step] if step < len(_CHUNKS) else 1, length - start)
        if chunk == 0:
            break
        mates = _row("other mate", mate, 0, min(step % 5 + 1, len(mate)), again)
        row = _row("parts", tokens, start, chunk, parts)
        rows = (mates, row) if step % 2 else (row, mates)
        chunks.append(runner.step_logits(StepPlan(step + 1, rows))[step % 2])
        start += chunk
    for how, logits in (("whole", together), ("in chunks", torch.cat(chunks))):
        error = median_error(logits, expected)
        if not error < _TOLERANCE[runner.dtype_name]:
            raise StartupError(
                f"self-check failed: a sequence computed {how} over paged KV differs from transformers' own result by"
                f" {error:.2g} of the logits' spread, more than {_TOLERANCE[runner.dtype_name]:g}: this model is not"
                " served"
            )


def median_error(logits: Tensor, expected: Tensor) -> float:
    """The median over positions of |logits - expected| / |expected - its mean|, for [T, vocab]."""
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    return float(((logits - expected).norm(dim=-1) / spread).median())


def _row(name: str, tokens: list[int], start: int, length: int, blocks: tuple[int, ...]) -> Row:
    greedy = SamplingParams(temperature=0.0)
    return Row(SequenceId(name), start, tuple(tokens[start : start + length]), blocks, greedy, length)
