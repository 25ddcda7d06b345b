"""Tiny random checkpoints of architectures that transformers computes, and what it generates from them.

    make_transformers_checkpoint(tmp_path / "m", "gemma2")

Sizes are the smallest that show every part of an architecture: several heads per KV head, a window and a chunk shorter
than a prompt, softcap near the scores, position scales that change within a prompt, experts, latents. Weights are large
enough that each of these parts changes the logits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import BOS_ID, EOS_ID, write_tokenizer

VOCAB = 320
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 96, "max_position_embeddings": 512, "sliding_window": 8,
    "attention_chunk_size": 8, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "floor_scale": 4,
    # experts
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "shared_intermediate_size": 32,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_k": 2, "moe_topk": 2, "n_group": 1, "topk_group": 1, "num_expert_group": 1, "first_k_dense_replace": 1,
    "intermediate_size_mlp": 96, "moe_layers": [1, 3],
    # latents, of another size than the rest of a key
    "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "qk_head_dim": 24,
    # names of other families for the same sizes
    "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512, "n_inner": 96, "d_model": 64, "n_heads": 4,
    "n_layers": 4, "num_layers": 4, "max_seq_len": 512, "ffn_dim": 96, "ffn_hidden_size": 96,
    "word_embed_proj_dim": 64, "rotary_dim": 8,
    # Gemma 3n and 4
    "global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 2, "num_global_key_value_heads": 1,
    # state-space and indexed models, which are refused
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "mamba_d_state": 8, "mamba_n_heads": 8,
}  # fmt: skip
_LATENT_HEADS = {"num_key_value_heads": 4}
_DECODER = {
    "decoder_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "encoder_layers": 1,
    "encoder_attention_heads": 4, "encoder_ffn_dim": 96,
}  # fmt: skip
_OF_KIND: dict[str, dict[str, Any]] = {
    "phi3": {"rope_parameters": None},
    "dots1": {"n_shared_experts": 1},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "blenderbot": _DECODER,
    "plbart": _DECODER,
    "whisper": _DECODER | {"max_target_positions": 512},
    "moshi": {"sliding_window": 512},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")
        },
    },
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "smollm3": {"use_sliding_window": True},
    "qwen3_moe": {"use_sliding_window": True, "max_window_layers": 2},
    "exaone4": {"sliding_window_pattern": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "glm4_moe_lite": _LATENT_HEADS,
    "youtu": _LATENT_HEADS,
    "llama4_text": {"use_qk_norm": True, "no_rope_layers": [1, 1, 1, 0]},
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": None,
        "laurel_rank": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
_MOST_PARAMETERS = 80_000_000

SERVED = (
    "arcee", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma",
    "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2",
    "gpt_neox", "gpt_oss", "granite", "granitemoe", "helium", "llama", "llama4_text", "minicpm3", "mistral", "mixtral",
    "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "phimoe", "qwen2_moe", "qwen3", "qwen3_moe",
    "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
"""Architectures whose tokens are compared with those that transformers generates."""


def tiny_config(kind: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    default = AutoConfig.for_model(kind)
    known = set(default.to_dict()) | set(default.attribute_map)
    sizes = {name: value for name, value in _SIZES.items() if name in known} | _OF_KIND.get(kind, {})
    if "kv_lora_rank" in known:
        sizes |= _LATENT_HEADS
        sizes.pop("head_dim", None)
    eos = {"pad_token_id": 0, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    return AutoConfig.for_model(kind, **sizes | eos | changes)


def tiny_model(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model. Raises MemoryError if the sizes above do not make it tiny."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(kind, **changes)
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > _MOST_PARAMETERS:
        raise MemoryError(f"{kind}: {size / 1e6:.0f} M parameters")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.15 if "embed" not in name else 0.5)
        elif "sink" in name:
            parameter.data.normal_(0, 1)
    return model.to(dtype)


def make_transformers_checkpoint(path: Path, kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Writes a checkpoint with a tokenizer; `changes` are fields of the config."""
    model = tiny_model(kind, dtype, **changes)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


def generated(path: Path, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """What transformers generates greedily, in float32, with its own cache and plain attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    outputs = (
        model.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
        for prompt in prompts
    )
    return [output[0, len(prompt) :].tolist() for output, prompt in zip(outputs, prompts, strict=True)]


def make_mxfp4_checkpoint(path: Path, **changes: Any) -> Path:
    """Writes a gpt-oss as it is published: its experts in MXFP4, each block of 32 inputs with its own scale."""
    make_transformers_checkpoint(path, "gpt_oss", **changes)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = _to_mxfp4(tensors.pop(name).transpose(1, 2))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (path / "config.json").write_text(json.dumps(config))
    return path


def _to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., n, k] -> blocks [..., n, k / 32, 16] and scales [..., n, k / 32] of the nearest values."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    grouped = weight.unflatten(-1, (-1, 32))
    exponents = torch.ceil(torch.log2(grouped.abs().amax(-1, keepdim=True) / values[-1]))
    codes = (torch.ldexp(grouped, -exponents).abs()[..., None] - values).abs().argmin(-1) + 8 * (grouped < 0)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return blocks, (exponents[..., 0] + 127).to(torch.uint8)
