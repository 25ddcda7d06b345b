"""Checkpoints as quantisers publish them, made of random integers, and the weights that they stand for.

Integers are packed here word by word, by the formulas of AutoGPTQ, AutoAWQ and compressed-tensors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
Layer = Callable[[int, int, torch.Generator], tuple[Tensors, Tensor]]
"""From outputs, inputs and a generator: the tensors of one layer by their last names, and its weight in float32."""
ORDER_MAP = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's


def words(integers: Tensor, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Packs unsigned integers [a, b] into int32 along an axis: integer `order[i]` of a word has bits i * `bits` up."""
    values = integers.numpy().astype(np.uint32)
    values = values if axis == 1 else values.T
    per_word = 32 // bits
    values = np.pad(values, ((0, 0), (0, -values.shape[1] % per_word)))
    packed = np.zeros((values.shape[0], values.shape[1] // per_word), np.uint32)
    for i in range(per_word):
        packed |= values[:, (order[i] if order else i) :: per_word] << np.uint32(bits * i)
    packed = packed if axis == 1 else packed.T
    return torch.from_numpy(np.ascontiguousarray(packed).view(np.int32))


def _integers(shape: tuple[int, int], bits: int, made: torch.Generator, low: int = 0) -> Tensor:
    return torch.randint(low, 1 << bits, shape, generator=made)


def _scales(shape: tuple[int, ...], dtype: torch.dtype, made: torch.Generator, size: float = 0.02) -> Tensor:
    return ((torch.rand(shape, generator=made) + 0.5) * size).to(dtype)


def _groups_of(inputs: int, group: int) -> Tensor:
    return torch.arange(inputs) // (group if group > 0 else inputs)


def gptq(
    bits: int = 4, group: int = 32, version: int = 1, act_order: bool = False, symmetric: bool = False
) -> tuple[dict[str, Any], Layer]:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": symmetric}
    config |= {"checkpoint_format": "gptq_v2"} if version == 2 else {}

    def layer(n: int, k: int, made: torch.Generator) -> tuple[Tensors, Tensor]:
        of = _groups_of(k, group)
        of = of[torch.randperm(k, generator=made)] if act_order else of
        values, scales = _integers((n, k), bits, made), _scales((n, int(of.max()) + 1), torch.float16, made, 0.5**bits)
        zeros = _integers((n, scales.shape[1]), bits, made, low=1)
        if symmetric:
            zeros = torch.full_like(zeros, 1 << bits - 1)
        tensors = {
            "qweight": words(values.T, bits, 0),
            "qzeros": words((zeros - (2 - version)).T, bits, 1),
            "scales": scales.T.contiguous(),
            "g_idx": of.int(),
        }
        return tensors, (values - zeros[:, of]) * scales.float()[:, of]

    return config, layer


def awq(group: int = 32) -> tuple[dict[str, Any], Layer]:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}

    def layer(n: int, k: int, made: torch.Generator) -> tuple[Tensors, Tensor]:
        of = _groups_of(k, group)
        values, scales = _integers((n, k), 4, made), _scales((n, int(of.max()) + 1), torch.float16, made)
        zeros = _integers((n, scales.shape[1]), 4, made)
        tensors = {
            "qweight": words(values.T, 4, 1, ORDER_MAP),
            "qzeros": words(zeros.T, 4, 1, ORDER_MAP),
            "scales": scales.T.contiguous(),
        }
        return tensors, (values - zeros[:, of]) * scales.float()[:, of]

    return config, layer


def compressed(stored: str, **weights: Any) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors with one group."""
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def packed(
    bits: int = 4, group: int = 32, symmetric: bool = True, act_order: bool = False, dtype: torch.dtype = torch.bfloat16
) -> tuple[dict[str, Any], Layer]:
    strategy = {"strategy": "group", "group_size": group} if group > 0 else {"strategy": "channel"}
    config = compressed("pack-quantized", num_bits=bits, symmetric=symmetric, **strategy)

    def layer(n: int, k: int, made: torch.Generator) -> tuple[Tensors, Tensor]:
        of = _groups_of(k, group)
        of = of[torch.randperm(k, generator=made)] if act_order else of
        values, scales = _integers((n, k), bits, made), _scales((n, int(of.max()) + 1), dtype, made, 0.5**bits)
        tensors = {
            "weight_packed": words(values, bits, 1),
            "weight_scale": scales,
            "weight_shape": torch.tensor([n, k]),
        }
        zeros = torch.full_like(scales, 1 << bits - 1, dtype=torch.int64)
        if not symmetric:
            zeros = _integers((n, scales.shape[1]), bits, made)
            tensors["weight_zero_point"] = words(zeros, bits, 0)
        if act_order:
            tensors["weight_g_idx"] = of.int()
        return tensors, (values - zeros[:, of]) * scales.float()[:, of]

    return config, layer


def plain(
    kind: str, block: tuple[int, int] | None = None, method: str = "compressed-tensors", symmetric: bool = True
) -> tuple[dict[str, Any], Layer]:
    """Matrices of int8 ("int") or FP8 ("float") with scales for blocks, one for each output (0, 0) or one (None)."""
    config: dict[str, Any]
    if method == "fp8":
        config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        config |= {"weight_block_size": list(block)} if block else {}
    else:
        strategy = "tensor" if block is None else "channel" if block == (0, 0) else "block"
        size = {"block_structure": list(block or ())} if strategy == "block" else {}
        config = compressed(f"{kind}-quantized", type=kind, strategy=strategy, symmetric=symmetric, **size)
    name = "weight_scale_inv" if method == "fp8" and block else "weight_scale"

    def layer(n: int, k: int, made: torch.Generator) -> tuple[Tensors, Tensor]:
        outputs, inputs = block or (n, k)
        outputs, inputs = outputs or 1, inputs or k
        shape = (-(-n // outputs), -(-k // inputs))
        scales = _scales(shape, torch.float32 if method == "fp8" else torch.bfloat16, made, 0.5**8)
        if kind == "int":
            values = torch.randint(-128, 128, (n, k), generator=made, dtype=torch.int8)
        else:
            values = (torch.randn((n, k), generator=made) * 16).to(torch.float8_e4m3fn)
        tensors = {"weight": values, name: scales if block else scales[0]}
        tensors["input_scale"] = torch.ones(1)
        weight = values.float()
        by_weight = torch.arange(n)[:, None] // outputs, torch.arange(k) // inputs
        if not symmetric:
            zeros = torch.randint(-128, 128, shape, generator=made, dtype=torch.int8)
            tensors["weight_zero_point"] = zeros
            weight = weight - zeros.float()[by_weight]
        return tensors, weight * scales.float()[by_weight]

    return config, layer


def write_quantized(source: Path, target: Path, kind: tuple[dict[str, Any], Layer]) -> Tensors:
    """Writes the checkpoint in `source` (one file, random weights) with quantised linear layers; returns what its
    matrices are, in float32."""
    config, layer = kind
    shutil.copytree(source, target)
    tensors, weights, made = load_file(source / "model.safetensors"), Tensors(), torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        shape = tensors.pop(name).shape
        stored, weights[name] = layer(*shape, made)
        tensors |= {f"{name.removesuffix('weight')}{last}": value for last, value in stored.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    edit_config(target, quantization_config=config)
    return weights


def edit_config(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
