"""Small random Hugging Face checkpoints, one per supported architecture, written in a few milliseconds.

    make_checkpoint(tmp_path / "m", arch="qwen3", num_kv_heads=4, shards=3)

The same arguments give the same bytes. Weights are scaled so that logits spread by about 3 (greedy gaps are rarely
under 1e-3) and the layers outweigh the embedding, so that greedy output varies instead of repeating one token. EOS rows
are zero unless `reachable_eos`, so that a greedy run never stops by chance.

The tokenizer is byte-level BPE: the 256 bytes, a few merges, then special tokens. Further ids up to `vocab_size` are
ordinary tokens that decode to an empty string.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

Arch = Literal["llama", "llama2", "mistral", "qwen2", "qwen3"]
ARCHS: tuple[Arch, ...] = ("llama", "llama2", "mistral", "qwen2", "qwen3")

MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "a"), ("Ġ", "the"), ("e", "r"), ("o", "n"), ("l", "l")]
SPECIAL = ["<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|end|>"]
BOS_ID, EOS_ID, END_ID = 264, 265, 268
TOKENIZER_SIZE = 269

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_MODEL_TYPE = {"llama": "llama", "llama2": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"}
_CLASS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_CLASS_ENDS = {"lm": "ForCausalLM", "score": "ForSequenceClassification", "none": "Model"}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes and variants of a checkpoint.

    `llama3_scaling` None selects the architecture's usual setting (on only for "llama"). `sliding_window` None means
    off, except for mistral, where it is 24. For qwen the window applies from layer `max_window_layers` up. `old_config`
    writes the config in the form used before transformers 5. `logit_std` is about the spread of the logits. `head`
    "score" has a classification head with `num_labels`; "none" is saved without a head, so that names lack `model.`.
    """

    hidden_size: int = 64
    intermediate_size: int = 160
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    vocab_size: int = 320
    tied: bool = False
    bias: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    shards: int = 1
    sliding_window: int | None = None
    max_window_layers: int = 1
    llama3_scaling: bool | None = None
    max_position_embeddings: int = 4096
    old_config: bool = False
    reachable_eos: bool = False
    logit_std: float = 3.0
    seed: int = 0
    head: Literal["lm", "score", "none"] = "lm"
    num_labels: int = 1


def make_checkpoint(path: Path | str, arch: Arch = "llama", **options: Any) -> Path:
    """Writes config.json, generation_config.json, tokenizer files and safetensors into `path`, created if missing."""
    shape = Shape(**options)
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", make_config(arch, shape))
    _write_json(path / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, END_ID]})
    write_tokenizer(path, add_bos=not arch.startswith("qwen"))
    write_weights(path, make_tensors(arch, shape), shape.shards)
    return path


def make_config(arch: Arch, shape: Shape) -> dict[str, Any]:
    """The `config.json` of a checkpoint."""
    model_type = _MODEL_TYPE[arch]
    llama3 = arch == "llama" if shape.llama3_scaling is None else shape.llama3_scaling
    scaling: dict[str, Any] = {"rope_type": "default"}
    if llama3:
        scaling = {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    config: dict[str, Any] = {
        "architectures": [_CLASS[model_type].replace("ForCausalLM", _CLASS_ENDS[shape.head])],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": shape.max_position_embeddings,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }
    if shape.old_config:
        config |= {"rope_theta": 10000.0, "rope_scaling": scaling if llama3 else None, "torch_dtype": shape.dtype}
    else:
        config |= {"rope_parameters": {"rope_theta": 10000.0, **scaling}, "dtype": shape.dtype}
    if arch == "mistral":
        config["sliding_window"] = 24 if shape.sliding_window is None else (shape.sliding_window or None)
    elif model_type.startswith("qwen"):
        config |= {
            "use_sliding_window": bool(shape.sliding_window),
            "sliding_window": shape.sliding_window or 4096,
            "max_window_layers": shape.max_window_layers,
        }
    if model_type != "qwen2" and shape.bias:
        config["attention_bias"] = True
    if shape.head == "score":
        labels = {str(index): f"LABEL_{index}" for index in range(shape.num_labels)}
        config |= {"id2label": labels, "label2id": {name: int(index) for index, name in labels.items()}}
    return config


def make_tensors(arch: Arch, shape: Shape) -> dict[str, torch.Tensor]:
    """All weights under their Hugging Face names, in the checkpoint's dtype."""
    generator = torch.Generator().manual_seed(shape.seed)
    dtype = getattr(torch, shape.dtype)

    def normal(*size: int, std: float) -> torch.Tensor:
        return (torch.randn(size, generator=generator) * std).to(dtype)

    def norm(size: int) -> torch.Tensor:
        return (1.0 + 0.2 * torch.randn(size, generator=generator)).to(dtype)

    def linear(name: str, out: int, into: int, gain: float = 1.0, bias: bool = False) -> None:
        tensors[f"{name}.weight"] = normal(out, into, std=gain / into**0.5)
        if bias:
            tensors[f"{name}.bias"] = normal(out, std=0.3)

    hidden, queries, keys = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    vocabulary_std = shape.logit_std / hidden**0.5
    tensors = {"model.embed_tokens.weight": normal(shape.vocab_size, hidden, std=vocabulary_std)}
    for index in range(shape.num_layers):
        layer = f"model.layers.{index}"
        tensors[f"{layer}.input_layernorm.weight"] = norm(hidden)
        tensors[f"{layer}.post_attention_layernorm.weight"] = norm(hidden)
        qkv_bias = arch == "qwen2" or shape.bias
        linear(f"{layer}.self_attn.q_proj", queries, hidden, 1.5, qkv_bias)
        linear(f"{layer}.self_attn.k_proj", keys, hidden, 1.5, qkv_bias)
        linear(f"{layer}.self_attn.v_proj", keys, hidden, 1.0, qkv_bias)
        linear(f"{layer}.self_attn.o_proj", hidden, queries, 2.0, shape.bias and arch != "qwen2")
        if arch == "qwen3":
            tensors[f"{layer}.self_attn.q_norm.weight"] = norm(shape.head_dim)
            tensors[f"{layer}.self_attn.k_norm.weight"] = norm(shape.head_dim)
        linear(f"{layer}.mlp.gate_proj", shape.intermediate_size, hidden)
        linear(f"{layer}.mlp.up_proj", shape.intermediate_size, hidden)
        linear(f"{layer}.mlp.down_proj", hidden, shape.intermediate_size, 3.0)
    tensors["model.norm.weight"] = norm(hidden)
    if shape.head == "score":
        linear("score", shape.num_labels, hidden, 2.0)
        return tensors
    if shape.head == "none":
        return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    if not shape.tied:
        tensors["lm_head.weight"] = normal(shape.vocab_size, hidden, std=vocabulary_std)
    if not shape.reachable_eos:
        head = tensors["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
        head[[token for token in (EOS_ID, END_ID) if token < shape.vocab_size]] = 0.0
    return tensors


def write_weights(path: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    """Writes one `model.safetensors`, or an index and `shards` files with consecutive tensors."""
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    per_shard = -(-len(names) // shards)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard * per_shard : (shard + 1) * per_shard]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    _write_json(path / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map})


def write_tokenizer(path: Path, add_bos: bool = True) -> None:
    """Writes tokenizer.json (byte-level BPE, 269 entries) and tokenizer_config.json with a chat template."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + [left + right for left, right in MERGES]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", BOS_ID)]
        )
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|bos|>",
            "eos_token": "<|eos|>",
            "add_bos_token": add_bos,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
