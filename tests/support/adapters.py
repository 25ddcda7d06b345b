"""Small random LoRA adapters in PEFT's format, for the checkpoints of checkpoints.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from baton.engine.checkpoint import read_model_config
from baton.engine.runner import Runner
from baton.models.adapter_config import WEIGHTS_FILE, adapted_modules, adapter_digest, adapter_tensors

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_adapter(path: Path, model_dir: Path, *, seed: int = 0, size: float = 1.0, **config: Any) -> Path:
    """Writes an adapter into `path`; `config` is that of PEFT. With `size` 1 it changes most greedy tokens."""
    path.mkdir(parents=True, exist_ok=True)
    text = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ALL, **config}
    text = {"bias": "none", "base_model_name_or_path": str(model_dir), "inference_mode": True, **text}
    (path / "adapter_config.json").write_text(json.dumps(text))
    model = read_model_config(model_dir)
    shapes = adapter_tensors(adapted_modules(json.dumps(text).encode(), model, 4096))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) * (size / shape[1] ** 0.5) for name, shape in shapes.items()
    }
    save_file(tensors, path / WEIGHTS_FILE, metadata={"format": "pt"})
    return path


def adapter_files(path: Path) -> tuple[bytes, bytes]:
    return (path / "adapter_config.json").read_bytes(), (path / WEIGHTS_FILE).read_bytes()


def load_adapter(runner: Runner, path: Path, max_rank: int = 64) -> str:
    """Loads an adapter and returns its digest."""
    config, weights = adapter_files(path)
    digest = adapter_digest(config, weights)
    assert runner.adapters is not None
    runner.adapters.load(digest, config, weights, max_rank)
    return digest
