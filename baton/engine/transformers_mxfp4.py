"""Experts that a checkpoint stores in MXFP4, as gpt-oss is published, for a model that transformers computes.

A parameter [experts, k, n] is stored as two tensors, NAME_blocks [experts, n, k / 32, 16] and NAME_scales
[experts, n, k / 32]. transformers gets one object in place of both, which reads like a tensor of safetensors. Where the
compiled kernels compute from blocks it reads as one NaN, and each expert is packed from the file afterwards; else it is
dequantised while it is read, one expert after another.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import modeling_utils

from baton.core.errors import StartupError
from baton.engine.blocks import Blocks, is_half
from baton.engine.checkpoint import Checkpoint
from baton.engine.kernels.native import Arena, Kernels, Linear, pack_blocks, pack_mxfp4
from baton.engine.mxfp4 import INPUTS, dequantize, in_steps, step_sizes
from baton.models.quantization_config import QuantizationConfig

log = logging.getLogger("baton.engine")

Form = Literal["mxfp4", "blocks", ""]
"""What kernels compute from: MXFP4, or the same weights as steps of 8 bits in blocks; "": dequantised weights."""
_BYTES = {"mxfp4": 17, "blocks": 34}  # of a block of 32 weights
_BLOCKS, _SCALES = "_blocks", "_scales"


def form_for(level: str | None, dtype: torch.dtype) -> Form:
    """`level` is that of the compiled kernels, None for torch's (gemm.h)."""
    if level in ("avx2", "avx512"):
        return "mxfp4"
    return "blocks" if level is not None and dtype == torch.bfloat16 else ""


