"""What computes the steps of a model: with which arithmetic and attention, and what samples and drafts tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from baton.core.model_config import ModelConfig
from baton.engine.attention import Attention, FastAttention
from baton.engine.attention_exact import ExactAttention
from baton.engine.batch import Batch
from baton.engine.kernels.native import Kernels
from baton.engine.kv_pool import KVPool
from baton.engine.layers import Rotary, plain
from baton.engine.model import Model, shard_config
from baton.engine.model_native import NativeModel
from baton.engine.options import EngineOptions
from baton.engine.parallel import TPGroup
from baton.engine.runner import Computing
from baton.engine.sampler_native import chooser, masker
from baton.engine.weights import WeightReader


def build_model(
    config: ModelConfig,
    weights: WeightReader,
    group: TPGroup,
    kernels: Kernels | None,
    longest: int,
    options: EngineOptions,
) -> Model | NativeModel:
    """This rank's share of the model, its weights read and packed. `config` is the whole model's, `longest` the most
    positions of a sequence; `kernels` None are torch's."""
    if kernels is not None:
        return NativeModel(config, weights, group, kernels, longest, weights.dtype, options.threads)
    rotary = Rotary(config, longest, weights.dtype, weights.device)
    if weights.device.type == "cuda":
        from baton.engine.kernels.fused import fused  # Triton comes with torch's CUDA builds alone

        return Model(config, weights, group, fused(rotary))
    return Model(config, weights, group, plain(rotary, exact=options.exact))


def how_to_compute(
    model: Model | NativeModel,
    kv: KVPool,
    config: ModelConfig,
    group: TPGroup,
    kernels: Kernels | None,
    longest: int,
    options: EngineOptions,
) -> Computing:
    """Of a model as `build_model` made it, with the same arguments."""
    if isinstance(model, NativeModel):
        choose = None if kernels is None else chooser(kernels, options.threads)
        mask = None if kernels is None else masker(kernels)
        compute = partial(model.forward, kv=kv)
        if group.size > 1:
            return Computing(compute, choose, mask=mask)

        def in_two(batch: Batch, layers: int, on_first: Callable[[], None]) -> Tensor:
            return model.forward(batch, kv, layers, on_first)

        return Computing(compute, choose, mask=mask, propose=partial(model.propose, kv=kv), compute_in_two=in_two)
    if kv.device.type == "cuda":
        from baton.engine.computing_cuda import on_cuda  # as above

        return on_cuda(model, kv, config, group, longest, options.decode_rows)
    local, size = shard_config(config, group), kv.layout.block_size
    attention: Attention
    if options.exact:
        attention = ExactAttention(local, size, kv.zero_block, kv.device)
    else:
        attention = FastAttention(local, size, kv.zero_block, kv.storage[0][0].dtype, kv.device)
    # Compiled kernels make no graph of gradients: there it would only cost their steps time.
    return Computing(torch.no_grad()(partial(model.forward, kv=kv, attention=attention)))
