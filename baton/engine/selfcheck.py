"""The self-check at start that a model which transformers computes may be served over pages, in any chunks and batches.

transformers' own forward pass of a random sequence, whole, without a cache and with its plain attention, is the
reference. The same sequence is computed over pages twice: whole, beside others, and in chunks down to single tokens,
beside others again. A window, softcap, sink, scale, position or reused KV that is lost shows in the logits, and so does
state that is kept beside the KV, or that rows of a step share. In bfloat16, whose rounding hides a fault that changes
little, all of it is done in float32, too.

Rounding alone may change a model's logits by more than any fixed limit: where two experts are nearly tied, another one
computes the token. How much it does is known, since the reference is computed in both dtypes. So in bfloat16 a result
beyond the limit passes if it is about as near to the reference in float32 as the reference's own in bfloat16 is.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import count

import torch
from torch import Tensor

from baton.core.errors import StartupError
from baton.core.kv_layout import KVLayout
from baton.core.request import SamplingParams, SequenceId
from baton.core.step import Row, StepPlan
from baton.engine.kv_error import median_error
from baton.engine.runner import Runner

log = logging.getLogger("baton.engine")

_LENGTH, _MATE_LENGTH = 40, 23
_SEQUENCES = 4
_CHUNKS = (13, 9, 7, 5)  # then single tokens
_FEW_CHUNKS = (13, 17, 9)  # in float32 each step converts all weights
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Of the median, over positions, of the error's share of the logits' own spread. Measured on 43 architectures, tiny and
random: at most 2e-6 and 0.04. Planted faults (tests/engine/test_transformers.py) are at 0.016 to 1.3."""
_OF_ROUNDING = 1.5
"""Times the error of the reference's own rounding."""


def num_blocks(layout: KVLayout) -> int:
    """Returns how many blocks a check of full length takes."""
    return _SEQUENCES * layout.blocks_for(_LENGTH)


def check_in_float32(
    runner: Runner, reference: Callable[[Tensor], Tensor], in_float32: AbstractContextManager[None]
) -> Tensor | None:
    """Like `check_against_reference`, for a runner whose KV is in float32 and whose model computes in float32 within
    `in_float32`. A model whose own code fixes another dtype cannot: that is logged, and the result is None."""
    try:
        with in_float32:
            return check_against_reference(runner, reference, _FEW_CHUNKS)
    except RuntimeError as error:  # of torch
        log.warning("no self-check in float32, only in %s: %s", runner.dtype_name, str(error).splitlines()[0][:200])
        return None


def check_against_reference(
    runner: Runner,
    reference: Callable[[Tensor], Tensor],
    chunks_of: Sequence[int] = _CHUNKS,
    in_float32: Tensor | None = None,
) -> Tensor:
    """Returns the logits of `reference`, of tokens [T] -> [T, vocab]; `in_float32` are those that `check_in_float32`
    returned. Raises StartupError, on the leader, if logits over pages differ. Every rank calls it. Writes KV into
    blocks that no sequence owns yet; a small pool shortens the sequences."""
    generator, tolerance = random.Random(0), _TOLERANCE[runner.kv.layout.layers[0].dtype]
    positions = runner.layout.positions_in(runner.num_blocks // _SEQUENCES)
    length = min(_LENGTH, runner.max_model_len, runner.max_num_tokens // 2, positions)
    if length < 4:
        needed = 16 * runner.layout.groups
        raise StartupError(f"the self-check needs {needed} KV blocks, not {runner.num_blocks}: raise --kv-memory-gib")
    tokens, mate = (
        [generator.randrange(runner.model_config.vocab_size) for _ in range(n)]
        for n in (length, min(_MATE_LENGTH, length))
    )
    free = count()
    each = runner.layout.blocks_for(length)
    whole, parts, of_mate, again = (tuple(next(free) for _ in range(each)) for _ in range(_SEQUENCES))
    expected = reference(torch.tensor(tokens, device=runner.kv.device)).cpu()
    beside = _row("mate", mate, 0, len(mate), of_mate)
    together = runner.step_logits(StepPlan(0, (beside, _row("whole", tokens, 0, length, whole))))[1]
    chunks: list[Tensor] = []
    start = 0
    for step in range(length):
        chunk = min(chunks_of[step] if step < len(chunks_of) else 1, length - start)
        if chunk == 0:
            break
        mates = _row("other mate", mate, 0, min(step % 5 + 1, len(mate)), again)
        row = _row("parts", tokens, start, chunk, parts)
        rows = (mates, row) if step % 2 else (row, mates)
        chunks.append(runner.step_logits(StepPlan(step + 1, rows))[step % 2])
        start += chunk
    if not runner.group.leads:
        return expected  # it has computed its part
    for how, logits in (("whole", together), ("in chunks", torch.cat(chunks))):
        error = median_error(logits, expected)
        if error < tolerance:
            continue
        in_both = ""
        if in_float32 is not None:
            ours, own = (median_error(each, in_float32[:length]) for each in (logits, expected))
            if ours < _OF_ROUNDING * own:
                log.info(
                    "self-check: in %s rounding moves transformers' own logits of random tokens by %.2g of their"
                    " spread, and those %s by %.2g",
                    runner.dtype_name,
                    own,
                    how,
                    ours,
                )
                continue
            in_both = f" ({ours:.2g} from its result in float32, itself {own:.2g})"
        raise StartupError(
            f"self-check failed: a sequence computed {how} over paged KV differs from transformers' own result by"
            f" {error:.2g} of the logits' spread, more than {tolerance:g}{in_both}: this model is not served"
        )
    return expected


def _row(name: str, tokens: list[int], start: int, length: int, blocks: tuple[int, ...]) -> Row:
    greedy = SamplingParams(temperature=0.0)
    return Row(SequenceId(name), start, tuple(tokens[start : start + length]), blocks, greedy, length)
