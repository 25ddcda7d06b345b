"""The metadata of a GGUF file as the `config.json` of a Hugging Face checkpoint, and the names of its tensors there.

Supported are the architectures that Baton computes: `llama` (Llama and Mistral), `qwen2`, `qwen3`. What the metadata
says and Baton would not compute is refused by the key's name.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from baton.core.errors import StartupError
from baton.gguf.tokenizer import CONTROL, USER_DEFINED
from baton.models.model_config import parse_model_config

Metadata = Mapping[str, Any]

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_KEYS = {  # of fields of a config.json, with the architecture to be filled in
    "vocab_size": "tokenizer.ggml.tokens",
    "hidden_size": "{}.embedding_length",
    "intermediate_size": "{}.feed_forward_length",
    "num_hidden_layers": "{}.block_count",
    "num_attention_heads": "{}.attention.head_count",
    "num_key_value_heads": "{}.attention.head_count_kv",
    "head_dim": "{}.attention.key_length",
    "max_position_embeddings": "{}.context_length",
    "rms_norm_eps": "{}.attention.layer_norm_rms_epsilon",
    "rope_theta": "{}.rope.freq_base",
}
_ENDS = (
    "</s>", "<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
"""Added tokens that end an output, by their text, as in llama.cpp: of a model's several a file names one by its id."""
_FIELD = re.compile(rf"\b({'|'.join(_KEYS)})\b")
_LAYER = re.compile(r"blk\.(\d{1,4})\.(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"
"""A tensor that divides the rotary frequencies; llama.cpp's way to store the rope scaling of Llama 3.1 and later."""
_LLAMA3_FACTORS = (8.0, 32.0)  # Llama 3.1 and 3.3; Llama 3.2
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def config_json(metadata: Metadata, names: Sequence[str], rope_factors: Sequence[float] = ()) -> dict[str, Any]:
    """Returns the object of a `config.json`. `names` are the file's tensors, `rope_factors` the values of ROPE_FACTORS.

    Raises:
        StartupError: the file needs what Baton does not compute, or lacks a key; one line that names the key.
    """
    kind = _value(metadata, "general.architecture", str)
    if kind not in _CLASSES:
        raise StartupError(f"general.architecture {kind!r:.60} is not supported (only {', '.join(_CLASSES)})")

    def of(key: str, *types: type, default: Any = None) -> Any:
        return _value(metadata, f"{kind}.{key}", *types, default=default)

    for key, neutral in (("expert_count", 0), ("attention.sliding_window", 0), ("rope.scaling.type", "none")):
        if of(key, int, str, default=neutral) != neutral:
            raise StartupError(f"{kind}.{key} {of(key, int, str)!r:.60} is not supported")
    if of("rope.scaling.type", str, default="") != "none":  # without a type llama.cpp scales linearly
        for key in ("rope.scaling.factor", "rope.scale_linear"):
            if of(key, float, int, default=0) not in (0, 1):
                raise StartupError(f"{kind}.{key} {of(key, float, int)!r:.60} is not supported")
    if of("rope.scaling.attn_factor", float, int, default=1) != 1:  # which llama.cpp applies without a type, too
        raise StartupError(
            f"{kind}.rope.scaling.attn_factor {of('rope.scaling.attn_factor', float, int)!r:.60} is not supported"
        )
    if not metadata.get(f"{kind}.attention.causal", True):
        raise StartupError(f"{kind}.attention.causal false is not supported")
    hidden, heads = of("embedding_length", int), of("attention.head_count", int)
    head_dim = of("attention.key_length", int, default=hidden // max(heads, 1))
    if of("attention.value_length", int, default=head_dim) != head_dim:
        raise StartupError(f"{kind}.attention.value_length must equal key_length")
    if of("rope.dimension_count", int, default=head_dim) != head_dim:
        raise StartupError(f"{kind}.rope.dimension_count must be the head size, {head_dim}")
    theta = shortest(of("rope.freq_base", float, int, default=10_000.0))
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    config: dict[str, Any] = {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "vocab_size": len(_value(metadata, "tokenizer.ggml.tokens", list)),
        "hidden_size": hidden,
        "intermediate_size": of("feed_forward_length", int),
        "num_hidden_layers": of("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": of("attention.head_count_kv", int, default=heads),
        "head_dim": head_dim,
        "max_position_embeddings": of("context_length", int),
        "rms_norm_eps": shortest(of("attention.layer_norm_rms_epsilon", float)),
        "rope_theta": theta,
        "attention_bias": kind == "llama" and "blk.0.attn_q.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
        "eos_token_id": sorted({end for end in ends if isinstance(end, int)} | _ends_by_text(metadata)),
    }
    if rope_factors:
        config["rope_scaling"] = llama3_scaling(rope_factors, theta, head_dim)
    try:
        parse_model_config(config)
    except StartupError as error:
        message = error.message.removeprefix("config.json: ")
        raise StartupError(_FIELD.sub(lambda field: _KEYS[field[0]].format(kind), message)) from None
    return config


def _ends_by_text(metadata: Metadata) -> set[int]:
    tokens, types = (_value(metadata, f"tokenizer.ggml.{name}", list) for name in ("tokens", "token_type"))
    kinds = zip(tokens, types, strict=False)  # tokenizer_json refuses lists of different lengths
    return {number for number, (token, kind) in enumerate(kinds) if kind in (CONTROL, USER_DEFINED) and token in _ENDS}


def llama3_scaling(factors: Sequence[float], theta: float, head_dim: int) -> dict[str, Any]:
    """Returns the `rope_scaling` of Llama 3.1 and later whose factors per frequency these are.

    Raises:
        StartupError: they are not those of any published Llama 3.
    """
    for factor in _LLAMA3_FACTORS if len(factors) == head_dim // 2 else ():
        if all(map(_close, _divisors(factor, theta, head_dim), factors)):
            return {"rope_type": "llama3", "factor": factor} | _LLAMA3
    raise StartupError(f"{ROPE_FACTORS} does not hold the rope scaling of a Llama 3 model: not supported")


def tensor_name(name: str) -> str | None:
    """Returns the Hugging Face name of a tensor; None for one that is not part of a supported model."""
    if match := _LAYER.fullmatch(name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{_IN_LAYER[part]}.{kind}" if part in _IN_LAYER else None
    part, _, kind = name.rpartition(".")
    return f"{_WHOLE[part]}.{kind}" if part in _WHOLE and kind == "weight" else None


def rope_heads(name: str, config: Mapping[str, Any]) -> int:
    """Returns over how many heads the rows of this tensor, by its Hugging Face name, are interleaved; 0 if they are
    not: llama.cpp does that only to queries and keys of its architecture `llama`."""
    if config["model_type"] != "llama":
        return 0
    if ".q_proj." in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".k_proj." in name else 0


def shortest(value: float) -> float:
    """Returns the shortest decimal that rounds to the same float32: 1e-05 for what is stored as 9.99999974e-06."""
    (stored,) = struct.unpack("f", struct.pack("f", value))
    return next(float(text) for digits in range(1, 18) if _f32(float(text := f"{stored:.{digits}g}")) == stored)


def _divisors(factor: float, theta: float, head_dim: int) -> list[float]:
    """Llama 3's scaling of the rotary frequencies, as the divisor of each (see `Llama3Rope`)."""
    low, high, original = (
        _LLAMA3["low_freq_factor"],
        _LLAMA3["high_freq_factor"],
        _LLAMA3["original_max_position_embeddings"],
    )
    divisors = []
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * index / head_dim)
        smooth = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


def _close(expected: float, given: float) -> bool:
    return math.isclose(expected, given, rel_tol=1e-4)


def _f32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _value(metadata: Metadata, key: str, *types: type, default: Any = None) -> Any:
    value = metadata.get(key, default)
    if value is None:
        raise StartupError(f"{key} is missing")
    if not isinstance(value, types) or isinstance(value, bool):
        raise StartupError(f"{key} must be {' or '.join(t.__name__ for t in types)}, not {value!r:.60}")
    if isinstance(value, float) and not abs(value) < 2.0**128:
        raise StartupError(f"{key} must be a number that float32 holds, not {value}")
    return value
