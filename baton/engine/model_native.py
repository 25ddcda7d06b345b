"""The decoder on the C++ kernels: the same model as model.py, its reference implementation.

Weights are packed once at load. On one rank a step is one call (two, if its first layers are reported early); on
several ranks, each half of a layer is one call, and the ranks' partial results are summed between calls. The order in
which a row is computed does not depend on the other rows (cpu/gemm.h, cpu/attention.h), in float32 or in bf16.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.adapters import AdapterProjection, LayerProjections, LoadedAdapters
from baton.engine.batch import Batch
from baton.engine.kernels import native
from baton.engine.kernels.native import Arena, Kernels
from baton.engine.kv_pool import KVPool
from baton.engine.layers import RMSNorm, inverse_frequencies
from baton.engine.model import Embedding, shard_config
from baton.engine.parallel import TPGroup
from baton.engine.sampler import pack_draws
from baton.engine.weights import LayerWeights, Projection, WeightReader
from baton.models.model_config import ModelConfig

_FEW_TOKENS = 64  # steps of up to this many tokens reuse one buffer
_FEW_DRAFTED = 4  # drafting for up to this many rows reuses one buffer of logits


class NativeModel:
    """One rank's share of a decoder-only transformer on CPU; `config` is the whole model's.

    Owns the packed weights and the structs that point at them.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightReader,
        group: TPGroup,
        kernels: Kernels,
        max_positions: int,
        threads: int,
    ) -> None:
        local = shard_config(config, group)
        self.kernels, self._group, self._arena = kernels, group, Arena()
        self._hidden, self._vocab_size, self._dtype = config.hidden_size, config.vocab_size, weights.dtype
        self.adapters = LoadedAdapters()
        self.last_layer_tokens = 0
        """Of the last step on one rank, the tokens of which its last layer was computed whole; all have their KV."""
        self._kept: list[Tensor] = []  # the tensors that the structs point to
        self._int8_activations = weights.int8_activations
        self._kv: KVPool | None = None
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse_frequencies(config))
        table = weights.embedding()
        self._embedding = Embedding(table, group.vocabulary_part(config.vocab_size)[0], group)
        self._layers = (native.Layer * config.num_layers)(
            *(self._layer(weights.layer(i), config.windows[i]) for i in range(config.num_layers))
        )
        head = self._pack(weights.head())
        head.int8_activations = False  # rounding there would be an error of the logits themselves
        self._head_rows = head.n
        final_norm = weights.final_norm()
        self._norm = RMSNorm(final_norm, config.rms_norm_eps)
        self._few = torch.empty((_FEW_TOKENS, config.hidden_size), dtype=weights.dtype)
        self._few_logits = torch.empty((_FEW_DRAFTED, head.n), dtype=torch.float32)
        self._model = native.ModelStruct(
            hidden=config.hidden_size,
            heads=local.num_heads,
            kv_heads=local.num_kv_heads,
            head_dim=config.head_dim,
            num_layers=config.num_layers,
            cos=self._address(angles.cos()),
            sin=self._address(angles.sin()),
            embedding=self._address(table),
            final_norm=self._address(final_norm),
            layers=self._layers,
            head=head,
            eps=config.rms_norm_eps,
            is_bf16=weights.dtype == torch.bfloat16,
            threads=threads,
        )

    def forward(
        self, kv: KVPool, batch: Batch, first_layers: int = 0, on_first: Callable[[], None] | None = None
    ) -> Tensor:
        """Computes all rows, writes their KV, and returns logits [S, vocab] in float32 at the sampled positions; on
        followers none: [0, vocab]. On one rank `on_first` is called when `first_layers` have written theirs."""
        x, logits = self._room(len(batch.token_ids), len(batch.sampled_at))
        return self._forward(kv, batch, x, logits, first_layers, on_first)

    def forward_pooled(self, kv: KVPool, batch: Batch) -> tuple[Tensor, Tensor]:
        """Like `forward`; also returns the final hidden states [N, hidden] at the batch's `pooled` tokens."""
        x, logits = self._room(len(batch.token_ids), len(batch.sampled_at))
        logits = self._forward(kv, batch, x, logits, keeps_x=True)
        return logits, self._norm(x.index_select(0, batch.pooled))

    def _forward(
        self,
        kv: KVPool,
        batch: Batch,
        x: Tensor,
        logits: Tensor,
        first_layers: int = 0,
        on_first: Callable[[], None] | None = None,
        *,
        keeps_x: bool = False,
    ) -> Tensor:
        """`forward` in the memory that `_room` returned; with `keeps_x`, x are all tokens' hidden states afterwards."""
        rows = _rows(batch)
        step = self._step(batch, kv, rows, x, logits)
        step.keeps_x = keeps_x
        model, reference = ctypes.byref(self._model), ctypes.byref(step)
        if self._group.size == 1:
            if on_first is not None:
                self.kernels.forward(model, reference, 0, first_layers)
                on_first()
            self.last_layer_tokens = self.kernels.forward(model, reference, first_layers, len(self._layers))
            return logits
        self._forward_on_ranks(batch, x, model, step)
        gathered = None
        if batch.sampled_at:
            self.kernels.head(model, reference)
            gathered = self._group.gather(logits)
        return torch.empty((0, self._vocab_size)) if gathered is None else gathered[:, : self._vocab_size]

    @property
    def int8_linears(self) -> int:
        """The number of matrices that are multiplied by activations in 8 bits."""
        return sum(linear.int8_activations for linear in self._linears())

    @contextmanager
    def bfloat16_activations(self) -> Iterator[None]:
        """Until the end no activations are in 8 bits."""
        changed = [linear for linear in self._linears() if linear.int8_activations]
        for linear in changed:
            linear.int8_activations = False
        try:
            yield
        finally:
            for linear in changed:
                linear.int8_activations = True

    def _linears(self) -> list[native.Linear]:
        names = ("qkv", "attention_out", "gate_up", "down")
        return [getattr(layer, name) for layer in self._layers for name in names]

    def add_adapter(self, digest: str, layers: Sequence[LayerProjections]) -> None:
        self.adapters[digest] = pack_adapter(layers, self.kernels)

    def propose(self, kv: KVPool, batch: Batch, counts: Sequence[int]) -> list[list[int]]:
        """Computes all rows and drafts `counts[i]` tokens (at least one) after sampled position i, autoregressively;
        the last is not computed itself. For one rank; draws must not change logits; no row may sample twice."""
        longest, number = max(counts), len(counts)
        tokens = max(len(batch.token_ids), number)
        if tokens <= _FEW_TOKENS and number <= _FEW_DRAFTED:
            x, logits = self._few, self._few_logits  # internal to this call, so reused
        else:
            x, logits = self._room(tokens, number)
        rows, draft_tokens = _rows(batch), (ctypes.c_int64 * (number * longest))()
        row_of = [index for index, row in enumerate(batch.rows) if row.num_sampled]
        asked = pack_draws(batch.draws, row_of, counts)
        step = self._step(batch, kv, rows, x, logits)
        model, reference = ctypes.byref(self._model), ctypes.byref(step)
        self.kernels.propose(model, reference, asked, number, longest, ctypes.byref(draft_tokens))
        return [draft_tokens[longest * index : longest * index + count] for index, count in enumerate(counts)]

    def _room(self, tokens: int, sampled: int) -> tuple[Tensor, Tensor]:
        """Returns x [at least tokens, hidden], shared by short steps, and logits [sampled, vocab of this rank], not
        filled."""
        x = self._few
        if tokens > len(x):
            x = torch.empty((tokens, self._hidden), dtype=self._dtype)
        return x, torch.empty((sampled, self._head_rows), dtype=torch.float32)

    def _step(self, batch: Batch, kv: KVPool, rows: array[int], x: Tensor, logits: Tensor) -> native.Step:
        """Returns a struct that points into the arguments."""
        if self._kv is not kv:
            self._bind(kv)
        return native.Step(
            len(batch.token_ids),
            len(batch.rows),
            len(batch.sampled_at),
            batch.token_ids.buffer_info()[0],
            batch.sampled_at.buffer_info()[0],
            rows.buffer_info()[0],
            x.data_ptr(),
            logits.data_ptr(),
            adapter_rows(self.adapters, batch.adapters) if batch.adapters else None,
            len(batch.adapters),
        )

    def _forward_on_ranks(self, batch: Batch, x: Tensor, model: object, step: native.Step) -> None:
        x = x[: len(batch.token_ids)]
        x.copy_(self._embedding(batch.tokens))
        partial = torch.empty_like(x)
        for index in range(len(self._layers)):
            for half in (self.kernels.attention, self.kernels.mlp):
                half(model, index, ctypes.byref(step), partial.data_ptr())
                x += self._group.all_reduce(partial)

    def _bind(self, kv: KVPool) -> None:
        for layer, (keys, values) in zip(self._layers, kv.storage, strict=True):
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
        self._model.block_size = kv.layout.block_size
        self._model.is_fp8 = kv.layout.layers[0].dtype == "float8_e4m3fn"
        self._kv = kv

    def _layer(self, weights: LayerWeights, window: int) -> native.Layer:
        return native.Layer(
            attention_norm=self._address(weights.attention_norm),
            qkv=self._pack(weights.qkv),
            q_norm=self._address(weights.q_norm),
            k_norm=self._address(weights.k_norm),
            attention_out=self._pack(weights.attention_out),
            mlp_norm=self._address(weights.mlp_norm),
            gate_up=self._pack(_interleave_gate_up(weights.gate_up)),
            down=self._pack(weights.down),
            window=window,
        )

    def _pack(self, projection: Projection) -> native.Linear:
        weight, bias, scale, blocks = projection.weight, projection.bias, projection.scale, projection.blocks
        if blocks is None:
            struct, tensors = native.pack_weight(self.kernels, self._arena, weight, bias, scale, dtype=self._dtype)
        else:
            struct, tensors = native.pack_blocks(
                self.kernels, self._arena, blocks, bias, int8_activations=self._int8_activations
            )
        self._kept += tensors
        return struct

    def _address(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()


def _rows(batch: Batch) -> array[int]:
    """[R, 4]: a Row of attention.h for each row; the last column points into the batch's block ids."""
    rows, blocks = batch.table[:], batch.block_ids.ctypes.data
    for last in range(3, len(rows), 4):
        rows[last] = blocks + 8 * rows[last]
    return rows


def _interleave_gate_up(gate_up: Projection) -> Projection:
    """Interleaves the rows of gate and up, stacked before, in groups of 16, each zero-padded to whole groups."""

    def interleave(tensor: Tensor) -> Tensor:
        gate, up = (F.pad(half, (0, 0, 0, -half.shape[0] % 16)) for half in tensor.chunk(2))
        return torch.stack([half.reshape(-1, 16, half.shape[1]) for half in (gate, up)], dim=1).flatten(0, 2)

    bias, scale = (
        None if of_rows is None else interleave(of_rows[:, None])[:, 0] for of_rows in (gate_up.bias, gate_up.scale)
    )
    if gate_up.blocks is not None:  # torch imports 130 MB of modules for operations on a weight without data
        return replace(gate_up, bias=bias, blocks=gate_up.blocks.each(interleave))
    return Projection(interleave(gate_up.weight), bias, scale)


_CHUNK = 16  # outputs of B that are stored together, and of gate and up that alternate
_RANKS = 4  # of A that are stored together


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """`layers` points into `memory`."""

    layers: Any
    memory: list[Tensor]


def pack_adapter(layers: Sequence[LayerProjections], kernels: Kernels) -> PackedAdapter:
    """Packs an adapter as adapters.h describes, in the order in which a step reads it."""
    arena, memory = Arena(), list[Tensor]()

    def address(tensor: Tensor) -> int:
        memory.append(arena.take(tensor.nbytes))
        memory[-1][: tensor.nbytes].view(tensor.dtype).copy_(tensor.flatten())
        return memory[-1].data_ptr()

    def linear(projection: AdapterProjection | None, *, alternating: bool = False) -> native.AdapterLinear:
        if projection is None:
            return native.AdapterLinear()
        parts = (native.AdapterPart * len(projection.parts))()
        packed = native.AdapterLinear(
            address(_packed_a(projection.a, kernels.elements(projection.a.dtype))), parts, len(projection.a), len(parts)
        )
        for part, source in zip(parts, projection.parts, strict=True):
            part.outputs, part.rank = source.weight.shape
            part.b = address(_packed_b(source.weight))
            part.first, part.step = source.first, _CHUNK
            if alternating:  # the first output of up, after all of gate, follows 16 of gate
                part.first, part.step = _CHUNK if source.first else 0, 2 * _CHUNK
        return packed

    packed = (native.AdapterLayer * len(layers))()
    for layer, source in zip(packed, layers, strict=True):
        layer.qkv, layer.attention_out = linear(source.qkv), linear(source.attention_out)
        layer.gate_up, layer.down = linear(source.gate_up, alternating=True), linear(source.down)
    return PackedAdapter(packed, memory)


def adapter_rows(adapters: Mapping[str, PackedAdapter], tokens: Mapping[str, array[int]]) -> Any:
    """Returns a struct for each adapter of a batch; `tokens` are `Batch.adapters`."""
    rows = [native.AdapterRows(adapters[name].layers, at.buffer_info()[0], len(at)) for name, at in tokens.items()]
    return (native.AdapterRows * len(rows))(*rows)


def _packed_a(a: Tensor, step: int) -> Tensor:
    """a [ranks, k] -> flat: groups of four ranks [groups, k / step, 4, step], then the remaining ranks, with zeros for
    missing k."""
    a = F.pad(a, (0, native.padded(a.shape[1], a.dtype) - a.shape[1]))
    grouped = len(a) // _RANKS * _RANKS
    groups = a[:grouped].view(-1, _RANKS, a.shape[1] // step, step).transpose(1, 2)
    return torch.cat([groups.flatten(), a[grouped:].flatten()])


def _packed_b(weight: Tensor) -> Tensor:
    """weight [outputs, rank] -> [chunks, rank, 16], with zeros for missing outputs."""
    padded = F.pad(weight, (0, 0, 0, -len(weight) % _CHUNK))
    return padded.view(-1, _CHUNK, weight.shape[1]).transpose(1, 2)
