"""The decoder: Llama 2 and 3, Mistral, Qwen2 and Qwen3 as one model.

They differ only in the config: bias on q, k, v (Qwen2), a norm on each query and key head (Qwen3), a sliding window per
layer (Mistral, Qwen), scaled rotary frequencies (Llama 3). Each rank has a share of the heads, of the MLP's columns and
of the vocabulary; the residual stream is the same on all ranks, because of a sum over ranks after the embedding, each
attention and each MLP. A single rank has everything and needs no sums.

Shapes: T tokens, S sampled positions, H and K query and KV heads of this rank, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.adapters import AdapterProjection, LayerProjections, LoadedAdapters
from baton.engine.attention import Attention
from baton.engine.batch import Batch
from baton.engine.device_stream import to_device
from baton.engine.kv_pool import KVPool
from baton.engine.layers import LayerOps, Linear
from baton.engine.parallel import TPGroup
from baton.engine.weights import LayerWeights, Projection, WeightReader
from baton.models.model_config import ModelConfig


class LowRankLinear:
    """Adds x @ a.T @ b.T to a linear layer's output, for the rows of one adapter; b [outputs, ranks] has zeros where a
    rank is of another of the layer's modules."""

    def __init__(self, projection: AdapterProjection, outputs: int, layer_ops: LayerOps) -> None:
        a = projection.a
        b, rank = a.new_zeros(outputs, len(a)), 0
        for part in projection.parts:
            part_outputs, part_rank = part.weight.shape
            b[part.first : part.first + part_outputs, rank : rank + part_rank] = part.weight
            rank += part_rank
        self._a, self._b = (layer_ops.make_linear(Projection(weight, None)) for weight in (a, b))

    def add(self, y: Tensor, x: Tensor, rows: Tensor) -> None:
        # A single row is computed twice, as for the logits.
        twice = len(rows) == 1 and x.device.type == "cpu"
        product = self._b(self._a(x.index_select(0, rows.repeat(2) if twice else rows)))
        y.index_add_(0, rows, product[: len(rows)])


class LowRankLayer(NamedTuple):
    qkv: LowRankLinear | None
    attention_out: LowRankLinear | None
    gate_up: LowRankLinear | None
    down: LowRankLinear | None


Adapted = Sequence[tuple[LowRankLayer, Tensor]]
"""The adapters of a step, in one layer, each with the packed indexes of its rows."""


def _project(linear: Linear, x: Tensor, adapters: Iterable[tuple[LowRankLinear | None, Tensor]]) -> Tensor:
    y = linear(x)
    for low_rank, rows in adapters:
        if low_rank is not None:
            low_rank.add(y, x, rows)
    return y


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
        self._layer_ops = layer_ops
        linears = weights.qkv, weights.attention_out, weights.gate_up, weights.down
        self._outputs = [len(linear.weight) for linear in linears]

    def low_rank(self, adapter: LayerProjections) -> LowRankLayer:
        """Returns an adapter's part of this layer."""
        pairs = zip((adapter.qkv, adapter.attention_out, adapter.gate_up, adapter.down), self._outputs, strict=True)
        return LowRankLayer(*(None if each is None else LowRankLinear(each, n, self._layer_ops) for each, n in pairs))

    def queries(
        self,
        x: Tensor,
        delta: Tensor | None,
        rope: Any,
        cache: tuple[Tensor, Tensor],
        slots: Tensor,
        adapted: Adapted = (),
    ) -> tuple[Tensor, Tensor]:
        """x and delta [T, hidden] -> x + delta, and queries [T, H, D]; keys and values go into the cache."""
        x, normed = (x, self._attention_norm(x)) if delta is None else self._attention_norm.add(x, delta)
        qkv = _project(self._qkv, normed, ((layer.qkv, rows) for layer, rows in adapted))
        qkv = qkv.view(x.shape[0], -1, self._head_dim)
        return x, self._heads(qkv, rope, cache, slots)

    def finish(self, x: Tensor, attended: Tensor, adapted: Adapted = ()) -> tuple[Tensor, Tensor]:
        """Adds the projection of `attended` [T, H * D] to x [T, hidden]; returns the sum and the MLP's output."""
        out = _project(self._attention_out, attended, ((layer.attention_out, rows) for layer, rows in adapted))
        x, normed = self._mlp_norm.add(x, self._group.all_reduce(out))
        gate_up = _project(self._gate_up, normed, ((layer.gate_up, rows) for layer, rows in adapted))
        down = _project(self._down, self._swiglu(gate_up), ((layer.down, rows) for layer, rows in adapted))
        return x, self._group.all_reduce(down)


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
        self.adapters = LoadedAdapters()

    def add_adapter(self, digest: str, layers: Sequence[LayerProjections]) -> None:
        self.adapters[digest] = [own.low_rank(layer) for own, layer in zip(self._layers, layers, strict=True)]

    def forward(self, batch: Batch, kv: KVPool, attention: Attention) -> Tensor:
        """Computes all rows, writes their KV, and returns logits [S, vocab] in float32 at the sampled positions; on
        followers none: [0, vocab]."""
        prepared = {window: attention.prepare(batch.spans, window) for window in self.windows}
        at, adapted = (batch.tokens, batch.positions, batch.slots), self._adapted(batch)
        return self.compute(*at, batch.sampled, kv, attention, prepared, adapted=adapted)

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
        adapted: Sequence[tuple[Sequence[LowRankLayer], Tensor]] = (),
    ) -> Tensor:
        """`forward` from tensors only: `prepared` is the result of `attention.prepare` for each of `windows`. With
        `out` float32 [S, vocab] the logits are written there. `adapted` is as in `_adapted`."""
        x, delta = self._layers_of(tokens, positions, slots, kv, attention, prepared, adapted)
        return self._logits(x, delta, sampled, out)

    def forward_pooled(self, batch: Batch, kv: KVPool, attention: Attention) -> tuple[Tensor, Tensor]:
        """Like `forward`; also returns the final hidden states [N, hidden] at the batch's `pooled` tokens."""
        prepared = {window: attention.prepare(batch.spans, window) for window in self.windows}
        at, adapted = (batch.tokens, batch.positions, batch.slots), self._adapted(batch)
        x, delta = self._layers_of(*at, kv, attention, prepared, adapted)
        states = self._normed(x, delta, batch.pooled)
        return self._logits(x, delta, batch.sampled, None), states

    def _adapted(self, batch: Batch) -> Sequence[tuple[Sequence[LowRankLayer], Tensor]]:
        """Returns the layers of the step's adapters, with the packed indexes of their rows."""
        return [
            (self.adapters[digest], to_device(torch.from_numpy(np.asarray(at)), batch.device))
            for digest, at in batch.adapters.items()
        ]

    def _layers_of(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv: KVPool,
        attention: Attention,
        prepared: Mapping[int, Any],
        adapted: Sequence[tuple[Sequence[LowRankLayer], Tensor]],
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the residual stream [T, hidden] after the last layer, and what is still to be added to it."""
        rope = self._rope(positions)
        x, delta = self._embedding(tokens), None
        for index, layer in enumerate(self._layers):
            here = [(layers[index], rows) for layers, rows in adapted]
            x, queries = layer.queries(x, delta, rope, kv.storage[index], slots, here)
            attended = attention.attend(queries, *kv.storage[index], prepared[self._windows[index]])
            x, delta = layer.finish(x, attended, here)
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
