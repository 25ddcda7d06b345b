"""A model's shape as far as attention uses it."""

from __future__ import annotations

from baton.models.model_config import ModelConfig, parse_model_config


def shape(num_heads: int, num_kv_heads: int, head_dim: int) -> ModelConfig:
    return parse_model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 8,
            "hidden_size": num_heads * head_dim,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": 2048,
        }
    )
