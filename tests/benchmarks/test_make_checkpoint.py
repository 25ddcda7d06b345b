"""The builder of mixtures of experts: what it writes is a checkpoint as Mixtral's are published."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.make_checkpoint import EXPERTS, make_experts
from tests.support.engine_driver import all_logits, tiny_runner

SIZES = EXPERTS["moe-1b"] | {
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 320,
}


def test_a_mixture_is_loaded_with_all_of_its_tensors_and_equal_seeds_give_equal_weights(tmp_path: Path) -> None:
    logits = []
    for index, seed in enumerate((0, 0, 1)):
        path = tmp_path / str(index)
        make_experts(path, seed, SIZES)
        logits.append(all_logits(tiny_runner(path, model_impl="transformers"), [5, 6, 7], [3]))
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    assert sorted(file.name for file in (tmp_path / "0").glob("*.safetensors")) == [
        f"model-{index}.safetensors" for index in range(3)
    ]
