"""The decoder: Llama 2 and 3, Mistral, Qwen2 and Qwen3 as one model.

They differ only in what the config says: bias on q, k, v (Qwen2), a norm on each query and key head (Qwen3), a sliding
window per layer (Mistral, Qwen), stretched rotary frequencies (Llama 3). The model does not know how it is split over
ranks: it is given local weights and a group to sum with.

Shapes: T tokens, S sampled positions, H and K local query and KV heads, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.core.model_config import ModelConfig
from baton.engine.attention import Attention
from baton.engine.batch import Batch
from baton.engine.kv_pool import KVPool
from baton.engine.layers import Arithmetic, Rotary, rotate
from baton.engine.tp import TPGroup
from baton.engine.weights import LayerWeights, Projection, WeightReader


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, weights: LayerWeights, config: ModelConfig, group: TPGroup, arithmetic: Arithmetic) -> None:
        make_linear, make_norm, eps = arithmetic.make_linear, arithmetic.make_norm, config.rms_norm_eps
        self._group = group
        self._head_dim = config.head_dim
        self._num_heads = config.num_heads // group.size
        self._num_kv_heads = config.num_kv_heads // group.size
        self._attention_norm = make_norm(weights.attention_norm, eps)
        self._qkv = make_linear(weights.qkv)
        self._q_norm = None if weights.q_norm is None else make_norm(weights.q_norm, eps)
        self._k_norm = None if weights.k_norm is None else make_norm(weights.k_norm, eps)
        self._attention_out = make_linear(weights.attention_out)
        self._mlp_norm = make_norm(weights.mlp_norm, eps)
        self._gate_up = make_linear(weights.gate_up)
        self._down = make_linear(weights.down)
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
        x = x + self._group.sum(self._attention_out(attended))
        return x + self._group.sum(self._down(self._swiglu(self._gate_up(self._mlp_norm(x)))))


class Model:
    """One rank's share of a decoder-only transformer."""

    def __init__(
        self, config: ModelConfig, weights: WeightReader, group: TPGroup, rotary: Rotary, arithmetic: Arithmetic
    ) -> None:
        self._windows = config.windows
        self._embedding = weights.embedding()
        self._layers = [
            DecoderLayer(weights.layer(index), config, group, arithmetic) for index in range(config.num_layers)
        ]
        self._norm = arithmetic.make_norm(weights.final_norm(), config.rms_norm_eps)
        self._head = arithmetic.make_linear(Projection(weights.head(), None))
        self._rotary = rotary

    def forward(self, batch: Batch, kv: KVPool, attention: Attention) -> Tensor:
        """Computes all rows, writes their KV, and returns logits [S, vocab] in float32 at the sampled positions."""
        stored = len(batch.slots)
        prepared = {window: attention.prepare(batch.spans, window) for window in dict.fromkeys(self._windows)}
        cos, sin = self._rotary.at(batch.positions)
        x = F.embedding(batch.tokens, self._embedding)
        for index, layer in enumerate(self._layers):
            queries, keys, values = layer.queries_keys_values(x, cos, sin)
            kv.write(index, batch.slots, keys[:stored], values[:stored])
            attended = attention.attend(queries, *kv.storage[index], prepared[self._windows[index]])
            x = layer.finish(x, attended)
        return self._logits(x, batch.sampled)

    def _logits(self, x: Tensor, sampled: Tensor) -> Tensor:
        if len(sampled) == 0:
            return torch.empty((0, self._embedding.shape[0]), dtype=torch.float32, device=x.device)
        # A single row is computed twice: oneDNN may sum a product of one row in another order than one of several.
        rows = sampled.repeat(2) if len(sampled) == 1 else sampled
        return self._head(self._norm(x.index_select(0, rows)))[: len(sampled)].float()
