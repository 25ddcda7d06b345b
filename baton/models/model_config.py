"""Checks a Hugging Face `config.json` and reduces it to what Baton needs.

Every field that could make a later step fail or allocate without bound is checked here, so that an invalid directory
causes one plain line that names the field. Both spellings are read: `rope_theta`/`rope_scaling`/`torch_dtype` (before
transformers 5) and `rope_parameters`/`dtype` (since).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from baton.core.errors import StartupError
from baton.core.kv_layout import DTYPE_BYTES, DType, KVDType, KVLayout, LayerKV
from baton.models.quantization_config import (
    QuantizationConfig,
    parse_experts_quantization,
    parse_quantization_config,
)

Architecture = Literal["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]

_HEADS = "ForCausalLM", "ForSequenceClassification", "Model"
"""The ends of an architecture's name: with an LM head, with a classification head, without a head."""
_GENERATES = "ForCausalLM", "LMHead"  # in the name of an architecture that transformers computes
# The names of the longest context and of the width in the config.json of different models.
_POSITIONS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx",
    "max_target_positions",
)  # fmt: skip
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")
_LARGEST = math.nextafter(math.inf, 0.0)  # a float; math.isfinite cannot take an integer beyond it
_NO_LIMIT = 1 << 17  # the longest context of a model whose config.json has none of these
_BY_MODEL_TYPE: dict[str, Architecture] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1's scaling of the rotary frequencies: for wavelengths above original/low_freq_factor they are
    divided by `factor`, for those below original/high_freq_factor kept, and for those between blended linearly."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One dense decoder-only transformer. `windows[i]` is layer i's sliding window in positions, 0 for none. A model
    with `num_labels` has a classification head; if it has `classifier_tokens`, which are two, that is the difference of
    their rows of the LM head. One without an LM head counts as one whose embeddings are tied."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | None
    windows: tuple[int, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    torch_dtype: DType | None
    has_lm_head: bool = True
    num_labels: int = 0
    classifier_tokens: tuple[str, ...] = ()
    quantization: QuantizationConfig | None = None

    def longest(self, max_model_len: int | None) -> int:
        """As `longest_of`."""
        return longest_of(self.max_position_embeddings, max_model_len)

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """The linear layers of every decoder layer by name, with the number of outputs and inputs of each."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }

    def kv_layout(self, block_size: int, dtype: KVDType) -> KVLayout:
        """Returns the KV cache layout of this model: one attention entry per layer, all KV heads, stored in `dtype`.
        Its windows are 0 if only some layers have one: this path computes all layers from one block table."""
        windows = self.windows if all(self.windows) else (0,) * self.num_layers
        return KVLayout(
            block_size,
            tuple(LayerKV(self.num_kv_heads, self.head_dim, dtype, window=window) for window in windows),
        )


@dataclass(frozen=True, slots=True)
class GeneralConfig:
    """What Baton itself needs of a decoder that transformers implements; transformers reads the other fields."""

    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    has_lm_head: bool = True
    num_labels: int = 0
    quantization: QuantizationConfig | None = None

    def longest(self, max_model_len: int | None) -> int:
        """As `longest_of`."""
        return longest_of(self.max_position_embeddings, max_model_len)


AnyConfig = ModelConfig | GeneralConfig


def longest_of(own: int, max_model_len: int | None) -> int:
    """Returns the most tokens of a prompt and its output together: `max_model_len`, or the model's own limit (for 0 and
    None). Raises StartupError if `max_model_len` is above that limit or below 2, one token of each."""
    if max_model_len and not 2 <= max_model_len <= own:
        raise StartupError(
            f"max-model-len must be from 2 to {own}, the model's max_position_embeddings, not {max_model_len}"
        )
    return max_model_len or own


def parse_config_json(text: str | bytes) -> dict[str, Any]:
    """Returns the object in a `config.json`. Raises StartupError if it is not UTF-8 JSON with an object at the top."""
    try:
        config = json.loads(text)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise StartupError(f"config.json is not JSON: {str(error)[:200]}") from None
    if not isinstance(config, dict):
        raise StartupError("config.json must hold an object")
    return config


def parse_config(config: Mapping[str, Any], model_impl: str = "auto") -> AnyConfig:
    """Parses a `config.json` for the path that `--model-impl` selects: ModelConfig for Baton's own, GeneralConfig for
    transformers'. "auto" is Baton's own where it supports the model. Raises as `parse_model_config` does."""
    if model_impl == "baton" or (model_impl == "auto" and why_not_own(config) is None):
        return parse_model_config(config)
    _check_plain(config)
    _architecture(config)  # refuses names that are none
    for name in (config.get("architectures") or ())[:1]:
        if not any(head in name for head in _GENERATES):
            raise StartupError(f"config.json: architectures {name!r:.60} does not generate text, or is multimodal")
    for field in ("text_config", "vision_config", "audio_config"):
        if config.get(field) is not None:
            raise StartupError(
                f"config.json: {field}: a multimodal model is not supported, only its text decoder's own"
            )
    vocab_size = _int(config, "vocab_size", high=1 << 22)
    positions, width = (
        next((field for field in fields if config.get(field) is not None), fields[0])
        for fields in (_POSITIONS, _WIDTHS)
    )
    _dtype(config)
    rope_parameters(config)  # refuses two that contradict each other
    quantization = config.get("quantization_config")
    return GeneralConfig(
        vocab_size=vocab_size,
        hidden_size=_int(config, width, high=1 << 17),
        max_position_embeddings=_int(config, positions, high=1 << 27, default=_NO_LIMIT),
        eos_token_ids=_eos(config, vocab_size),
        quantization=None if quantization is None else parse_experts_quantization(quantization),
    )


def why_not_own(config: Mapping[str, Any]) -> str | None:
    """Returns which field of a `config.json` Baton's own path does not support; None if it supports the model. Raises
    StartupError for a field that is invalid on any path."""
    if _architecture(config) is None:
        name = (config.get("architectures") or [config.get("model_type")])[0]
        return f"config.json: architectures {name!r:.60} is not supported (only {', '.join(_BY_MODEL_TYPE.values())})"
    rope = rope_parameters(config)
    if config.get("hidden_act", "silu") != "silu":
        return f"config.json: hidden_act must be silu, not {config['hidden_act']!r:.60}"
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        return f"config.json: rope_type {kind!r:.60} is not supported (only default, llama3)"
    if _number(rope, "partial_rotary_factor", low=0.0, default=1.0) != 1.0:
        return "config.json: partial_rotary_factor must be 1"
    return None


def _check_plain(config: Mapping[str, Any]) -> None:
    """Raises StartupError for what neither path serves."""
    if "auto_map" in config:
        raise StartupError("config.json: auto_map requires code from the model directory, which Baton never runs")
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        raise StartupError("config.json: bidirectional attention (is_causal false) is not supported")


def parse_model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Parses a `config.json` for Baton's own path; raises StartupError with one line that names the invalid field."""
    _check_plain(config)
    own, reason = _architecture(config), why_not_own(config)
    if own is None or reason is not None:
        raise StartupError(reason or "config.json: architectures is not supported")
    architecture, head = own
    num_layers = _int(config, "num_hidden_layers", high=1_000)
    hidden_size = _int(config, "hidden_size", high=1 << 17)
    vocab_size = _int(config, "vocab_size", high=1 << 22)
    num_heads = _int(config, "num_attention_heads", high=4_096)
    num_kv_heads = _int(config, "num_key_value_heads", high=4_096, default=num_heads)
    if num_heads % num_kv_heads:
        raise StartupError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    rope = rope_parameters(config)
    max_positions = _int(config, "max_position_embeddings", high=1 << 27)
    biased = _bool(config, "attention_bias")
    quantization = config.get("quantization_config", config.get("compression_config"))
    llama_like = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    labels, of_tokens = _labels(config) if head == "ForSequenceClassification" else (0, ())
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_int(config, "intermediate_size", high=1 << 20),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(config, hidden_size, num_heads),
        rms_norm_eps=_number(config, "rms_norm_eps", low=0.0, default=1e-6),
        rope_theta=_number(rope, "rope_theta", low=1.0, default=_number(config, "rope_theta", low=1.0, default=1e4)),
        rope_scaling=_llama3(rope, max_positions),
        windows=_windows(config, architecture, num_layers),
        qkv_bias=architecture == "Qwen2ForCausalLM" or (llama_like and biased),
        o_bias=llama_like and biased,
        mlp_bias=architecture == "LlamaForCausalLM" and _bool(config, "mlp_bias"),
        qk_norm=architecture == "Qwen3ForCausalLM",
        tie_word_embeddings=_bool(config, "tie_word_embeddings") or (head != "ForCausalLM" and not of_tokens),
        max_position_embeddings=max_positions,
        eos_token_ids=_eos(config, vocab_size),
        torch_dtype=_dtype(config),
        has_lm_head=head == "ForCausalLM",
        num_labels=labels,
        classifier_tokens=of_tokens,
        quantization=None if quantization is None else parse_quantization_config(quantization),
    )


