"""Writes checkpoints of tests/support/checkpoints.py as GGUF files, as llama.cpp's converter lays them out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from baton.gguf.config import tensor_name

TYPES = {
    name: gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
}


def write_gguf(
    source: Path,
    target: Path,
    kind: str = "F32",
    *,
    arch: str | None = None,
    extra: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> Path:
    """Writes the checkpoint in `source` (one safetensors file) as `target`. Matrices get the type `kind`, vectors F32.
    `extra` are more metadata values (None removes a key), `tensors` more tensors by their GGUF names."""
    config = json.loads((source / "config.json").read_text())
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    settings = json.loads((source / "tokenizer_config.json").read_text())
    arch = arch or {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    vocabulary = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    names = {number: token for token, number in vocabulary.items()}
    tokens = [names.get(number, f"[PAD{number}]") for number in range(config["vocab_size"])]
    special = {token["id"] for token in tokenizer["added_tokens"]}
    types = [3 if n in special else 1 if n in names else 5 for n in range(len(tokens))]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in tokenizer["model"]["merges"]]
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    metadata: dict[str, Any] = {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": config["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": rope["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": vocabulary[settings["bos_token"]],
        "tokenizer.ggml.eos_token_id": vocabulary[settings["eos_token"]],
        "tokenizer.ggml.add_bos_token": settings["add_bos_token"],
        "tokenizer.chat_template": settings["chat_template"],
        **(extra or {}),
    }
    writer = gguf.GGUFWriter(target, arch)
    for key, value in metadata.items():
        _add(writer, key, value)
    stored = load_file(source / "model.safetensors")
    wanted = {tensor_name(name): name for name in _gguf_names(config["num_hidden_layers"])}
    for name, values in stored.items():
        _write(writer, wanted[name], _interleaved(name, values, config, arch), kind)
    for name, values in (tensors or {}).items():
        _write(writer, name, values, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _gguf_names(layers: int) -> list[str]:
    parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm")
    parts += ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    inner = [f"blk.{n}.{part}.{what}" for n in range(layers) for part in parts for what in ("weight", "bias")]
    return ["token_embd.weight", "output_norm.weight", "output.weight", *inner]


def _interleaved(name: str, values: np.ndarray[Any, Any], config: Mapping[str, Any], arch: str) -> np.ndarray[Any, Any]:
    """llama.cpp rotates neighbours, Hugging Face the two halves of a head: its converter reorders the rows."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
    if arch != "llama" or heads is None:
        return values
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _write(writer: Any, name: str, values: np.ndarray[Any, Any], kind: str) -> None:
    values = values.astype(np.float32)
    if values.ndim == 1 or kind == "F32":
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, TYPES[kind]), raw_dtype=TYPES[kind])


def _add(writer: Any, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
