"""What computes the steps of a model on CUDA: Triton's attention, decode steps as graphs, draft tokens that stay there.

Triton comes with torch's CUDA builds alone, so only `how_to_compute` imports this, and only there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from baton.core.model_config import ModelConfig
from baton.engine.attention_triton import TritonAttention
from baton.engine.batch import Batch, Limits
from baton.engine.decode_graphs import DecodeGraphs
from baton.engine.draft_tokens_device import DeviceDraftTokens
from baton.engine.kernels.sampling import decide
from baton.engine.kv_pool import KVPool
from baton.engine.model import Model, shard_config
from baton.engine.parallel import TPGroup
from baton.engine.runner import Computing


def on_cuda(model: Model, kv: KVPool, config: ModelConfig, group: TPGroup, longest: int, decode_rows: int) -> Computing:
    """`decode_rows` is the most sequences of a decode step, 0 where there are none and no step is captured."""
    size = kv.layout.block_size
    longest = min(longest, kv.num_blocks * size)
    attention = TritonAttention(shard_config(config, group), size, kv.storage[0][0].dtype, kv.device)
    compute: Callable[[Batch], Tensor] = partial(model.forward, kv=kv, attention=attention)
    prepare: Callable[[], None] | None = None
    if decode_rows:
        graphs = DecodeGraphs(model, kv, attention, longest, decode_rows)
        compute, prepare = graphs.compute, torch.no_grad()(partial(graphs.capture, config.vocab_size))
    propose = None
    if group.size == 1:
        limits = Limits(size, kv.num_blocks, config.vocab_size, longest)
        propose = DeviceDraftTokens(compute, limits, kv.device, decide)
    return Computing(torch.no_grad()(compute), decide=decide, propose=propose, prepare=prepare)
