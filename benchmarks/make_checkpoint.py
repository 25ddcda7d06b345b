"""Writes a random-weight checkpoint of a named shape, for measuring speed without downloading a model.

    python benchmarks/make_checkpoint.py 135m /tmp/135m

The model generates noise, but every id decodes to text: after the 269 entries of the small tokenizer the vocabulary is
filled with words of two to four ASCII letters, so that a client that times text receives every token.
"""

from __future__ import annotations

import argparse
import json
import string
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.checkpoints import make_checkpoint, write_tokenizer

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_layers": 30,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "vocab_size": 49_152,
        "tied": True,
        "llama3_scaling": False,
        "max_position_embeddings": 8192,
        "dtype": "bfloat16",
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_layers": 16,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 64,
        "vocab_size": 128_256,
        "tied": True,
        "max_position_embeddings": 131_072,
        "dtype": "bfloat16",
        "shards": 4,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_layers": 32,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "dtype": "bfloat16",
        "shards": 8,
    },
}
SHAPES["152k"] = SHAPES["135m"] | {"hidden_size": 256, "intermediate_size": 512, "num_layers": 2, "num_heads": 4}
SHAPES["152k"] |= {"num_kv_heads": 2, "vocab_size": 151_936}
# The same vocabulary and a fourteenth of the bytes, most of them the head.
SHAPES["135m-draft"] = SHAPES["135m"] | {"hidden_size": 192, "intermediate_size": 512, "num_layers": 2, "num_heads": 3}

# Mixtures of 8 experts, 2 of which compute a token, for the path of transformers: 135 M and 1,024 M active parameters.
_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 64, "tie_word_embeddings": True}
_EXPERTS |= {"max_position_embeddings": 8192, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS: dict[str, dict[str, Any]] = {
    "moe-135m": {
        **_EXPERTS,
        "hidden_size": 576,
        "intermediate_size": 768,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
    },
    "moe-1b": {
        **_EXPERTS,
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 24_576,
    },
}


def make_experts(path: Path, seed: int, sizes: dict[str, Any]) -> None:
    """Writes a Mixtral checkpoint in bf16, one file for each layer: there is never more than one in memory."""
    path.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "dtype": "bfloat16", **sizes}
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(path)
    generator = torch.Generator().manual_seed(seed)

    def normal(outputs: int, inputs: int) -> torch.Tensor:
        """As transformers initialises a model."""
        return torch.empty((outputs, inputs), dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)

    hidden, inner, ones = sizes["hidden_size"], sizes["intermediate_size"], torch.ones(sizes["hidden_size"]).bfloat16()
    heads, kv_heads = (sizes[name] * sizes["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    files = {"model.embed_tokens.weight": "model-0.safetensors", "model.norm.weight": "model-0.safetensors"}
    outside = {"model.embed_tokens.weight": normal(sizes["vocab_size"], hidden), "model.norm.weight": ones}
    save_file(outside, path / "model-0.safetensors", metadata={"format": "pt"})
    for index in range(sizes["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        tensors = {f"{layer}.{norm}_layernorm.weight": ones.clone() for norm in ("input", "post_attention")}
        for name, size in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = normal(size, hidden)
        tensors[f"{layer}.self_attn.o_proj.weight"] = normal(hidden, heads)
        tensors[f"{layer}.block_sparse_moe.gate.weight"] = normal(sizes["num_local_experts"], hidden)
        for expert in range(sizes["num_local_experts"]):
            for name, shape in (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden))):
                tensors[f"{layer}.block_sparse_moe.experts.{expert}.{name}.weight"] = normal(*shape)
        file = f"model-{index + 1}.safetensors"
        save_file(tensors, path / file, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    index_of_files = {"metadata": {}, "weight_map": files}  # transformers requires both
    (path / "model.safetensors.index.json").write_text(json.dumps(index_of_files), encoding="utf-8")


def fill_tokenizer(path: Path, size: int) -> None:
    """Extends the tokenizer in `path` to `size` entries: longer and longer words over a to z."""
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    taken = len(vocabulary) + len(tokenizer["added_tokens"])
    stems = list(string.ascii_lowercase)
    while taken < size:
        longer = [(stem, letter) for stem in stems for letter in string.ascii_lowercase]
        for stem, letter in longer[: size - taken]:
            if stem + letter not in vocabulary:
                vocabulary[stem + letter] = taken
                merges.append([stem, letter])
                taken += 1
        stems = [stem + letter for stem, letter in longer]
    file.write_text(json.dumps(tokenizer), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=[*SHAPES, *EXPERTS])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sizes = (SHAPES | EXPERTS)[arguments.shape]
    if arguments.shape in EXPERTS:
        make_experts(arguments.directory, arguments.seed, sizes)
    else:
        make_checkpoint(arguments.directory, "llama", seed=arguments.seed, **sizes)
    fill_tokenizer(arguments.directory, sizes.get("vocab_size", 320))
    size = sum(file.stat().st_size for file in arguments.directory.glob("*.safetensors"))
    print(f"{arguments.shape}: {size / 2**20:.0f} MiB of weights in {arguments.directory}")


if __name__ == "__main__":
    main()
