"""What gateways and load tools ask of a server besides OpenAI's API, under the names that vLLM and SGLang gave it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator.text.model import TextModel


def server_info(model: str, version: str, text: TextModel, cluster: Mapping[str, Any]) -> dict[str, Any]:
    """`GET /server_info`; `cluster` is the `/workers` document."""
    workers = [w for w in cluster["workers"] if w["state"] != "lost"]
    return {
        "version": version,
        "model": model,
        "max_model_len": text.max_model_len,
        "vocab_size": text.vocab_size,
        "tool_parser": text.tool_format,
        "workers": {role: sum(w["role"] == role for w in workers) for role in ("prefill", "decode")},
    }


def model_info(model: str, text: TextModel) -> dict[str, Any]:
    """`GET /get_model_info`, as SGLang has it."""
    return {
        "model_path": model,
        "tokenizer_path": model,
        "is_generation": True,
        "has_chat_template": text.has_chat,
        "max_model_len": text.max_model_len,
        "vocab_size": text.vocab_size,
    }


def loads(cluster: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`GET /loads`, as SGLang has it: one entry, since who asks has one address to send to."""
    own = cluster["coordinator"]
    decode = [w for w in cluster["workers"] if w["role"] == "decode" and w["state"] != "lost"]
    used = sum(w["blocks_total"] - w["blocks_free"] for w in decode)
    total = sum(w["blocks_total"] for w in decode)
    return [
        {
            "dp_rank": 0,
            "num_reqs": own["requests"],
            "num_running_reqs": own["requests"] - own["queued"],
            "num_waiting_reqs": own["queued"],
            "token_usage": round(used / total, 4) if total else 0.0,
        }
    ]


def tokenizer_info(text: TextModel) -> dict[str, Any]:
    """`GET /tokenizer_info`: what a client needs beside /tokenize to write prompts itself."""
    names = text.special_tokens
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": text.vocab_size,
        "model_max_length": text.max_model_len,
        "chat_template": text.chat_template,
        **{name: names.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")},
        "eos_token_ids": list(text.eos_token_ids),
    }
