"""A model in GGUF computed from its blocks has the logits of the same model dequantised to bfloat16, bit for bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from baton.core.errors import StartupError
from baton.engine.checkpoint import Checkpoint
from baton.engine.kernels import native
from baton.gguf.files import checkpoint_directory
from tests.engine.tiles import load
from tests.support.checkpoints import make_checkpoint
from tests.support.engine_driver import all_logits, bfloat16_levels, random_tokens, tiny_runner
from tests.support.gguf_writer import write_gguf

LEVELS = [level for level in bfloat16_levels() if load(level).computes_blocks]
pytestmark = pytest.mark.skipif(not LEVELS, reason="no processor with bf16 products")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))


def logits(model: Path, level: str, packed: list[str]) -> tuple[Tensor, int, list[str]]:
    """Logits of a sequence in chunks, the bytes of weights, and the functions that packed matrices."""
    packed.clear()
    runner = tiny_runner(model, dtype="bfloat16", kernels=level)
    return all_logits(runner, random_tokens(70), [40, 1, 1, 12, 13]), runner.parameter_bytes, list(packed)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("arch", "kind", "options"),
    [
        ("llama2", "Q4_1", {"tied": True}),
        ("llama2", "Q4_0", {"bias": True}),
        ("qwen2", "Q8_0", {"intermediate_size": 160}),
        ("qwen3", "Q4_0", {"head_dim": 32}),
    ],
)
def test_logits_are_those_of_the_dequantised_model(
    level: str, arch: str, kind: str, options: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = make_checkpoint(tmp_path / "source", arch, **options)  # type: ignore[arg-type]
    model = checkpoint_directory(write_gguf(origin, tmp_path / "m.gguf", kind))
    packed: list[str] = []
    for name in ("pack_blocks", "pack_weight"):
        original = getattr(native, name)

        def counted(*given: object, name: str = name, original: object = original, **more: object) -> object:
            packed.append(name)
            return original(*given, **more)  # type: ignore[operator]

        monkeypatch.setattr(native, name, counted)
    found, size, functions = logits(model, level, packed)
    assert functions.count("pack_blocks") >= 4 * 2, functions
    monkeypatch.setattr(native.Kernels, "computes_blocks", False)
    expected, dequantised, functions = logits(model, level, packed)
    assert "pack_blocks" not in functions and size < 0.75 * dequantised
    assert torch.equal(found, expected)


def test_scales_that_are_no_numbers_are_refused_by_the_name_of_their_tensor(tmp_path: Path) -> None:
    origin = make_checkpoint(tmp_path / "source", "llama2")
    checkpoint = Checkpoint(checkpoint_directory(write_gguf(origin, tmp_path / "m.gguf", "Q8_0")))
    name = "model.layers.0.mlp.down_proj.weight"
    stored = checkpoint._files.index.tensors[name]  # type: ignore[union-attr]
    values = np.array(checkpoint._files._mapped[stored.file])  # type: ignore[union-attr]
    values[stored.offset : stored.offset + 2] = np.array([np.nan], np.float16).view(np.uint8)
    checkpoint._files._mapped[stored.file] = values  # type: ignore[union-attr, call-overload]
    with pytest.raises(StartupError, match=rf"m\.gguf: tensor {name} holds NaN"):
        checkpoint.blocks(name)


def test_the_package_has_the_scales_of_q4_k() -> None:
    scale, minimum = gguf.quants.Q4_K.get_scale_min(np.zeros((3, 12), np.uint8))
    assert scale.shape == minimum.shape == (3, 8)
