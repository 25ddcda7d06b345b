"""Loads a model on one rank: `load_runner`, stage by stage.

check (the options, this machine and this checkpoint), connect (the ranks compare options and connect), load (weights),
kv (as many blocks as fit), capture (on a GPU), warm-up, self-test (in exact mode).

On a GPU the size of the KV pool depends on what the largest step takes: captures and that step run once beside a pool
of one block, and are measured. Captures empty torch's cache of free memory, so the warm-up, which fills it, comes last.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from baton.core.compatibility import PROTOCOL_VERSION, Compatibility
from baton.core.cores import ranges
from baton.core.edge_kinds import choose_edges
from baton.core.errors import StartupError
from baton.core.kv_layout import DType, KVLayout, stored_dtype, stored_layers
from baton.core.model_config import GeneralConfig, ModelConfig
from baton.core.ranks import Ranks
from baton.core.request import POOLINGS, Pooling, SamplingParams, SequenceId, TokenBias
from baton.core.reshard import local_layout
from baton.core.step import History, Row, StepPlan
from baton.core.window import STEPS_AHEAD, Window
from baton.engine.activation_error import report_activation_error
from baton.engine.adapters import Adapters
from baton.engine.attention_flashinfer import use_flashinfer
from baton.engine.checkpoint import Checkpoint, model_digest, read_model_config
from baton.engine.computing import build_model, how_to_compute
from baton.engine.device import check_capability, check_triton, choose_device, choose_dtype
from baton.engine.grammars import Grammars
from baton.engine.kernels.native import Kernels, choose_kernels
from baton.engine.kv_error import TOKENS as KV_ERROR_TOKENS
from baton.engine.kv_error import report_kv_error
from baton.engine.kv_pool import KVPool
from baton.engine.memory import kv_budget, peak_bytes, plan_blocks
from baton.engine.model_native import NativeModel
from baton.engine.options import EngineOptions
from baton.engine.parallel import LOAD_TIMEOUT_S, TPGroup, connect
from baton.engine.quantize import check_quantize
from baton.engine.rank_options import RankOptions, check_ranks
from baton.engine.runner import Computing, Runner
from baton.engine.safetensors_files import read_small
from baton.engine.selfcheck import check_against_reference, check_in_float32, num_blocks
from baton.engine.selftest import check_exact, prove_row_invariance
from baton.engine.transformers_path import check_options, transformers_model
from baton.engine.weights import WeightReader

OnStage = Callable[[str, float], None]


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
    device = choose_device(options.device, ranks.local_rank)
    dtype = choose_dtype(options.dtype, device, options.exact, options.kernels)
    kv_dtype = stored_dtype(options.kv_dtype, dtype)
    check_quantize(options.quantize, device)
    if is_gpu(device):
        check_triton()
    with _stage("check", on_stage), torch.no_grad():
        config = read_model_config(options.model_dir, options.model_impl)
        longest = config.longest(options.max_model_len)
        kernels, kernels_name = choose_kernels(options.kernels, device)
        if isinstance(config, GeneralConfig):
            check_options(options, kernels)
            if options.exact:
                check_exact(options.block_size, dtype, kernels_name, compiled=kernels is not None)
                torch.set_num_threads(1)  # torch computes the last elements of each thread's share in another way
            module = transformers_model()
            load = partial(
                module.load,
                options.model_dir,
                longest,
                dtype,
                device,
                config.vocab_size,
                expert_parallel=options.expert_parallel,
                kernels=kernels,
                threads=options.threads,
                exact=options.exact,
            )
            in_dtype = KVLayout(options.block_size, ())  # known when the model is loaded
            kernels_name = f"transformers {module.VERSION}, {kernels_name}"
        else:
            if is_gpu(device):
                check_capability(device)
            if options.expert_parallel:
                raise StartupError(f"--expert-parallel: the architecture of {options.model_dir.name} has no experts")
            weights = _open_weights(options, config, ranks, device, dtype, tensors, kernels, kernels_name)
            in_dtype = config.kv_layout(options.block_size, dtype)
        flashinfer = use_flashinfer(options, config, dtype, kv_dtype, device)
        options = replace(options, attention="flashinfer" if flashinfer else "triton")
    level = "torch" if kernels is None else kernels.level
    if options.borrow_cores:
        if kernels is None or ranks.size > 1 or isinstance(config, GeneralConfig):
            raise StartupError("--borrow-cores: only a worker of one rank with compiled kernels can compute on them")
        kernels.borrow(options.borrow_cores)
        kernels_name += f" borrowing cores {ranges(options.borrow_cores)}"
    facts = Compatibility(
        protocol_version=PROTOCOL_VERSION,
        code_version=options.version,
        exact=options.exact,
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantize=options.quantize,
        model_impl="transformers" if isinstance(config, GeneralConfig) else "baton",
        edge_kind=choose_edges(options.edge_kind, device.type),
        config_digest=_digest(options.model_dir / "config.json"),
        model_digest=model_digest(options.model_dir) if tensors is None else "",
        vocab_size=config.vocab_size,
        max_model_len=longest,
        layout=replace(in_dtype, layers=stored_layers(in_dtype.layers, options.kv_dtype)),
        tokenizer_digest=_digest(options.model_dir / "tokenizer.json"),
    )
    with _stage("connect", on_stage if ranks.size > 1 else None):
        int8 = not isinstance(config, GeneralConfig) and weights.int8_activations
        ours = RankOptions.of(options, facts, device.type, level, int8_activations=int8)
        check_ranks(store, ranks, ours, LOAD_TIMEOUT_S)
        group = connect(store, ranks, device, options.host)
    classifier = None
    if isinstance(config, GeneralConfig):
        with _stage("load", on_stage), torch.no_grad():
            weights = model = load(group)
        in_dtype = KVLayout(options.block_size, model.recorded.storages)
        facts = replace(facts, layout=replace(in_dtype, layers=stored_layers(in_dtype.layers, options.kv_dtype)))
    else:
        with _stage("load", on_stage), torch.no_grad():
            model = build_model(config, weights, group, kernels, longest, options)
            if isinstance(model, NativeModel) and model.int8_linears:
                kernels_name += f", activations in int8 at {model.int8_linears} matrices in Q8_0"
            classifier = weights.classifier() if config.num_labels and group.leads else None
    max_samples = max(1, options.decode_rows * options.decode_lengths[-1])  # samples of a step
    local = local_layout(facts.layout, ranks.size, ranks.rank)

    def make_runner(
        kv: KVPool, max_model_len: int, grammars: Grammars | None = None, computed: DType = dtype
    ) -> tuple[Runner, Computing]:
        computing = how_to_compute(
            model, kv, config, group, min(longest, max_model_len), options, getattr(torch, computed)
        )
        runner = Runner(
            computing,
            config,
            kv,
            options,
            kernels=kernels_name,
            max_model_len=min(longest, max_model_len),
            facts=facts,
            group=group,
            parameter_bytes=weights.bytes_read,
            grammars=grammars,
            classifier=classifier,
            adapters=Adapters(model, config, group, torch.empty(0, dtype=getattr(torch, dtype), device=device)),
        )
        return runner, computing

    with _stage("kv", on_stage), torch.no_grad():
        step_bytes = 0
        if is_gpu(device):
            step_bytes = peak_bytes(
                device, lambda: run_largest(*make_runner(KVPool(local, 1, device), longest), max_samples)
            )
        budget = kv_budget(options, local, longest, device, ranks, dtype, step_bytes)
        fitting = plan_blocks(local, budget, options.max_model_len, STEPS_AHEAD * options.max_num_tokens)
        kv = KVPool(local, group.minimum(fitting, "KV blocks"), device)
    grammars = None
    if group.leads and tensors is None:
        grammars = Grammars.load(options.model_dir, config.vocab_size)
    held = Window.of(facts.layout).max_tokens(kv.num_blocks, 1)  # more than the pool has if all layers have a window
    runner, computing = make_runner(kv, held, grammars)
    if computing.prepare is not None:
        with _stage("capture", on_stage):
            computing.prepare()
    with _stage("warm-up", on_stage):
        warm_up(runner, computing, max_samples)
    if options.exact:
        with _stage("self-test", on_stage):
            limits = (config.vocab_size, runner.max_model_len, options.max_num_tokens)
            prove_row_invariance(runner.step_logits, kv, *limits)
    if isinstance(model, NativeModel) and model.int8_linears:
        with _stage("activation error", on_stage), torch.no_grad():
            report_activation_error(runner, model)
    wide = runner
    if kv_dtype != dtype:
        unrounded = local_layout(in_dtype, ranks.size, ranks.rank)
        few = max(num_blocks(unrounded), unrounded.blocks_for(KV_ERROR_TOKENS))
        wide, _ = make_runner(KVPool(unrounded, few, device), unrounded.positions_in(few))
    if isinstance(config, GeneralConfig):
        with _stage("self-check", on_stage), torch.no_grad():
            in_float32 = None
            if dtype != "float32":
                layers = tuple(replace(layer, dtype="float32") for layer in local.layers)
                pool = KVPool(KVLayout(options.block_size, layers), num_blocks(local), device)
                checked, _ = make_runner(pool, pool.layout.positions_in(pool.num_blocks), computed="float32")
                in_float32 = check_in_float32(checked, model.reference, model.in_float32())
            check_against_reference(wide, model.reference, in_float32=in_float32)
    if wide is not runner:
        with _stage("kv error", on_stage), torch.no_grad():
            report_kv_error(runner, wide)
    group.barrier("end of loading")
    return runner


def _open_weights(
    options: EngineOptions,
    config: ModelConfig,
    ranks: Ranks,
    device: torch.device,
    dtype: DType,
    tensors: Checkpoint | None,
    kernels: Kernels | None,
    kernels_name: str,
) -> WeightReader:
    """Returns the verified weights of one rank, of which none is read yet. Raises StartupError."""
    share = TPGroup(ranks.rank, ranks.size)  # only divides the model; `connect` returns the connected group
    checkpoint = Checkpoint(options.model_dir) if tensors is None else tensors
    weights = WeightReader(checkpoint, config, share, getattr(torch, dtype), device, quantized=options.quantize)
    if options.quantize == "int8" and kernels is None:
        raise StartupError(f"quantize int8 needs compiled kernels, not {kernels_name}: set quantize to none")
    blocks = kernels is not None and kernels.computes_blocks and dtype == "bfloat16"
    if options.quantize == "int4" and not blocks:
        raise StartupError(
            f"quantize int4 needs dtype bfloat16 and kernels avx512_bf16 or amx, not {dtype} and {kernels_name}: set"
            " quantize to int8 or none"
        )
    weights.in_blocks = blocks and options.quantize != "int8"
    if options.activations == "auto" and not options.exact and kernels is not None and options.quantize == "none":
        weights.int8_activations = blocks and kernels.computes_int8_activations and checkpoint.in_gguf
    if options.exact and not is_gpu(device):
        check_exact(options.block_size, dtype, kernels_name, compiled=kernels is not None)
    return weights


@contextmanager
def _stage(name: str, on_stage: OnStage | None) -> Iterator[None]:
    started = time.perf_counter()
    yield
    if on_stage is not None:
        on_stage(name, time.perf_counter() - started)


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


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


def _digest(path: Path) -> str:
    """Returns the SHA-256 of a file; empty if there is none."""
    return hashlib.sha256(read_small(path)).hexdigest() if path.exists() else ""
