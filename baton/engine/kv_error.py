"""What storing KV in FP8 costs a model's logits, measured at start: no scale is calibrated, so the model decides."""

from __future__ import annotations

import logging
import random
from typing import NamedTuple

from torch import Tensor

from baton.core.request import SamplingParams, SequenceId
from baton.core.step import Row, StepPlan
from baton.engine.kv_pool import FP8_MAX
from baton.engine.runner import Runner

log = logging.getLogger("baton.engine")
TOKENS = 64


def random_step(runner: Runner, length: int) -> StepPlan:
    """A sequence of random tokens that samples at every position, in the first blocks of the pool."""
    vocabulary, generator = runner.model_config.vocab_size, random.Random(0)
    tokens = tuple(generator.randrange(vocabulary) for _ in range(length))
    blocks = tuple(range(runner.layout.blocks_for(length)))
    return StepPlan(0, (Row(SequenceId("error"), 0, tokens, blocks, SamplingParams(temperature=0.0), length),))


class KVError(NamedTuple):
    """`logits` is the median, over positions, of the error's share of the logits' own spread; `saturated` the share of
    keys and values of this rank that are beyond FP8's range."""

    logits: float
    saturated: float


def median_error(logits: Tensor, expected: Tensor) -> float:
    """The median over positions of |logits - expected| / |expected - its mean|, for [T, vocab]."""
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    return float(((logits - expected).norm(dim=-1) / spread).median())


def report_kv_error(runner: Runner, wide: Runner) -> None:
    """Logs the result of `measure_kv_error`."""
    error = measure_kv_error(runner, wide)
    if error is None:
        return
    log.info(
        "KV in %s: the logits of random tokens differ by %.2f %% of their spread from those with KV in %s",
        runner.facts.kv_dtype,
        100 * error.logits,
        runner.dtype_name,
    )
    if error.saturated:
        log.warning(
            "KV in %s: %.2g %% of keys and values are beyond %g and saturate; --kv-dtype auto keeps them",
            runner.facts.kv_dtype,
            100 * error.saturated,
            FP8_MAX,
        )


def measure_kv_error(runner: Runner, wide: Runner) -> KVError | None:
    """Compares the logits of random tokens of a runner whose KV is in FP8 with those of one that computes the same
    model with KV in the dtype of its computation. Writes KV into blocks that no sequence owns yet; a small pool
    shortens the sequence. Every rank calls it; only the leader gets a result."""
    positions = (runner.layout.positions_in(r.num_blocks) for r in (runner, wide))
    length = min(TOKENS, runner.max_model_len, runner.max_num_tokens, *positions)
    plan = random_step(runner, length)
    blocks = plan.rows[0].block_ids
    logits, expected = (each.step_logits(plan)[0] for each in (runner, wide))
    if not runner.group.leads:
        return None
    groups, places = wide.layout.groups, wide.layout.places
    stored = [
        cache[list(blocks[group::groups])].flatten(0, 1)[:length]
        for (group, _), pair in zip(places, wide.kv.layers, strict=True)
        for cache in pair
    ]
    beyond = sum(int((cache.abs() > FP8_MAX).sum()) for cache in stored)
    return KVError(median_error(logits, expected), beyond / sum(cache.numel() for cache in stored))