def _labels(config: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    """Returns the number of labels, which transformers writes only if they are not the default two, and the tokens of
    a classification head that is made of an LM head (vLLM's names for it)."""
    tokens = config.get("classifier_from_token")
    if tokens is None:
        labels = config.get("id2label")
        default = len(labels) if isinstance(labels, dict) and labels else 2
        return _int(config, "num_labels", high=1 << 16, default=default), ()
    if not isinstance(tokens, list) or len(tokens) != 2 or not all(isinstance(token, str) for token in tokens):
        raise StartupError(f"config.json: classifier_from_token must be two tokens, not {tokens!r:.60}")
    if not _bool(config, "is_original_qwen3_reranker") and config.get("method") != "from_2_way_softmax":
        raise StartupError(
            "config.json: classifier_from_token is only supported with is_original_qwen3_reranker, or with method"
            " from_2_way_softmax"
        )
    return 1, tuple(tokens)


def _architecture(config: Mapping[str, Any]) -> tuple[Architecture, str] | None:
    """Returns which of those of Baton's own path it is, under the name of its form with an LM head, and the head that
    the model has; None if it is another."""
    listed = config.get("architectures") or []
    model_type = config.get("model_type")
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise StartupError("config.json: architectures must be a list of names")
    known = _BY_MODEL_TYPE.get(model_type) if isinstance(model_type, str) else None
    name = listed[0] if listed else known
    for architecture in _BY_MODEL_TYPE.values():
        for head in _HEADS:
            if name != architecture.replace(_HEADS[0], head):
                continue
            if known is not None and known != architecture:
                raise StartupError(f"config.json: architectures is {name} but model_type is {model_type}")
            return architecture, head
    return None


def _head_dim(config: Mapping[str, Any], hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise StartupError(
            f"config.json: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}"
        )
    head_dim = _int(config, "head_dim", high=1_024, default=hidden_size // num_heads)
    if head_dim % 2:
        raise StartupError(f"config.json: head_dim {head_dim} must be even (rotary embedding)")
    return head_dim


def rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns `rope_parameters` or the older `rope_scaling`, empty without either. If a config has both, as one that
    transformers 5 wrote and a user then extended in the older way, the scaling completes parameters that have none.
    Raises StartupError if they contradict each other."""
    given = []
    for field in ("rope_parameters", "rope_scaling"):
        rope = config.get(field)
        if rope is not None and not isinstance(rope, dict):
            raise StartupError(f"config.json: {field} must be an object")
        if rope:
            given.append(rope)
    if len(given) < 2:
        return given[0] if given else {}
    parameters, scaling = ({"rope_type": rope.get("type", "default")} | rope for rope in given)
    if parameters["rope_type"] == "default":
        del parameters["rope_type"]
    by_layer = any(isinstance(value, dict) for value in parameters.values())
    if by_layer or any(scaling.get(key, value) != value for key, value in parameters.items() if key != "type"):
        raise StartupError("config.json: rope_parameters and rope_scaling are both set, and contradict each other")
    return parameters | scaling


def _llama3(rope: Mapping[str, Any], max_positions: int) -> Llama3Rope | None:
    if rope.get("rope_type", rope.get("type", "default")) != "llama3":
        return None
    scaling = Llama3Rope(
        factor=_number(rope, "factor", low=1.0),
        low_freq_factor=_number(rope, "low_freq_factor", low=1e-6),
        high_freq_factor=_number(rope, "high_freq_factor", low=1e-6),
        original_max_position_embeddings=_int(
            rope, "original_max_position_embeddings", high=1 << 27, default=max_positions
        ),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise StartupError("config.json: rope high_freq_factor must be greater than low_freq_factor")
    return scaling


def _windows(config: Mapping[str, Any], architecture: Architecture, num_layers: int) -> tuple[int, ...]:
    """Returns each layer's sliding window. Mistral: all layers have one unless `sliding_window` is null (absent: 4,096,
    as in transformers). Qwen: the same, but only with `use_sliding_window`, and only the layers that `layer_types`
    names or, without that list, those from `max_window_layers` up."""
    if architecture == "LlamaForCausalLM":
        return (0,) * num_layers
    if architecture == "MistralForCausalLM":
        slides = config.get("sliding_window", 4_096) is not None
        window = _int(config, "sliding_window", high=1 << 27, default=4_096) if slides else 0
        return (window,) * num_layers
    if not _bool(config, "use_sliding_window") or config.get("sliding_window", 4_096) is None:
        return (0,) * num_layers
    window = _int(config, "sliding_window", high=1 << 27, default=4_096)
    types = config.get("layer_types")
    if types is None:
        first = _int(config, "max_window_layers", low=0, high=1_000, default=28)
        return tuple(window if index >= first else 0 for index in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers:
        raise StartupError(f"config.json: layer_types must list {num_layers} layers")
    windows = {"full_attention": 0, "sliding_attention": window}
    for kind in types:
        if not isinstance(kind, str) or kind not in windows:
            raise StartupError(f"config.json: layer_types has {kind!r:.60} (only full_attention, sliding_attention)")
    return tuple(windows[kind] for kind in types)


def _eos(config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise StartupError(f"config.json: eos_token_id {token!r:.60} is not a token id below {vocab_size}")
    return tuple(dict.fromkeys(ids))


def _dtype(config: Mapping[str, Any]) -> DType | None:
    for field in ("dtype", "torch_dtype"):
        value = config.get(field)
        if value is None or value == "auto":
            continue
        for name in DTYPE_BYTES:
            if value in (name, f"torch.{name}"):
                return name  # type: ignore[return-value]
        raise StartupError(f"config.json: {field} {value!r:.60} is not supported (only {', '.join(DTYPE_BYTES)})")
    return None


def _int(config: Mapping[str, Any], field: str, *, high: int, low: int = 1, default: int | None = None) -> int:
    value = config.get(field)
    if value is None:
        value = default
    if value is None:
        raise StartupError(f"config.json: {field} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise StartupError(f"config.json: {field} must be an integer from {low} to {high}, not {value!r:.60}")
    return value


def _number(config: Mapping[str, Any], field: str, *, low: float, default: float | None = None) -> float:
    value = config.get(field)
    if value is None:
        value = default
    if value is None:
        raise StartupError(f"config.json: {field} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= _LARGEST:
        raise StartupError(f"config.json: {field} must be a finite number of at least {low}, not {value!r:.60}")
    return float(value)


def _bool(config: Mapping[str, Any], field: str) -> bool:
    value = config.get(field)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise StartupError(f"config.json: {field} must be true or false, not {value!r:.60}")
    return value
