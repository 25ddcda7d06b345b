"""Steps before the first request, so that kernels are compiled and loaded by then. They leave KV in blocks that nobody
owns yet."""

from __future__ import annotations

from baton.core.request import SamplingParams, SequenceId, TokenBias
from baton.core.step import History, Row, StepPlan
from baton.engine.runner import Runner

_LONG_ROW = 128
"""Tokens of a row that is computed as prompts are."""


def warm_up(runner: Runner) -> None:
    """One prefill and one decode step; on a GPU steps of every kind."""
    length = min(runner.layout.block_size, runner.max_model_len)
    for start, tokens in ((0, (0,) * length), (length - 1, (0,))):
        row = Row(SequenceId("warm-up"), start, tokens, (0,), SamplingParams(temperature=0.0), num_sampled=1)
        runner.step(StepPlan(0, (row,)))
    if runner.launches_ahead:
        for plan in load_kernels(runner):
            runner.step(plan)


def load_kernels(runner: Runner) -> list[StepPlan]:
    """Steps of every kind of a first request, for a GPU: it loads a kernel when it is first used, and may stop for that
    until a receive that somebody has posted is served. A long row, and draws that use every way of changing logits."""
    length = max(min(_LONG_ROW, runner.max_model_len - 2), 1)
    blocks = tuple(range(min(runner.num_blocks, runner.layout.blocks_for(length + 2))))
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
    long = Row(SequenceId("warm-up"), 0, (0,) * length, blocks, SamplingParams(), 1)
    history = History((0,) * length, (0,), ())
    drawn = Row(SequenceId("warm-up"), length, (0,), blocks, sampling, 1, 1, history)
    greedy = Row(SequenceId("other"), length, (0,), blocks, SamplingParams(temperature=0.0), 1, 1)
    return [StepPlan(0, (long,)), StepPlan(0, (drawn, greedy)), StepPlan(0, (greedy,))]
