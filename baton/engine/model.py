"""The decoder: Llama 2 and 3, Mistral, Qwen2 and Qwen3 as one model.

They differ only in the config: bias on q, k, v (Qwen2), a norm on each query and key head (Qwen3), a sliding window per
layer (Mistral, Qwen), scaled rotary frequencies (Llama 3). Each rank has a share of the heads, of the MLP's columns and
of the vocabulary; the residual stream is the same on all ranks, because of a sum over ranks after the embedding, each
attention and each MLP. A single rank has everything and needs no sums.

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
from baton.engine.layers import LayerOps
from baton.engine.parallel import TPGroup
from baton.engine.weights import LayerWeights, WeightReader


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)). `config` is this rank's own, as `shard_config` makes it. The last
    sum of a layer is left to the norm of the next layer, so that both take one pass over memory."""

    def __init__(self, weights: LayerWeights, config: ModelConfig, group: TPGroup, layer_ops: LayerOps) -> None:
        make_norm, make_linear, eps = layer_ops.make_norm, layer_ops.make_linear, config.rms_norm_eps
        self._group = group
        self._head_dim = config.head_dim
        self._attention_norm = make_norm(weights.attention_norm, eps)
        self._qkv = make_linear(weights.qkv)
        norms = None
        if weights.q_norm is not None and weights.k_norm is not None:
            norms = (make_norm(weights.q_norm, eps), make_norm(weights.k_norm, eps))
        self._heads = layer_ops.make_heads(config, norms)
        self._attention_out = make_linear(weights.attention_out)
        self._mlp_norm = make_norm(weights.mlp_norm, eps)
        self._gate_up = make_linear(weights.gate_up)
        self._down = make_linear(weights.down)
        self._swiglu = layer_ops.swiglu

    def queries(
        self, x: Tensor, delta: Tensor | None, rope: Any, cache: tuple[Tensor, Tensor], slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x and delta [T, hidden] -> x + delta, and queries [T, H, D]; keys and values go into the cache."""
        x, normed = (x, self._attention_norm(x)) if delta is None else self._attention_norm.add(x, delta)
        qkv = self._qkv(normed).view(x.shape[0], -1, self._head_dim)
        return x, self._heads(qkv, rope, cache, slots)

    def finish(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the projection of `attended` [T, H * D] to x [T, hidden]; returns the sum and the MLP's output."""
        x, normed = self._mlp_norm.add(x, self._group.all_reduce(self._attention_out(attended)))
        return x, self._group.all_reduce(self._down(self._swiglu(self._gate_up(normed))))


class Embedding:
    """Token vectors, looked up in this rank's part of the vocabulary (else zeros) and summed over ranks."""

    def __init__(self, weight: Tensor, ids: slice, group: TPGroup) -> None:
        self._weight, self._ids, self._group = weight, ids, group

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens [T] -> [T, hidden]."""
        if self._group.size == 1:
            return F.embedding(tokens, self._weight)
        elsewhere = (tokens < self._ids.start) | (tokens >= self._ids.stop)
        embedded = F.embedding((tokens - self._ids.start).masked_fill_(elsewhere, 0), self._weight)
        return self._group.all_reduce(embedded.masked_fill_(elsewhere[:, None], 0.0))


class Model:
    """One rank's share of a decoder-only transformer; `config` is the whole model's."""

    def __init__(self, config: ModelConfig, weights: WeightReader, group: TPGroup, layer_ops: LayerOps) -> None:
        self._windows = config.windows
        self.windows: Iterable[int] = dict.fromkeys(config.windows)  # the distinct ones
        self._vocab_size = config.vocab_size
        self._group = group
        self._embedding = Embedding(weights.embedding(), group.vocabulary_part(config.vocab_size)[0], group)
        local = shard_config(config, group)
        self._layers = [
            DecoderLayer(weights.layer(index), local, group, layer_ops) for index in range(config.num_layers)
        ]
        self._norm = layer_ops.make_norm(weights.final_norm(), config.rms_norm_eps)
        self._head = layer_ops.make_linear(weights.head())
        self._rope = layer_ops.rope

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
        out: Tensor | None = None,
    ) -> Tensor:
        """`forward` from tensors only: `prepared` is the result of `attention.prepare` for each of `windows`. With
        `out` float32 [S, vocab] the logits are written there."""
        x, delta = self._layers_of(tokens, positions, slots, kv, attention, prepared)
        return self._logits(x, delta, sampled, out)

    def forward_pooled(self, batch: Batch, kv: KVPool, attention: Attention) -> tuple[Tensor, Tensor]:
        """Like `forward`; also returns the final hidden states [N, hidden] at the batch's `pooled` tokens."""
        prepared = {window: attention.prepare(batch.spans, window) for window in self.windows}
        x, delta = self._layers_of(batch.tokens, batch.positions, batch.slots, kv, attention, prepared)
        states = self._normed(x, delta, batch.pooled)
        return self._logits(x, delta, batch.sampled, None), states

    def _layers_of(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv: KVPool,
        attention: Attention,
        prepared: Mapping[int, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the residual stream [T, hidden] after the last layer, and what is still to be added to it."""
        rope = self._rope(positions)
        x, delta = self._embedding(tokens), None
        for index, layer in enumerate(self._layers):
            x, queries = layer.queries(x, delta, rope, kv.storage[index], slots)
            attended = attention.attend(queries, *kv.storage[index], prepared[self._windows[index]])
            x, delta = layer.finish(x, attended)
        return x, delta

    def _logits(self, x: Tensor, delta: Tensor | None, sampled: Tensor, out: Tensor | None) -> Tensor:
        none = torch.empty((0, self._vocab_size), dtype=torch.float32, device=x.device)
        if len(sampled) == 0:
            return none
        # A single row is computed twice: oneDNN may sum the product of one row in another order than that of several.
        twice = len(sampled) == 1 and x.device.type == "cpu"
        normed = self._normed(x, delta, sampled.repeat(2) if twice else sampled)
        logits = self._group.gather(self._head(normed)[: len(sampled)])
        if logits is None:
            return none
        logits = logits[:, : self._vocab_size]
        return logits.float() if out is None else out.copy_(logits)

    def _normed(self, x: Tensor, delta: Tensor | None, rows: Tensor) -> Tensor:
        """Returns the final hidden states [len(rows), hidden]."""
        x = x.index_select(0, rows)
        return self._norm(x) if delta is None else self._norm.add(x, delta.index_select(0, rows))[1]


def shard_config(config: ModelConfig, group: TPGroup) -> ModelConfig:
    """The config of this rank's layers, with the rank's own number of heads."""
    heads, kv_heads = group.part(config.num_heads, "num_attention_heads"), group.kv_part(config.num_kv_heads)
    return replace(config, num_heads=heads.stop - heads.start, num_kv_heads=kv_heads.stop - kv_heads.start)