class Mxfp4Weight:
    """One parameter, or the `part` of it that was read last: slices of experts, inputs and outputs. `form` becomes ""
    with a part that no kernel computes from its blocks. Raises StartupError for tensors of other shapes or dtypes."""

    def __init__(self, checkpoint: Checkpoint, name: str, form: Form, dtype: torch.dtype) -> None:
        self.form, self._checkpoint, self._name, self._dtype = form, checkpoint, name, dtype
        blocks, scales = (checkpoint.tensors.get(f"{name}{kind}") for kind in (_BLOCKS, _SCALES))
        if blocks is None or scales is None:
            raise StartupError(f"tensor {name}{_SCALES if blocks else _BLOCKS} is missing, which MXFP4 requires")
        for stored, shape in ((blocks, (*scales.shape, INPUTS // 2)), (scales, blocks.shape[:3])):
            if stored.shape != shape or stored.dtype != torch.uint8:
                raise StartupError(
                    f"{stored.file.name}: tensor {stored.name} has shape {list(stored.shape)} and dtype {stored.dtype},"
                    f" MXFP4 requires {list(shape)} and uint8"
                )
        experts, outputs, each = scales.shape
        self._shape = (experts, each * INPUTS, outputs)
        self.part = self._slices(...)

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def __getitem__(self, where: Any) -> Tensor:
        """Returns a part [experts, k, n]: its weights, or with a `form` one NaN that stands for all of them."""
        self.choose(where)
        experts, inputs, _ = self.part
        if self.form == "blocks" and not all(is_half(in_steps(*self.read(i))[1]) for i in range(_length(experts))):
            self.form = ""
        shape = [_length(each) for each in self.part]
        if self.form:
            return torch.full((), torch.nan, dtype=self._dtype).expand(shape)
        weights = torch.empty(shape, dtype=self._dtype)
        before = inputs.start % INPUTS
        for index, weight in enumerate(weights):
            weight.copy_(dequantize(*self.read(index))[:, before : before + shape[1]].T)
        return weights

    def sample(self) -> None:
        """Sets the `form` that reading would, as the scales of one expert show it."""
        if self.form == "blocks" and not is_half(step_sizes(self._read(_SCALES, 0))):
            self.form = ""

    def choose(self, where: Any) -> None:
        """Sets the part."""
        self.part = _, inputs, _ = self._slices(where)
        if inputs.start % INPUTS or inputs.stop % INPUTS:
            self.form = ""

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns the blocks [n, k / 32, 16] and scales [n, k / 32] of one of the part's experts. Raises StartupError
        for a scale that is NaN."""
        blocks, scales = self._read(_BLOCKS, index), self._read(_SCALES, index)
        if (scales == 255).any():
            raise StartupError(f"tensor {self._name}{_SCALES} holds NaN")
        return blocks, scales

    def _read(self, kind: str, index: int) -> Tensor:
        experts, inputs, outputs = self.part
        at = slice(experts.start + index, experts.start + index + 1)
        within = slice(inputs.start // INPUTS, -(-inputs.stop // INPUTS))
        return self._checkpoint.read(f"{self._name}{kind}", at, outputs)[0][:, within]

    def _slices(self, where: Any) -> tuple[slice, ...]:
        given = () if where is Ellipsis else where if isinstance(where, tuple) else (where,)
        each = [*given, *[slice(None)] * (len(self._shape) - len(given))]
        return tuple(slice(*one.indices(size)[:2]) for one, size in zip(each, self._shape, strict=True))


@dataclass(frozen=True, slots=True)
class Mxfp4Matrix:
    """The weight [n, k] of one of the experts of a weight's part."""

    weight: Mxfp4Weight
    expert: int

    @property
    def shape(self) -> tuple[int, int]:
        _, inputs, outputs = self.weight.part
        return _length(outputs), _length(inputs)

    def pack(self, kernels: Kernels, arena: Arena, bias: Tensor | None) -> tuple[Linear, list[Tensor]]:
        """As `native.pack_weight`."""
        blocks, scales = self.weight.read(self.expert)
        if self.weight.form == "mxfp4":
            return pack_mxfp4(kernels, arena, blocks, scales, bias)
        return pack_blocks(kernels, arena, Blocks(*in_steps(blocks, scales)), bias)

    def dequantized(self) -> Tensor:
        """[n, k] in bfloat16, exact."""
        return dequantize(*self.weight.read(self.expert))


def mxfp4_weights(
    checkpoint: Checkpoint, quantization: QuantizationConfig, form: Form, dtype: torch.dtype
) -> dict[str, Mxfp4Weight]:
    """Returns the parameters that a checkpoint stores in MXFP4, by name. Raises StartupError for one that its config
    says is not quantised."""
    weights: dict[str, Mxfp4Weight] = {}
    for tensor in checkpoint.tensors:
        name = tensor.removesuffix(_BLOCKS)
        if name == tensor:
            continue
        if quantization.ignores(name):
            raise StartupError(f"tensor {tensor} is quantised, quantization_config says that it is not")
        weights[name] = Mxfp4Weight(checkpoint, name, form, dtype)
    return weights


@contextmanager
def reading_mxfp4(weights: Mapping[str, Mxfp4Weight]) -> Iterator[None]:
    """A model that transformers loads meanwhile gets `weights` in place of the tensors that they are stored in."""
    convert = modeling_utils.convert_and_load_state_dict_in_model
    stored = {f"{name}{kind}" for name in weights for kind in (_BLOCKS, _SCALES)}

    def convert_replaced(model: Any, state_dict: Mapping[str, Any], load_config: Any, **options: Any) -> Any:
        for name, parameter in model.named_parameters():
            if name in weights and list(parameter.shape) != (shape := weights[name].get_shape()):
                raise StartupError(
                    f"tensor {name} in MXFP4 has shape {shape}, config.json requires {[*parameter.shape]}"
                )
        remaining = {name: tensor for name, tensor in state_dict.items() if name not in stored}
        return convert(model=model, state_dict=remaining | dict(weights), load_config=load_config, **options)

    modeling_utils.convert_and_load_state_dict_in_model = convert_replaced
    try:
        yield
    finally:
        modeling_utils.convert_and_load_state_dict_in_model = convert


def attach(model: Any, weights: Mapping[str, Mxfp4Weight], dtype: torch.dtype) -> None:
    """Sets `baton_mxfp4` of modules whose parameters stand for weights in MXFP4, by the name of each. Logs what became
    of the weights."""
    for name, weight in weights.items():
        owner, _, leaf = name.rpartition(".")
        if weight.form:
            model.get_submodule(owner).__dict__.setdefault("baton_mxfp4", {})[leaf] = weight
    if weights:
        wide = sum(not weight.form for weight in weights.values())
        log.info(
            "experts in MXFP4: %d of %d weights are computed from their blocks, %d dequantised to %s",
            len(weights) - wide,
            len(weights),
            wide,
            str(dtype).removeprefix("torch."),
        )


def parameter_bytes(model: Any, weights: Mapping[str, Mxfp4Weight], to_dtype: float = 1.0) -> int:
    """The bytes of a model's parameters, `to_dtype` times what they take now; of those in MXFP4 what their blocks
    take."""
    total = 0.0
    for name, parameter in model.named_parameters():
        form = weights[name].form if name in weights else ""
        total += parameter.numel() * (_BYTES[form] / INPUTS if form else parameter.element_size() * to_dtype)
    return round(total)


def _length(of: slice) -> int:
    return int(of.stop - of.start)
