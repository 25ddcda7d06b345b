"""LoRA adapters as PEFT saves them: what `adapter_config.json` means for a model, and the identity of an adapter.

An adapter adds scaling * B (A x) to linear layers of the model, where A [rank, inputs] and B [outputs, rank] are its
tensors `base_model.model.MODULE.lora_A.weight` and `lora_B` (Hu et al. 2021). Names and rules are those of PEFT's
LoraConfig; what changes the model in another way is refused by name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.core.errors import InvalidRequest
from baton.models.model_config import AnyConfig, ModelConfig
from baton.models.name_patterns import NamePattern, PatternError, Steps

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
_MAX_RANK = 4096
_REFUSED = (
    *("modules_to_save", "use_dora", "lora_bias", "fan_in_fan_out", "layer_replication", "target_parameters"),
    *("trainable_token_indices", "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config"),
    *("monteclora_config", "velora_config", "megatron_config", "lora_ga_config"),
)
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")
"""Initialisations after which the adapter belongs to other base weights than the checkpoint's. PEFT converts such an
adapter when it saves it, and then writes `true`."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """A and B of one linear layer: their shapes [rank, inputs] and [outputs, rank], and the factor of their product."""

    rank: int
    scaling: float
    outputs: int
    inputs: int


def adapter_digest(config: bytes, weights: bytes) -> str:
    """Returns the identity of an adapter, 32 hex digits: that of the bytes of its two files."""
    digest = hashlib.blake2b(digest_size=16, person=b"baton adapter")
    digest.update(len(config).to_bytes(8, "little") + config)
    digest.update(weights)
    return digest.hexdigest()


def adaptable(config: AnyConfig) -> ModelConfig:
    """Returns the config of a model that can have adapters. Raises InvalidRequest if transformers computes it."""
    if not isinstance(config, ModelConfig):
        raise InvalidRequest("LoRA adapters need a model that Baton computes itself (--model-impl)", param="lora_path")
    return config


def adapted_modules(text: bytes, config: ModelConfig, max_rank: int) -> dict[str, LowRank]:
    """Returns the linear layers that an adapter changes, by their names in the model, from its `adapter_config.json`.

    Raises:
        InvalidRequest: the file is no such config, or asks for what is not supported; names the key.
    """
    try:
        return _adapted_modules(_read(text), config, max_rank)
    except PatternError as error:
        raise _invalid(str(error)) from None


def _adapted_modules(given: Mapping[str, Any], config: ModelConfig, max_rank: int) -> dict[str, LowRank]:
    _refuse_others(given)
    rank, alpha, steps = _number(given, "r", 8), _number(given, "lora_alpha", 8), Steps()
    ranks, alphas = _pattern(given, "rank_pattern", steps), _pattern(given, "alpha_pattern", steps)
    targets, excluded = _names(given, "target_modules", steps), _names(given, "exclude_modules", steps)
    if targets is None:
        raise _invalid("target_modules is missing")
    layers = given.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers
    if layers is not None and not isinstance(layers, list):
        raise _invalid(f"layers_to_transform must be a list of layers, not {layers!r:.60}")
    modules: dict[str, LowRank] = {}
    for index in range(config.num_layers):
        if layers and index not in layers:
            continue
        for linear, (outputs, inputs) in config.linears.items():
            name = f"model.layers.{index}.{linear}"
            if _matches(targets, name) and not (excluded is not None and _matches(excluded, name)):
                own = _by_pattern(ranks, name, rank)
                if own != int(own) or not 1 <= own <= min(max_rank, _MAX_RANK):
                    raise _invalid(f"the rank of {name} is {own:g}; --max-lora-rank allows 1 to {max_rank}")
                divisor = own**0.5 if given.get("use_rslora") else own
                scaling = _by_pattern(alphas, name, alpha) / divisor
                modules[name] = LowRank(int(own), scaling, outputs, inputs)
    if not modules:
        raise _invalid(f"target_modules {given['target_modules']!r:.100} match no linear layer of this model")
    return modules


def adapter_tensors(modules: Mapping[str, LowRank]) -> dict[str, tuple[int, ...]]:
    """Returns name and shape of every tensor of an adapter."""
    expected: dict[str, tuple[int, ...]] = {}
    for module, low in modules.items():
        expected[tensor_name(module, "A")] = (low.rank, low.inputs)
        expected[tensor_name(module, "B")] = (low.outputs, low.rank)
    return expected


def check_tensors(modules: Mapping[str, LowRank], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compares the tensors of an adapter's file with those that it must have. Raises InvalidRequest, which names the
    first that differs."""
    expected = adapter_tensors(modules)
    for name in (*expected, *shapes):
        if name not in shapes:
            reason = f"tensor {name} is missing"
        elif name not in expected:
            reason = f"tensor {name!r:.200} is of no linear layer that target_modules selects in this model"
        elif shapes[name] != expected[name]:
            reason = f"tensor {name} has shape {list(shapes[name])}, expected {list(expected[name])}"
        else:
            continue
        raise InvalidRequest(f"{WEIGHTS_FILE}: {reason}", param="lora_path")


def tensor_name(module: str, matrix: str) -> str:
    return f"{PREFIX}{module}.lora_{matrix}.weight"


def _read(text: bytes) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"not JSON: {str(error)[:100]}") from None
    if not isinstance(given, dict) or given.get("peft_type") != "LORA":
        kind = given.get("peft_type") if isinstance(given, dict) else given
        raise _invalid(f"peft_type must be LORA, not {kind!r:.60}")
    return given


def _refuse_others(given: Mapping[str, Any]) -> None:
    for key in _REFUSED:
        if given.get(key):
            raise _invalid(f"{key} is not supported, given {given[key]!r:.100}")
    if given.get("bias", "none") != "none":
        raise _invalid(f"bias {given['bias']!r:.60} is not supported: an adapter may not change biases")
    if isinstance(start := given.get("init_lora_weights"), str) and start.startswith(_CHANGES_BASE):
        raise _invalid(f"init_lora_weights {start!r:.60} is not supported: convert the adapter to plain LoRA with PEFT")


def _number(given: Mapping[str, Any], key: str, default: float) -> float:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise _invalid(f"{key} must be a number above 0, not {value!r:.60}")
    return value


def _pattern(given: Mapping[str, Any], key: str, steps: Steps) -> list[tuple[NamePattern, float]]:
    pattern = given.get(key) or {}
    if not isinstance(pattern, dict):
        raise _invalid(f"{key} must be an object, not {pattern!r:.60}")
    return [(NamePattern(key, name, steps), _number(pattern, name, 0)) for name in pattern]


def _by_pattern(pattern: Sequence[tuple[NamePattern, float]], name: str, default: float) -> float:
    return next((value for names, value in pattern if names.matches_end(name)), default)


def _names(given: Mapping[str, Any], key: str, steps: Steps) -> NamePattern | tuple[str, ...] | None:
    value = given.get(key)
    if value is None:
        return None
    if isinstance(value, str):
        return NamePattern(key, ".*" if value == "all-linear" else value, steps)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _invalid(f"{key} must be a string or a list of strings, not {value!r:.60}")
    return tuple(value)


def _matches(names: NamePattern | tuple[str, ...], module: str) -> bool:
    """Whether PEFT would select a module: by a regular expression for all of its name, or by its name or the end of
    it."""
    if isinstance(names, NamePattern):
        return names.matches(module)
    return any(module == name or module.endswith(f".{name}") for name in names)


def _invalid(reason: str) -> InvalidRequest:
    return InvalidRequest(f"{CONFIG_FILE}: {reason}", param="lora_path")
