"""What computes the steps of a loaded model: which attention, graphs or not, what samples tokens and what drafts
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from baton.core.model_config import ModelConfig
from baton.engine.attention import Attention, FastAttention
from baton.engine.attention_exact import ExactAttention
from baton.engine.batch import Batch, Limits
from baton.engine.draft_tokens_device import DeviceDraftTokens
from baton.engine.kv_pool import KVPool
from baton.engine.model import Model, shard_config
from baton.engine.model_native import NativeModel
from baton.engine.parallel import TPGroup
from baton.engine.sampler import Choose
from baton.engine.sampler_device import choose_on_device

Propose = Callable[[Batch, Sequence[int]], list[list[int]]]
ComputeInTwo = Callable[[Batch, int, Callable[[], None]], Tensor]


@dataclass(frozen=True, slots=True)
class Computing:
    """`compute` gives the logits [S, vocab] of a batch; `choose` tokens from them, `propose` a draft model's in one
    call; `compute_in_two` is `compute` that calls back when so many layers have written their KV. None where the plain
    way is the only one. `prepare` is called once when all is loaded: it makes what must be there before the first
    request."""

    compute: Callable[[Batch], Tensor]
    choose: Choose | None
    propose: Propose | None
    compute_in_two: ComputeInTwo | None = None
    prepare: Callable[[], None] | None = None


def how_to_compute(
    model: Model | NativeModel,
    kv: KVPool,
    config: ModelConfig,
    group: TPGroup,
    choose: Choose | None,
    *,
    exact: bool,
    longest: int,
    decode_rows: int = 0,
) -> Computing:
    """`config` is the whole model's, `choose` that of compiled kernels, `longest` the most positions of a sequence,
    `decode_rows` the most sequences of a decode step, 0 where there are none."""
    if isinstance(model, NativeModel):
        if group.size > 1:
            return Computing(partial(model.forward, kv=kv), choose, None)

        def in_two(batch: Batch, layers: int, on_first: Callable[[], None]) -> Tensor:
            return model.forward(batch, kv, layers, on_first)

        return Computing(partial(model.forward, kv=kv), choose, partial(model.propose, kv=kv), in_two)
    device, size = kv.storage[0][0].device, kv.layout.block_size
    if device.type != "cuda":
        local = shard_config(config, group)
        keys, _ = kv.storage[0]
        attention: Attention
        if exact:
            attention = ExactAttention(local, size, kv.zero_block, device)
        else:
            attention = FastAttention(local, size, kv.zero_block, keys.dtype, device)
        # Compiled kernels make no graph of gradients: there it would only cost their steps time.
        return Computing(torch.no_grad()(partial(model.forward, kv=kv, attention=attention)), None, None)
    return _on_cuda(model, kv, config, group, longest, decode_rows)


def _on_cuda(
    model: Model, kv: KVPool, config: ModelConfig, group: TPGroup, longest: int, decode_rows: int
) -> Computing:
    # Triton comes with torch's CUDA builds alone.
    from baton.engine.attention_triton import TritonAttention
    from baton.engine.decode_graphs import DecodeGraphs

    keys, _ = kv.storage[0]
    device, size = keys.device, kv.layout.block_size
    longest = min(longest, kv.num_blocks * size)
    attention = TritonAttention(shard_config(config, group), size, keys.dtype, device)
    compute: Callable[[Batch], Tensor] = partial(model.forward, kv=kv, attention=attention)
    prepare: Callable[[], None] | None = None
    if decode_rows:
        graphs = DecodeGraphs(model, kv, attention, longest, decode_rows)
        compute, prepare = graphs.compute, torch.no_grad()(partial(graphs.capture, config.vocab_size))
    propose = None
    if group.size == 1:
        propose = DeviceDraftTokens(compute, Limits(size, kv.num_blocks, config.vocab_size, longest), device)
    return Computing(torch.no_grad()(compute), choose_on_device, propose, prepare=prepare)
