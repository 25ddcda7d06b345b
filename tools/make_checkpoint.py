"""Writes a random-weight checkpoint of a named shape, for measuring speed without downloading a model.

    python tools/make_checkpoint.py 135m /tmp/135m

The tokenizer is byte-level with 269 entries; ids from there to the vocabulary's size decode to nothing. What the model
writes is noise.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.checkpoints import make_checkpoint

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
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_checkpoint(arguments.directory, "llama", seed=arguments.seed, **SHAPES[arguments.shape])
    size = sum(file.stat().st_size for file in arguments.directory.glob("*.safetensors"))
    print(f"{arguments.shape}: {size / 2**20:.0f} MiB of weights in {arguments.directory}")


if __name__ == "__main__":
    main()
