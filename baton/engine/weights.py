"""The tensors of a model under their Hugging Face names, and one rank's share of them, layer by layer.

Split by rows (outputs): q, k, v, gate, up, and by vocabulary the embedding and the head. Split by columns (inputs),
followed by a sum over ranks: o and down. A rank keeps only its slices and the norms. In int8 an output's scale is that
of its whole row, even on a rank that has only some of its columns: every rank has slices of the same quantised weights.
In int4 a rank's columns must be whole blocks, for the same reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.core.errors import StartupError
from baton.core.reshard import local_heads
from baton.engine import quantize
from baton.engine.blocks import BLOCK, Blocks, stacked
from baton.engine.checkpoint import Checkpoint
from baton.engine.parallel import TPGroup
from baton.models.model_config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"
CLASSIFIER = "score.weight"


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer's weight [out, in] and bias [out]. With `scale` [out] in float32 the weight is int8 steps; with
    `blocks`, which only the compiled kernels read, it has no data (device `meta`)."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None = None
    blocks: Blocks | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. `qkv` stacks the rows of q, k, v; `gate_up` those of gate and up."""

    attention_norm: Tensor
    qkv: Projection
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention_out: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection


class Shares(NamedTuple):
    """Which outputs of q, of k and v, and of gate and up a rank has; the first and last are also the inputs of o and
    down."""

    heads: slice
    kv_heads: slice
    inner: slice

    @classmethod
    def of(cls, config: ModelConfig, group: TPGroup) -> Shares:
        """Raises StartupError, with the numbers, for sizes that cannot be divided over the ranks."""

        def features(heads: slice) -> slice:
            return slice(heads.start * config.head_dim, heads.stop * config.head_dim)

        heads = features(group.part(config.num_heads, "num_attention_heads"))
        inner = group.part(config.intermediate_size, "intermediate_size")
        return cls(heads, features(group.kv_part(config.num_kv_heads)), inner)


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this config holds."""
    hidden = config.hidden_size
    tensors: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), NORM: (hidden,)}
    if not config.tie_word_embeddings:
        tensors[HEAD] = (config.vocab_size, hidden)
    if config.num_labels and not config.classifier_tokens:
        tensors[CLASSIFIER] = (config.num_labels, hidden)
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        tensors[f"{layer}.input_layernorm.weight"] = (hidden,)
        tensors[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            tensors[f"{layer}.self_attn.q_norm.weight"] = (config.head_dim,)
            tensors[f"{layer}.self_attn.k_norm.weight"] = (config.head_dim,)
        for name, (out, into) in config.linears.items():
            tensors[f"{layer}.{name}.weight"] = (out, into)
            attention_bias = config.o_bias if name == "self_attn.o_proj" else config.qkv_bias
            if config.mlp_bias if name.startswith("mlp.") else attention_bias:
                tensors[f"{layer}.{name}.bias"] = (out,)
    return tensors


def stored_bytes(name: str, shape: tuple[int, ...], item_bytes: int, quantized: str = "none") -> int:
    """Memory of one tensor, or of part of it. A quantised one takes in int8 a byte per element and four per scale; in
    int4 five bits per element, the head eight and a half (see blocks.Blocks)."""
    elements, is_head = math.prod(shape), name == HEAD
    if not is_head and not name.endswith("_proj.weight"):
        return elements * item_bytes
    match quantized:
        case "int8" if not is_head or quantize.QUANTIZE_HEAD:
            return elements + 4 * shape[0]
        case "int4":
            return elements + elements // 16 if is_head else elements // 2 + elements // 8
    return elements * item_bytes


def parameter_bytes(
    config: ModelConfig,
    size: int,
    rank: int,
    item_bytes: int,
    quantized: str = "none",
    checkpoint: Checkpoint | None = None,
) -> int:
    """The bytes of weights that `rank` of `size` will hold, sharded like `WeightReader`, before any is read; tied
    embeddings count twice. Heads and columns must be divisible over the ranks. With a `checkpoint`, matrices that it
    stores in blocks stay so: a few rows of each are read, which show how their scales are kept."""
    kv_share = len(local_heads(config.num_kv_heads, size, rank)) / config.num_kv_heads
    shapes = expected_tensors(config)
    if config.tie_word_embeddings:
        shapes[HEAD] = shapes[EMBEDDING]
    sizes, stacks = dict[str, int](), dict[str, list[_Sample]]()
    for name, (rows, *columns) in shapes.items():
        layer = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        if name in (EMBEDDING, HEAD):
            rows = -(-rows // size)
        elif layer in ("k_proj", "v_proj"):
            rows = round(rows * kv_share)
        elif layer in ("o_proj", "down_proj"):
            if columns:
                columns = [columns[0] // size]
            elif rank > 0:
                rows = 0
        elif layer.endswith("_proj"):
            rows //= size
        sizes[name] = stored_bytes(name, (rows, *columns), item_bytes, quantized)
        if checkpoint is not None and (name == HEAD or name.endswith("_proj.weight")):
            begin = rank * columns[0] if layer in ("o_proj", "down_proj") else 0
            stored = EMBEDDING if name == HEAD and config.tie_word_embeddings else name
            few = checkpoint.blocks(stored, slice(0, _FEW), slice(begin, begin + columns[0]))
            stack = name.replace(layer, _STACKS.get(layer, layer))
            stacks.setdefault(stack, []).append(_Sample(name, rows, few))
    for parts in stacks.values():
        few_of_each = [part.few for part in parts if part.few is not None]
        if len(few_of_each) < len(parts) or (joined := stacked(few_of_each)) is None:
            continue
        if quantized == "int4" and joined.minima is None:
            continue
        for part in parts:
            sizes[part.name] = part.rows * joined.nbytes // len(joined.codes)
    return sum(sizes.values())


class _Sample(NamedTuple):
    """A few rows, in blocks, of a matrix of which a rank has so many `rows`."""

    name: str
    rows: int
    few: Blocks | None


_FEW = 8
_STACKS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
"""Which layers are read as one."""


class WeightReader:
    """Reads one rank's share of a verified checkpoint in the dtype and on the device of the computation.

    With `quantized` "int8" or "int4" linear layers are quantised (quantize.py). With `in_blocks`, which may be set
    before the first layer is read, those stored in blocks stay so: the same weights in fewer bytes. With
    `int8_activations` those of 8 bits are multiplied by activations in 8 bits. `bytes_read` is the
    size of all tensors returned so far.
    Raises StartupError, with the numbers, for sizes that cannot be divided over the ranks.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        group: TPGroup,
        dtype: torch.dtype,
        device: torch.device,
        *,
        quantized: str = "none",
    ) -> None:
        expected = expected_tensors(config)
        if config.tie_word_embeddings and HEAD in checkpoint.tensors:
            expected[HEAD] = expected[EMBEDDING]
        checkpoint.verify(expected, getattr(torch, config.torch_dtype) if config.torch_dtype else None)
        self._checkpoint = checkpoint
        self._config = config
        self._group = group
        self.dtype = dtype
        self.device = device
        self._quantized = quantized
        self.in_blocks = False
        self.int8_activations = False
        self._heads, self._kv_heads, self._inner = Shares.of(config, group)
        self._ids, self._rows = group.vocabulary_part(config.vocab_size)
        self.bytes_read = 0
        if HEAD in checkpoint.tensors and config.tie_word_embeddings:
            self._check_tied()

    def embedding(self) -> Tensor:
        """[rows, hidden]: the embeddings of this rank's token ids, then zeros up to the common number of rows."""
        return self._counted(self._vocabulary(EMBEDDING).to(self.dtype))

    def head(self) -> Projection:
        """[rows, hidden], padded likewise; with tied embeddings, the embedding itself."""
        name = EMBEDDING if self._config.tie_word_embeddings else HEAD
        if (blocks := self._blocks(name, self._ids, bits=8)) is not None:
            missing = self._rows - len(blocks.codes)
            return self._of_blocks(blocks.each(lambda rows: F.pad(rows, (0, 0, 0, missing))))
        weight = self._vocabulary(name)
        if self._quantized == "int8" and quantize.QUANTIZE_HEAD:
            return self._in_int8(weight)
        return Projection(self._counted(weight.to(self.dtype)), None)

    def classifier(self) -> Tensor:
        """float64 [labels, hidden]: the classification head. Every rank could compute with it; only the leader does."""
        if self._config.classifier_tokens:
            no, yes = self._rows_of_head(self._config.classifier_tokens)
            return self._counted(yes - no)
        return self._counted(self._checkpoint.read(CLASSIFIER).to(device=self.device, dtype=torch.float64))

    def _rows_of_head(self, tokens: Sequence[str]) -> list[Tensor]:
        """float64 [1, hidden] of each token of the checkpoint's tokenizer. Raises StartupError if one is missing."""
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(self._checkpoint.model_dir / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exception
            raise StartupError(f"tokenizer.json: {str(error)[:200]}") from None
        name, rows = EMBEDDING if self._config.tie_word_embeddings else HEAD, list[Tensor]()
        for token in tokens:
            index = tokenizer.token_to_id(token)
            if index is None or index >= self._config.vocab_size:
                reason = f"{token!r:.60} is not a token of tokenizer.json"
                raise StartupError(f"config.json: classifier_from_token: {reason}")
            row = self._checkpoint.read(name, slice(index, index + 1))
            rows.append(row.to(device=self.device, dtype=torch.float64))
        return rows

    def final_norm(self) -> Tensor:
        return self._read(NORM)

    def layer(self, index: int) -> LayerWeights:
        config, name, inner = self._config, f"model.layers.{index}", self._inner
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        return LayerWeights(
            attention_norm=self._read(f"{name}.input_layernorm.weight"),
            qkv=self._stacked([(f"{attention}.{p}_proj", self._heads if p == "q" else self._kv_heads) for p in "qkv"]),
            q_norm=self._read(f"{attention}.q_norm.weight") if config.qk_norm else None,
            k_norm=self._read(f"{attention}.k_norm.weight") if config.qk_norm else None,
            attention_out=self._row_parallel(f"{attention}.o_proj", self._heads),
            mlp_norm=self._read(f"{name}.post_attention_layernorm.weight"),
            gate_up=self._stacked([(f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner)]),
            down=self._row_parallel(f"{mlp}.down_proj", inner),
        )

    def _vocabulary(self, name: str) -> Tensor:
        shard = self._checkpoint.read(name, self._ids).to(self.device)
        return F.pad(shard, (0, 0, 0, self._rows - shard.shape[0]))

    def _stacked(self, parts: list[tuple[str, slice]]) -> Projection:
        """Column-parallel layers that read the same input, with their output rows concatenated."""
        bias = None
        if f"{parts[0][0]}.bias" in self._checkpoint.tensors:
            bias = torch.cat([self._read(f"{name}.bias", rows) for name, rows in parts])
        each = [self._blocks(f"{name}.weight", rows) for name, rows in parts]
        blocks = [part for part in each if part is not None]
        if len(blocks) == len(each) and (joined := stacked(blocks)) is not None:
            return replace(self._of_blocks(joined), bias=bias)
        linears = [self._quantized_or_read(f"{name}.weight", rows) for name, rows in parts]
        weight = torch.cat([linear.weight for linear in linears])
        scales = [linear.scale for linear in linears if linear.scale is not None]
        return Projection(weight, bias, torch.cat(scales) if scales else None)

    def _row_parallel(self, name: str, columns: slice) -> Projection:
        """A layer whose input is split over ranks; its bias is added by rank 0 alone, before the sum."""
        blocks = self._blocks(f"{name}.weight", columns=columns)
        if blocks is not None:
            linear = self._of_blocks(blocks)
        else:
            linear = self._quantized_or_read(f"{name}.weight", columns=columns)
        has_bias = f"{name}.bias" in self._checkpoint.tensors and self._group.rank == 0
        return replace(linear, bias=self._read(f"{name}.bias") if has_bias else None)

    def _blocks(
        self, name: str, rows: slice = slice(None), columns: slice = slice(None), bits: int = 4
    ) -> Blocks | None:
        """Returns part of a matrix in blocks if it is stored so, or else quantised to `bits` if that is asked for."""
        stored = self._checkpoint.blocks(name, rows, columns) if self.in_blocks else None
        if self._quantized != "int4" or (stored is not None and stored.minima is not None):
            return stored
        first, last, _ = columns.indices(self._checkpoint.tensors[name].shape[1])
        if first % BLOCK or last % BLOCK:
            inputs = f"inputs {first} to {last - 1}"
            raise StartupError(f"quantize int4: a rank would have {inputs} of {name}, not whole blocks of {BLOCK}")
        try:
            return quantize.in_blocks(self._checkpoint.read(name, rows, columns), bits)
        except ValueError as error:
            raise StartupError(f"quantize int4: tensor {name}: {error}") from None

    def _of_blocks(self, blocks: Blocks) -> Projection:
        self.bytes_read += blocks.nbytes
        return Projection(torch.empty(blocks.codes.shape, dtype=self.dtype, device="meta"), None, blocks=blocks)

    def _quantized_or_read(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Projection:
        if self._quantized == "int8":
            return self._in_int8(self._checkpoint.read(name, rows), columns)
        return Projection(self._read(name, rows, columns), None)

    def _in_int8(self, weight: Tensor, columns: slice = slice(None)) -> Projection:
        """Quantises `weight`, whose rows must be whole for their scales, and keeps only `columns`."""
        steps, scale = quantize.quantize(weight)
        return Projection(self._counted(steps[:, columns].contiguous()), None, self._counted(scale))

    def _read(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        tensor = self._checkpoint.read(name, rows, columns)
        return self._counted(tensor.to(dtype=self.dtype, device=self.device))

    def _counted(self, tensor: Tensor) -> Tensor:
        self.bytes_read += tensor.nbytes
        return tensor

    def _check_tied(self) -> None:
        if not torch.equal(self._checkpoint.read(HEAD, self._ids), self._checkpoint.read(EMBEDDING, self._ids)):
            file = self._checkpoint.tensors[HEAD].file.name
            raise StartupError(f"{file}: tensor {HEAD} differs from {EMBEDDING}, but config.json ties them")
