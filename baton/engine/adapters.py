"""LoRA adapters of a loaded model: reading one rank's share of an adapter, and the table of those that are loaded.

The ranks share an adapter as they share the model: layers that are split by outputs have slices of B, those that are
split by inputs slices of A, whose product is part of the layer's sum over ranks. The scaling is part of B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from baton.core.errors import InvalidRequest, InvariantError, Unavailable
from baton.engine.parallel import TPGroup
from baton.engine.weights import Shares
from baton.models.adapter_config import WEIGHTS_FILE, LowRank, adaptable, adapted_modules, check_tensors, tensor_name
from baton.models.model_config import AnyConfig, ModelConfig

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class OutputPart:
    """B of one module, scaled: weight [outputs, rank], for the layer's outputs from `first` on."""

    first: int
    weight: Tensor


@dataclass(frozen=True, slots=True)
class AdapterProjection:
    """What an adapter adds to a linear layer, which may be several modules stacked (`LayerWeights`): `a` [ranks,
    inputs] stacks the A of those that it changes, `parts` are their B, in the same order."""

    a: Tensor
    parts: tuple[OutputPart, ...]


@dataclass(frozen=True, slots=True)
class LayerProjections:
    """One decoder layer; None for a linear layer that the adapter does not change."""

    qkv: AdapterProjection | None
    attention_out: AdapterProjection | None
    gate_up: AdapterProjection | None
    down: AdapterProjection | None


class LoadedAdapters(dict[str, Any]):
    """The loaded adapters by digest, each as the model's arithmetic needs it."""

    def __missing__(self, digest: str) -> Any:
        raise InvariantError(f"a step has a row of adapter {digest:.12}, which is not loaded")


class Adapters:
    """The LoRA adapters of a model on one rank. `config` is the whole model's; `like` has the dtype and the device of
    its computation; `model` is a Model or NativeModel."""

    def __init__(self, model: Any, config: AnyConfig, group: TPGroup, like: Tensor) -> None:
        self._model, self._config, self._group, self._like = model, config, group, like

    def load(self, digest: str, config_text: bytes, weights: bytes, max_rank: int) -> None:
        """Loads an adapter, on any thread; steps may have rows of it from then on. Raises as `read_adapter` does, and
        Unavailable if there is no memory for it."""
        try:
            with torch.no_grad():
                config = adaptable(self._config)
                layers = read_adapter(config_text, weights, config, max_rank, self._group, self._like)
                self._model.add_adapter(digest, layers)
        except torch.OutOfMemoryError:
            raise Unavailable(f"{self._like.device} has no memory for the adapter; lower --kv-memory-gib") from None
        if self._like.is_cuda:  # the steps run on other streams
            torch.cuda.current_stream(self._like.device).synchronize()

    def drop(self, digest: str) -> None:
        """Drops an adapter, if it is loaded. No step may have a row of it any more."""
        self._model.adapters.pop(digest, None)


def read_adapter(
    config_text: bytes, weights: bytes, config: ModelConfig, max_rank: int, group: TPGroup, like: Tensor
) -> list[LayerProjections]:
    """Returns this rank's share of an adapter, layer by layer, in the dtype and on the device of `like`. `config_text`
    and `weights` are the bytes of its files (adapter_config.py), `config` is the whole model's.

    Raises:
        InvalidRequest: the adapter does not fit this model, or is damaged; names the key or the tensor.
    """
    modules = adapted_modules(config_text, config, max_rank)
    tensors = _tensors(weights, modules)
    shares = Shares.of(config, group)

    def b(module: str, outputs: slice) -> Tensor:
        scaled = tensors[tensor_name(module, "B")][outputs].float() * modules[module].scaling
        return scaled.to(like).contiguous()

    def stacked(parts: list[tuple[str, slice]]) -> AdapterProjection | None:
        """Column-parallel modules that read the same input."""
        firsts = accumulate((rows.stop - rows.start for _, rows in parts), initial=0)
        adapted = [(first, *part) for first, part in zip(firsts, parts, strict=False) if part[0] in modules]
        if not adapted:
            return None
        a = torch.cat([tensors[tensor_name(module, "A")] for _, module, _ in adapted])
        return AdapterProjection(
            a.to(like), tuple(OutputPart(first, b(module, rows)) for first, module, rows in adapted)
        )

    def row_parallel(module: str, inputs: slice) -> AdapterProjection | None:
        if module not in modules:
            return None
        a = tensors[tensor_name(module, "A")][:, inputs].contiguous()
        return AdapterProjection(a.to(like), (OutputPart(0, b(module, slice(None))),))

    def layer(name: str) -> LayerProjections:
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        return LayerProjections(
            qkv=stacked([(f"{attention}.{p}_proj", shares.heads if p == "q" else shares.kv_heads) for p in "qkv"]),
            attention_out=row_parallel(f"{attention}.o_proj", shares.heads),
            gate_up=stacked([(f"{mlp}.{p}_proj", shares.inner) for p in ("gate", "up")]),
            down=row_parallel(f"{mlp}.down_proj", shares.inner),
        )

    return [layer(f"model.layers.{index}") for index in range(config.num_layers)]


def _tensors(weights: bytes, modules: Mapping[str, LowRank]) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(weights)
    except (SafetensorError, ValueError, KeyError) as error:
        raise _invalid(f"damaged safetensors file: {' '.join(str(error).split())[:200]}") from None
    check_tensors(modules, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES or not torch.isfinite(tensor).all():
            raise _invalid(f"tensor {name} must have finite values in float32, bfloat16 or float16")
    return tensors


def _invalid(reason: str) -> InvalidRequest:
    return InvalidRequest(f"{WEIGHTS_FILE}: {reason}", param="lora_path")
