"""The steps that a runner computes before its first request: so that kernels are compiled and loaded, and memory is
measured and reserved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from baton.core.errors import StartupError
from baton.core.request import POOLINGS, Pooling, SamplingParams, SequenceId, TokenBias
from baton.core.step import History, Row, StepPlan
from baton.engine.device import is_gpu
from baton.engine.runner import Computing, Runner


def run_largest(runner: Runner, computing: Computing, samples: int) -> None:
    """Captures what the runner captures, then computes the step that takes most memory."""
    if computing.prepare is not None:
        computing.prepare()
    runner.step(largest_step(runner, samples))


def warm_up(runner: Runner, computing: Computing, samples: int) -> None:
    """Runs one prefill and one decode step, and on a GPU steps of every kind and the largest, so that kernels are
    compiled and loaded, and memory is reserved, before the first request. They write KV to blocks that no sequence owns
    yet. Raises StartupError if the largest step does not fit beside the KV."""
    length = min(runner.layout.block_size, runner.max_model_len)
    for start, tokens in ((0, (0,) * length), (length - 1, (0,))):
        runner.step(StepPlan(0, (_row(runner, start, tokens, SamplingParams(temperature=0.0), 1),)))
    if not is_gpu(runner.kv.device):
        return
    try:
        for plan in (largest_step(runner, samples), *load_kernels(runner, computing.row_lengths)):
            runner.step(plan)
    except torch.OutOfMemoryError:
        raise StartupError(
            f"{runner.kv.device}: a step of {runner.max_num_tokens} tokens does not fit beside the KV; lower"
            " --kv-memory-gib, --gpu-share or --step-tokens"
        ) from None


def _row(
    runner: Runner, start: int, tokens: tuple[int, ...], sampling: SamplingParams, samples: int, pooling: Pooling = ""
) -> Row:
    """A row of no sequence. All positions share one block, so that it fits into a pool of any size."""
    blocks = (0,) * runner.layout.blocks_for(start + len(tokens))
    return Row(SequenceId("warm-up"), start, tokens, blocks, sampling, samples, pooling=pooling)


def largest_step(runner: Runner, samples: int) -> StepPlan:
    """As many tokens as a step may have, in the longest possible rows, all of them pooled; the first is at the end of
    the longest context and samples `samples` times, if it is that long."""
    longest, sampling = runner.max_model_len, SamplingParams(temperature=0.0)
    first = min(runner.max_num_tokens, longest)
    rows = [_row(runner, longest - first, (0,) * first, sampling, min(first, samples), "mean")]
    for done in range(first, runner.max_num_tokens, longest):
        rows.append(_row(runner, 0, (0,) * min(longest, runner.max_num_tokens - done), sampling, 1, "mean"))
    return StepPlan(0, tuple(rows))


def load_kernels(runner: Runner, row_lengths: Sequence[int] = (1,)) -> list[StepPlan]:
    """Steps of every kind of a first request, for a GPU: CUDA loads a kernel at its first use, and may block for that
    until a posted receive completes. Rows of each of `row_lengths`, for which attention uses different kernels, and
    draws with biases, masks and penalties, and vectors."""
    sampling = SamplingParams(
        temperature=0.8,
        top_p=0.9,
        top_k=5,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        logit_bias=(TokenBias(0, 1.0),),
        bad_words=((1,),),
        logprobs=1,
    )
    longest = runner.max_model_len
    lengths = [min(length, longest, runner.max_num_tokens) for length in row_lengths]
    steps = [StepPlan(0, (_row(runner, 0, (0,) * length, SamplingParams(), 1),)) for length in lengths]
    pooled = [StepPlan(0, (_row(runner, 0, (0,) * lengths[-1], SamplingParams(), 0, each),)) for each in POOLINGS]
    start = max(longest - 2, 0)
    history = History((0,) * start, (0,), ())
    drawn = replace(_row(runner, start, (0,), sampling, 1), output_index=1, history=history)
    greedy = replace(_row(runner, start, (0,), SamplingParams(temperature=0.0), 1), sequence_id=SequenceId("other"))
    return [*steps, StepPlan(0, (drawn, greedy)), StepPlan(0, (greedy,)), *pooled]
