"""Reads `quantization_config` of a config.json: how the weights of linear layers are stored.

Formats: GPTQ (as AutoGPTQ and GPTQModel write it), AWQ (AutoAWQ's "gemm" order), FP8 with a scale for each tensor or
block (DeepSeek, Qwen3-FP8, AutoFP8), and compressed-tensors (packed integers, int8, FP8); of experts MXFP4 (gpt-oss).
Activations are never quantised: settings and scales for them have no effect. Anything else is a StartupError of one
line with the field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from baton.core.errors import StartupError
from baton.models.name_patterns import NamePattern, PatternError, Steps

Storage = Literal["gptq", "awq", "packed", "plain"]
_FIELD = "config.json: quantization_config"
_METHODS = ("gptq", "awq", "fp8", "compressed-tensors")
_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_MAX_STEPS = 10_000_000
"""To match the expressions of a config with all modules: published ones take about 100 for each."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a linear layer's weight [outputs, inputs] is stored.

    `storage`: integers in 32-bit words, with the tensors of "gptq", "awq" or compressed-tensors ("packed"), or a
    "plain" matrix of int8 or FP8. A scale is for `outputs` x `inputs` weights, 0 meaning all. `symmetric`: the zero
    point is the middle of the integers, and is not stored ("gptq" and "awq" always store it). `offset_zeros`: a stored
    zero point is one less than the true one. `scale_name` is that of the tensor of scales.
    """

    storage: Storage
    bits: int
    outputs: int
    inputs: int
    symmetric: bool = False
    offset_zeros: bool = False
    scale_name: str = "weight_scale"


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """`schemes` by the modules that they are for: names, "Linear" for all linear layers, or regular expressions after
    "re:". Modules that match `ignored` are not quantised."""

    method: str
    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]
    ignored: tuple[str, ...] = ()
    _patterns: Mapping[str, NamePattern] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        steps, listed = Steps(_MAX_STEPS), [self.ignored, *(targets for targets, _ in self.schemes)]
        patterns = {
            name: NamePattern(_FIELD, name[3:], steps) for names in listed for name in names if name.startswith("re:")
        }
        object.__setattr__(self, "_patterns", patterns)

    def ignores(self, module: str) -> bool:
        """Raises StartupError for expressions that take too many steps."""
        return any(self._matches(target, module) for target in self.ignored)

    def scheme(self, module: str) -> Scheme | None:
        """Returns how the weight of a linear layer is stored, None if it is not quantised. Names and expressions come
        before "Linear". Raises StartupError as `ignores` does."""
        if self.ignores(module):
            return None
        for targets, scheme in self.schemes:
            if any(self._matches(target, module) for target in targets):
                return scheme
        return next((scheme for targets, scheme in self.schemes if "Linear" in targets), None)

    def _matches(self, target: str, module: str) -> bool:
        """Whether `target` names the module, one that it is in, or the end of its name; or, after "re:", matches its
        beginning (as in compressed-tensors and GPTQModel)."""
        pattern = self._patterns.get(target)
        if pattern is None:
            return f".{target}." in f".{module}."
        try:
            return pattern.matches_beginning(module)
        except PatternError as error:
            raise StartupError(str(error)) from None


def parse_quantization_config(config: object) -> QuantizationConfig:
    """Parses the object. Raises StartupError with one line that names the invalid or unsupported field."""
    if not isinstance(config, Mapping):
        raise StartupError(f"{_FIELD} must be an object")
    method = config.get("quant_method")
    match method:
        case "gptq":
            return _gptq(config)
        case "awq":
            return _awq(config)
        case "fp8":
            return _fp8(config)
        case "compressed-tensors":
            return _compressed(config)
    raise _unsupported("quant_method", method, _METHODS)


def parse_experts_quantization(config: object) -> QuantizationConfig:
    """Parses the object of a model that transformers computes, whose experts alone are quantised: gpt-oss in MXFP4.
    Raises StartupError as `parse_quantization_config` does."""
    if not isinstance(config, Mapping):
        raise StartupError(f"{_FIELD} must be an object")
    if config.get("quant_method") != "mxfp4":
        raise StartupError(
            f"{_FIELD}.quant_method {config.get('quant_method')!r:.60} is not supported for a model that transformers"
            " computes (only mxfp4)"
        )
    ignored = (re.escape(name).replace(r"\*", "[^.]*") for name in _names(config, "modules_to_not_convert"))
    return QuantizationConfig("mxfp4", (), _checked("modules_to_not_convert", [f"re:{name}" for name in ignored]))


def _gptq(config: Mapping[str, Any]) -> QuantizationConfig:
    bits = _one_of(config, "bits", (4, 8))
    kind = _one_of(config, "checkpoint_format", ("gptq", "gptq_v2"), config.get("format") or "gptq")
    if config.get("is_marlin_format"):
        raise _unsupported("is_marlin_format", True, (False,))
    rules = config.get("dynamic") or {}
    # Qwen's models have rules without any change, too.
    if not isinstance(rules, Mapping) or not all(str(rule).startswith("-:") or not rules[rule] for rule in rules):
        raise StartupError(f"{_FIELD}.dynamic is only supported with rules that leave layers out (-:)")
    ignored = _checked("dynamic", [f"re:{rule[2:]}" for rule in map(str, rules) if rule.startswith("-:")])
    scheme = Scheme("gptq", bits, 1, _group(config, "group_size"), False, kind == "gptq", "scales")
    return QuantizationConfig("gptq", ((("Linear",), scheme),), ignored)


def _awq(config: Mapping[str, Any]) -> QuantizationConfig:
    bits = _one_of(config, "bits", (4,), config.get("w_bit"))
    order = config.get("version") or config.get("format") or "gemm"
    if not isinstance(order, str) or order.lower() != "gemm":
        raise _unsupported("version", order, ("gemm",))
    _one_of(config, "zero_point", (True,), True)
    group = _group(config, "group_size" if "group_size" in config else "q_group_size")
    scheme = Scheme("awq", bits, 1, group, scale_name="scales")
    return QuantizationConfig("awq", ((("Linear",), scheme),), _names(config, "modules_to_not_convert"))


def _fp8(config: Mapping[str, Any]) -> QuantizationConfig:
    _one_of(config, "fmt", ("e4m3",), "e4m3")
    block = config.get("weight_block_size")
    if block is None:
        scheme = Scheme("plain", 8, 0, 0, symmetric=True)
    else:
        outputs, inputs = _block("weight_block_size", block)
        scheme = Scheme("plain", 8, outputs, inputs, symmetric=True, scale_name="weight_scale_inv")
    ignored = _names(config, "modules_to_not_convert") + _names(config, "ignored_layers")
    return QuantizationConfig("fp8", ((("Linear",), scheme),), ignored)


def _compressed(config: Mapping[str, Any]) -> QuantizationConfig:
    _one_of(config, "quantization_status", ("compressed",), "compressed")
    for setting, fine in (("sparsity_config", ("dense", None)), ("transform_config", ())):
        value = config.get(setting)
        if value and not (isinstance(value, Mapping) and value.get("format") in fine):
            raise StartupError(f"{_FIELD}.{setting} is not supported")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise StartupError(f"{_FIELD}.config_groups is missing or empty")
    schemes = []
    for name, group in groups.items():
        where = f"config_groups.{name!s:.40}"
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise StartupError(f"{_FIELD}.{where}.weights must be an object")
        stored = group.get("format") or config.get("format")
        if stored not in _COMPRESSED:
            raise _unsupported(f"{where}.format" if group.get("format") else "format", stored, _COMPRESSED)
        schemes.append((_names(group, "targets", where), _compressed_scheme(stored, group["weights"], where)))
    return QuantizationConfig("compressed-tensors", tuple(schemes), _names(config, "ignore"))


def _compressed_scheme(stored: str, weights: Mapping[str, Any], group: str) -> Scheme:
    where = f"{group}.weights"
    kinds = {"pack-quantized": ("int",), "int-quantized": ("int",), "float-quantized": ("float",)}
    kind = _one_of(weights, "type", kinds.get(stored, ("int", "float")), "int", where)
    bits = _one_of(weights, "num_bits", (4, 8) if stored == "pack-quantized" else (8,), None, where)
    symmetric = _one_of(weights, "symmetric", (True, False) if kind == "int" else (True,), True, where)
    _one_of(weights, "dynamic", (False,), False, where)
    strategy = weights.get("strategy")
    if strategy is None:
        size = weights.get("group_size")
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    match strategy:
        case "tensor":
            outputs, inputs = 0, 0
        case "channel":
            outputs, inputs = 1, 0
        case "group":
            outputs, inputs = 1, _group(weights, "group_size", where)
        case "block" if stored != "pack-quantized":
            outputs, inputs = _block(f"{where}.block_structure", weights.get("block_structure"))
        case _:
            raise _unsupported(f"{where}.strategy", strategy, ("tensor", "channel", "group"))
    return Scheme("packed" if stored == "pack-quantized" else "plain", bits, outputs, inputs, symmetric)


def _one_of(
    config: Mapping[str, Any], field: str, values: tuple[Any, ...], default: Any = None, where: str = ""
) -> Any:
    value = config.get(field)
    if value is None:
        value = default
    for known in values:
        if type(value) is type(known) and value == known:
            return known
    raise _unsupported(f"{where}.{field}" if where else field, value, values)


def _unsupported(field: str, value: object, supported: tuple[Any, ...]) -> StartupError:
    listed = ", ".join(str(known) for known in supported)
    return StartupError(f"{_FIELD}.{field} {value!r:.60} is not supported (only {listed})")


def _group(config: Mapping[str, Any], field: str, where: str = "") -> int:
    """Returns the inputs that share a scale; -1 means all, which is 0 here."""
    value = config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or (value != -1 and not 0 < value <= 1 << 17):
        path = f"{where}.{field}" if where else field
        raise StartupError(f"{_FIELD}.{path} must be -1 or the inputs of a group, not {value!r:.60}")
    return max(value, 0)


def _block(field: str, value: object) -> tuple[int, int]:
    if isinstance(value, list) and len(value) == 2:
        outputs, inputs = value
        if type(outputs) is int and type(inputs) is int and 0 < outputs <= 1 << 17 and 0 < inputs <= 1 << 17:
            return outputs, inputs
    raise StartupError(f"{_FIELD}.{field} must be two sizes of a block, not {value!r:.60}")


def _names(config: Mapping[str, Any], field: str, where: str = "") -> tuple[str, ...]:
    return _checked(f"{where}.{field}" if where else field, config.get(field) or [])


def _checked(path: str, values: object) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise StartupError(f"{_FIELD}.{path} must be a list of names")
    for value in values:
        if value.startswith("re:"):
            try:
                NamePattern(f"{_FIELD}.{path}", value[3:], Steps())
            except PatternError as error:
                raise StartupError(str(error)) from None
    return tuple(values)
