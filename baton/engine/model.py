"""The decoder: Llama 2 and 3, Mistral, Qwen2 and Qwen3 as one model.

They differ only in what the config says: bias on q, k, v (Qwen2), a norm on each query and key head (Qwen3), a sliding
window per layer (Mistral, Qwen), stretched rotary frequencies (Llama 3). Each rank has a share of the heads, of the
MLP's columns and of the vocabulary; the residual stream is the same on all, after a sum over ranks behind the
embedding, each attention and each MLP. A single rank has all and sums with nobody.

Shapes: T tokens, S sampled positions, H and K query and KV heads of this rank, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.core.model_config import ModelConfig
from baton.engine.attention import Attention
from baton.engine.batch import Batch
from baton.engine.kv_pool import KVPool
from baton.engine.layers import Arithmetic, Rotary, rotate
from baton.engine.parallel import TPGroup
from baton.engine.weights import LayerWeights, WeightReader


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)). `config` is this rank's own, as `shard_config` makes it."""

    def __init__(self, weights: LayerWeights, config: ModelConfig, group: TPGroup, arithmetic: Arithmetic) -> None:
        make_linear, make_norm, eps = arithmetic.make_linear, arithmetic.make_norm, config.rms_norm_eps
        self._group = group
        self._head_dim = config.head_dim
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._attention_norm = make_norm(weights.attention_norm, eps)
        dtype = weights.attention_norm.dtype
        self._qkv = make_linear(weights.qkv, dtype)
        self._q_norm = None if weights.q_norm is None else make_norm(weights.q_norm, eps)
        self._k_norm = None if weights.k_norm is None else make_norm(weights.k_norm, eps)
        self._attention_out = make_linear(weights.attention_out, dtype)
        self._mlp_norm = make_norm(weights.mlp_norm, eps)
        self._gate_up = make_linear(weights.gate_up, dtype)
        self._down = make_linear(weights.down, dtype)
        self._swiglu = arithmetic.swiglu

    def queries_keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden] -> queries [T, H, D], keys and values [T, K, D], queries and keys turned by position."""
        qkv = self._qkv(self._attention_norm(x)).view(x.shape[0], -1, self._head_dim)
        turning = self._num_heads + self._num_kv_heads
        if self._q_norm is None or self._k_norm is None:
            turned = rotate(qkv[:, :turning], cos, sin)
        else:
            heads = (self._q_norm(qkv[:, : self._num_heads]), self._k_norm(qkv[:, self._num_heads : turning]))
            turned = rotate(torch.cat(heads, dim=1), cos, sin)
        return turned[:, : self._num_heads], turned[:, self._num_heads :], qkv[:, turning:]

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Adds attention's output [T, H * D] and the MLP's to the residual stream x [T, hidden]."""
        x = x + self._group.all_reduce(self._attention_out(attended))
        return x + self._group.all_reduce(self._down(self._swiglu(self._gate_up(self._mlp_norm(x)))))


class Embedding:
    """Token vectors, looked up in this rank's part of the vocabulary and summed with the others' zeros."""

    def __init__(self, weight: Tensor, ids: slice, group: TPGroup) -> None:
        self._weight, self._ids, self._group = weight, ids, group

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens [T] -> [T, hidden]."""
        if self._group.size == 1:
            return F.embedding(tokens, self._weight)
        elsewhere = (tokens < self._ids.start) | (tokens >= self._ids.stop)
        found = F.embedding((tokens - self._ids.start).masked_fill_(elsewhere, 0), self._weight)
        return self._group.all_reduce(found.masked_fill_(elsewhere[:, None], 0.0))


class Model:
    """One rank's share of a decoder-only transformer; `config` is the whole model's."""

    def __init__(
        self, config: ModelConfig, weights: WeightReader, group: TPGroup, rotary: Rotary, arithmetic: Arithmetic
    ) -> None:
        self._windows = config.windows
        self._vocab_size = config.vocab_size
        self._group = group
        self._embedding = Embedding(weights.embedding(), group.vocabulary_part(config.vocab_size)[0], group)
        local = shard_config(config, group)
        self._layers = [
            DecoderLayer(weights.layer(index), local, group, arithmetic) for index in range(config.num_layers)
        ]
        self._norm = arithmetic.make_norm(weights.final_norm(), config.rms_norm_eps)
        self._head = arithmetic.make_linear(weights.head(), weights.dtype)
        self._rotary = rotary

    @property
    def windows(self) -> Iterable[int]:
        """The different windows of the layers."""
        return dict.fromkeys(self._windows)

    def forward(self, batch: Batch, kv: KVPool, attention: Attention) -> Tensor:
        """Computes all rows, writes their KV, and returns logits [S, vocab] in float32 at the sampled positions; on
        followers none: [0, vocab]."""
        prepared = {window: attention.prepare(batch.spans, window) for window in self.windows}
        return self.compute(batch.tokens, batch.positions, batch.slots, batch.sampled, kv, attention, prepared)

    def compute(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        sampled: Tensor,
        kv: KVPool,
        attention: Attention,
        prepared: Mapping[int, Any],
    ) -> Tensor:
        """The same from tensors alone: `prepared` is what `attention` made of the rows for each of `windows`."""
        stored = len(slots)
        cos, sin = self._rotary.at(positions)
        x = self._embedding(tokens)
        for index, layer in enumerate(self._layers):
            queries, keys, values = layer.queries_keys_values(x, cos, sin)
            kv.write(index, slots, keys[:stored], values[:stored])
            attended = attention.attend(queries, *kv.storage[index], prepared[self._windows[index]])
            x = layer.finish(x, attended)
        return self._logits(x, sampled)

    def _logits(self, x: Tensor, sampled: Tensor) -> Tensor:
        none = torch.empty((0, self._vocab_size), dtype=torch.float32, device=x.device)
        if len(sampled) == 0:
            return none
        # A single row is computed twice: oneDNN may sum a product of one row in another order than one of several.
        rows = sampled.repeat(2) if len(sampled) == 1 else sampled
        logits = self._group.gather(self._head(self._norm(x.index_select(0, rows)))[: len(sampled)])
        return none if logits is None else logits[:, : self._vocab_size].float()


def shard_config(config: ModelConfig, group: TPGroup) -> ModelConfig:
    """The model as this rank's layers see it: with its own number of heads."""
    heads, kv_heads = group.part(config.num_heads, "num_attention_heads"), group.kv_part(config.num_kv_heads)
    return replace(config, num_heads=heads.stop - heads.start, num_kv_heads=kv_heads.stop - kv_heads.start)
