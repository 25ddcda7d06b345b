"""Loads a model on one rank: `load_runner`, stage by stage.

check (the options, this machine and this checkpoint), connect (the ranks compare options and connect), load (weights),
kv (as many blocks as fit), warm-up, capture (on a GPU), self-test (in exact mode).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from baton.core.errors import StartupError
from baton.core.ranks import Ranks
from baton.core.request import SamplingParams, SequenceId, TokenBias
from baton.core.reshard import local_layout
from baton.core.step import History, Row, StepPlan
from baton.engine.checkpoint import Checkpoint, model_digest, read_model_config
from baton.engine.computing import build_model, how_to_compute
from baton.engine.device import choose_device, choose_dtype
from baton.engine.grammars import Grammars
from baton.engine.kernels.native import choose_kernels
from baton.engine.kv_pool import KVPool
from baton.engine.memory import kv_budget, plan_blocks
from baton.engine.options import EngineOptions
from baton.engine.parallel import LOAD_TIMEOUT_S, TPGroup, connect
from baton.engine.quantize import check_quantize
from baton.engine.rank_options import agree, must_agree
from baton.engine.runner import Runner
from baton.engine.selftest import check_exact, prove_row_invariance
from baton.engine.weights import WeightReader

OnStage = Callable[[str, float], None]
_LONG_ROW = 128
"""Tokens of a row that is computed like a prompt."""


def load_runner(
    options: EngineOptions,
    on_stage: OnStage | None = None,
    *,
    ranks: Ranks | None = None,
    store: Any = None,
    tensors: Checkpoint | None = None,
) -> Runner:
    """Loads a checkpoint onto this machine; `on_stage` is called with each finished stage and its seconds. Several
    `ranks` load their shares at the same time and connect through `store`. With `tensors` the weights come from there,
    and only the config is read from the model's directory: for benchmarks of shapes without a checkpoint on disk.

    Raises StartupError, with one plain line, if the directory or the options are invalid or do not fit the machine,
    RankLost when another rank fails.
    """
    torch.set_num_threads(options.threads)
    ranks = ranks or Ranks()
    device = choose_device(options.device, options.exact, ranks.local_rank)
    dtype = choose_dtype(options.dtype, device, options.exact, options.kernels)
    check_quantize(options.quantize, device)
    int8 = options.quantize == "int8"
    with _stage("check", on_stage), torch.no_grad():
        config = read_model_config(options.model_dir)
        share = TPGroup(ranks.rank, ranks.size)  # only divides the model; `connect` below returns the connected group
        checkpoint = Checkpoint(options.model_dir) if tensors is None else tensors
        weights = WeightReader(checkpoint, config, share, getattr(torch, dtype), device, int8=int8)
        longest = config.longest(options.max_model_len)
        digest = model_digest(options.model_dir) if tensors is None else ""
    kernels, kernels_name = choose_kernels(options.kernels, device)
    if int8 and kernels is None:
        raise StartupError(f"quantize int8 needs compiled kernels, not {kernels_name}: set quantize to none")
    if options.exact:
        check_exact(options.block_size, dtype, kernels, kernels_name)
    level = "torch" if kernels is None else kernels.level
    agreed = must_agree(options, device=device, dtype=dtype, kernels=level, digest=digest, max_model_len=longest)
    with _stage("connect", on_stage if ranks.size > 1 else None):
        agree(store, ranks, agreed, LOAD_TIMEOUT_S)
        group = connect(store, ranks, device, options.host)
    with _stage("load", on_stage), torch.no_grad():
        model = build_model(config, weights, group, kernels, longest, options)
    with _stage("kv", on_stage), torch.no_grad():
        layout = local_layout(config.kv_layout(options.block_size, dtype), ranks.size, ranks.rank)
        blocks = plan_blocks(layout, kv_budget(options, layout, longest, device, ranks), options.max_model_len)
        kv = KVPool(layout, group.minimum(blocks, "KV blocks"), device)
    grammars = None
    if group.leads and tensors is None:
        grammars = Grammars.load(options.model_dir, config.vocab_size)
    computing = how_to_compute(model, kv, config, group, longest, options)
    runner = Runner(
        computing,
        config,
        kv,
        options,
        kernels=kernels_name,
        max_model_len=min(longest, kv.num_blocks * options.block_size),
        digest=digest,
        group=group,
        parameter_bytes=weights.bytes_read,
        grammars=grammars,
    )
    with _stage("warm-up", on_stage):
        warm_up(runner)
    if computing.prepare is not None:
        with _stage("capture", on_stage):
            computing.prepare()
    if options.exact:
        with _stage("self-test", on_stage):
            limits = (config.vocab_size, runner.max_model_len, options.max_num_tokens)
            prove_row_invariance(runner.step_logits, kv, *limits)
    group.barrier("end of loading")
    return runner


@contextmanager
def _stage(name: str, on_stage: OnStage | None) -> Iterator[None]:
    started = time.perf_counter()
    yield
    if on_stage is not None:
        on_stage(name, time.perf_counter() - started)


def warm_up(runner: Runner) -> None:
    """Runs one prefill and one decode step, and on a GPU steps of every kind, so that kernels are compiled and loaded
    before the first request. They write KV to blocks that no sequence owns yet."""
    length = min(runner.layout.block_size, runner.max_model_len)
    for start, tokens in ((0, (0,) * length), (length - 1, (0,))):
        row = Row(SequenceId("warm-up"), start, tokens, (0,), SamplingParams(temperature=0.0), num_sampled=1)
        runner.step(StepPlan(0, (row,)))
    if runner.launches_ahead:
        for plan in load_kernels(runner):
            runner.step(plan)


def load_kernels(runner: Runner) -> list[StepPlan]:
    """Steps of every kind of a first request, for a GPU: CUDA loads a kernel at its first use, and may block for that
    until a posted receive completes. A long row, and draws with biases, masks and penalties."""
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
