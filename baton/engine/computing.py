"""What computes the steps of a loaded model: with which attention, from graphs or not, who chooses and who guesses."""

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
from baton.engine.guesses_device import DeviceGuesses
from baton.engine.kv_pool import KVPool
from baton.engine.model import Model, shard_config
from baton.engine.model_native import NativeModel
from baton.engine.parallel import TPGroup
from baton.engine.sampler import Choose
from baton.engine.sampler_device import choose_on_device

Guess = Callable[[Batch, Sequence[int]], list[list[int]]]
ComputeInTwo = Callable[[Batch, int, Callable[[], None]], Tensor]


@dataclass(frozen=True, slots=True)
class Computing:
    """`compute` gives the logits [S, vocab] of a batch; `choose` tokens from them, `guess` a draft model's in one call;
    `compute_in_two` is `compute` that calls back when so many layers have written their KV. None where the plain way is
    the only one."""

    compute: Callable[[Batch], Tensor]
    choose: Choose | None
    guess: Guess | None
    compute_in_two: ComputeInTwo | None = None


def how_to_compute(
    model: Model | NativeModel,
    kv: KVPool,
    config: ModelConfig,
    group: TPGroup,
    choose: Choose | None,
    *,
    exact: bool,
    longest: int,
) -> Computing:
    """`config` is the whole model's, `choose` that of compiled kernels, `longest` the most positions of a sequence."""
    if isinstance(model, NativeModel):
        if group.size > 1:
            return Computing(partial(model.forward, kv=kv), choose, None)

        def in_two(batch: Batch, layers: int, on_first: Callable[[], None]) -> Tensor:
            return model.forward(batch, kv, layers, on_first)

        return Computing(partial(model.forward, kv=kv), choose, partial(model.guess, kv=kv), in_two)
    attention = _attention(config, group, kv, exact)
    device, size = kv.storage[0][0].device, kv.layout.block_size
    compute: Callable[[Batch], Tensor] = partial(model.forward, kv=kv, attention=attention)
    guess: Guess | None = None
    if device.type == "cuda" and group.size == 1:
        from baton.engine.decode_graphs import DecodeGraphs

        compute = DecodeGraphs(model, kv, attention, longest).compute
        limits = Limits(size, kv.num_blocks, config.vocab_size, min(longest, kv.num_blocks * size))
        guess = DeviceGuesses(compute, limits, device)
    # Compiled kernels make no graph of gradients: there it would only cost their steps time.
    return Computing(torch.no_grad()(compute), choose_on_device if device.type == "cuda" else None, guess)


def _attention(config: ModelConfig, group: TPGroup, kv: KVPool, exact: bool) -> Attention:
    local, size, (keys, _) = shard_config(config, group), kv.layout.block_size, kv.storage[0]
    if exact:
        return ExactAttention(local, size, kv.zero_block, keys.device)
    if keys.device.type == "cuda":
        from baton.engine.attention_triton import TritonAttention  # Triton comes with torch's CUDA builds alone

        return TritonAttention(local, size, keys.device)
    return FastAttention(local, size, kv.zero_block, keys.dtype, keys.device)
