"""Selects how the steps of a model are computed: layer operations, attention, sampling and drafting.

Only CUDA builds of torch include Triton, so modules that use it are imported only for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baton.engine.attention import Attention, FastAttention
from baton.engine.attention_exact import ExactAttention
from baton.engine.attention_native import NativeAttention
from baton.engine.batch import Batch, RowLimits
from baton.engine.block_tables import LINES
from baton.engine.draft_tokens_device import DeviceDraftTokens
from baton.engine.kernels.native import Kernels, choose_kernels
from baton.engine.kv_pool import KVPool
from baton.engine.layers import Rotary, plain
from baton.engine.model import Model, shard_config
from baton.engine.model_native import NativeModel
from baton.engine.options import EngineOptions
from baton.engine.parallel import TPGroup
from baton.engine.runner import Computing
from baton.engine.sampler import chooser, masker
from baton.engine.weights import WeightReader
from baton.models.model_config import AnyConfig, GeneralConfig, ModelConfig


def build_model(
    config: ModelConfig,
    weights: WeightReader,
    group: TPGroup,
    kernels: Kernels | None,
    longest: int,
    options: EngineOptions,
) -> Model | NativeModel:
    """Builds this rank's share of the model: reads and packs its weights. `config` is the whole model's, `longest` the
    most positions of a sequence; `kernels` None means torch's."""
    if kernels is not None:
        return NativeModel(config, weights, group, kernels, longest, options.threads)
    rotary = Rotary(config, longest, weights.dtype, weights.device)
    if weights.device.type == "cuda":
        from baton.engine.kernels.fused import fused

        return Model(config, weights, group, fused(rotary, exact=options.exact))
    return Model(config, weights, group, plain(rotary, exact=options.exact))


def how_to_compute(
    model: Any,
    kv: KVPool,
    config: AnyConfig,
    group: TPGroup,
    longest: int,
    options: EngineOptions,
    dtype: torch.dtype,
) -> Computing:
    """Returns the `Computing` of a model in `dtype`: one that `build_model` built with the same arguments, or a
    TransformersModel."""
    if isinstance(config, GeneralConfig):
        return _of_transformers(model, kv, options, dtype)
    if isinstance(model, NativeModel):
        compute, mask = partial(model.forward, kv), masker(model.kernels)
        pooled, choose = partial(model.forward_pooled, kv), chooser(model.kernels, options.threads)
        if group.size > 1:
            return Computing(compute, choose, mask=mask, compute_pooled=pooled)
        return Computing(
            compute,
            choose,
            mask=mask,
            propose=partial(model.propose, kv),
            compute_in_two=compute,
            compute_pooled=pooled,
        )
    if kv.device.type == "cuda":
        return _on_cuda(model, kv, config, group, longest, options, dtype)
    local, size = shard_config(config, group), kv.layout.block_size
    attention: Attention
    if options.exact:
        attention = ExactAttention(local, size, kv.zero_block, kv.device)
    else:
        attention = FastAttention(size, kv.zero_block, dtype, kv.device)
    # Compiled kernels record no autograd graph: no_grad would only cost their steps time.
    compute = torch.no_grad()(partial(model.forward, kv=kv, attention=attention))
    pooled = torch.no_grad()(partial(model.forward_pooled, kv=kv, attention=attention))
    # In exact mode torch never computes a single row: its kernels may treat a product of one row differently.
    return Computing(compute, min_tokens=2 if options.exact else 1, compute_pooled=pooled)


def _of_transformers(model: Any, kv: KVPool, options: EngineOptions, dtype: torch.dtype) -> Computing:
    """Uses the compiled kernels, else torch's, for attention and sampling; on a GPU torch's for attention."""
    kernels, _ = choose_kernels(options.kernels, kv.device)
    attention: FastAttention | NativeAttention
    attention = fast = FastAttention(kv.layout.block_size, kv.zero_block, dtype, kv.device)
    if kernels is not None:
        attention = NativeAttention(kernels, options.threads, kv.layout.block_size, fast)
    compute = torch.no_grad()(partial(model.forward, kv=kv, attention=attention))
    pooled = torch.no_grad()(partial(model.forward_pooled, kv=kv, attention=attention))
    if kv.device.type == "cuda":
        from baton.engine.kernels.masks import mask_rows
        from baton.engine.kernels.sampling import decide

        return Computing(compute, decide=decide, mask=mask_rows, compute_pooled=pooled)
    if kernels is None:
        return Computing(compute, compute_pooled=pooled)
    return Computing(compute, chooser(kernels, options.threads), mask=masker(kernels), compute_pooled=pooled)


def _on_cuda(
    model: Model,
    kv: KVPool,
    config: ModelConfig,
    group: TPGroup,
    longest: int,
    options: EngineOptions,
    dtype: torch.dtype,
) -> Computing:
    """Uses Triton attention, CUDA graphs for decode steps, and drafting on the device."""
    from baton.engine.attention_flashinfer import FlashInferRows
    from baton.engine.attention_triton import TritonAttention
    from baton.engine.decode_graphs import DecodeGraphs
    from baton.engine.kernels.masks import mask_rows
    from baton.engine.kernels.sampling import decide

    size = kv.layout.block_size
    local = shard_config(config, group)
    paged = FlashInferRows(local, size, dtype, kv.device) if options.attention == "flashinfer" else None
    attention = TritonAttention(local, size, dtype, kv.device, exact=options.exact, paged=paged)
    compute: Callable[[Batch], Tensor] = partial(model.forward, kv=kv, attention=attention)
    prepare: Callable[[], None] | None = None
    limits = RowLimits(size, kv.num_blocks, config.vocab_size, longest)
    # Twice as many lines as rows: in each step those of sequences that ended can be freed.
    tables = limits.new_tables(max(2 * options.decode_rows, LINES))
    if options.decode_rows:
        graphs = DecodeGraphs(model, kv, attention, tables, longest, options.decode_rows, options.decode_lengths)
        compute, prepare = graphs.compute, torch.no_grad()(partial(graphs.capture, config.vocab_size))
    propose = None
    if group.size == 1:
        propose = DeviceDraftTokens(compute, limits, kv.device, decide, tables)
    return Computing(
        torch.no_grad()(compute),
        compute_pooled=torch.no_grad()(partial(model.forward_pooled, kv=kv, attention=attention)),
        decide=decide,
        mask=mask_rows,
        propose=propose,
        prepare=prepare,
        row_lengths=attention.row_lengths,
        tables=tables,
    )
