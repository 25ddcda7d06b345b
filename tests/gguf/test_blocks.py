"""A model in GGUF computed from its blocks has the logits of the same model dequantised to bfloat16, bit for bit, if
activations are not in 8 bits."""

from __future__ import annotations

import logging
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from baton.core.errors import StartupError
from baton.engine.checkpoint import Checkpoint
from baton.engine.kernels import native
from baton.engine.kv_error import median_error
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
    runner = tiny_runner(model, dtype="bfloat16", kernels=level, activations="bfloat16")
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


needs_int8 = pytest.mark.skipif(
    not any(load(level).computes_int8_activations for level in LEVELS), reason="no avx512_vnni with bf16 products"
)


@needs_int8
def test_activations_are_in_8_bits_for_q8_0_unless_exact_or_asked_not_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    origin = make_checkpoint(tmp_path / "source", "llama2", tied=True)
    model = checkpoint_directory(write_gguf(origin, tmp_path / "m.gguf", "Q8_0"))
    kernels, tokens = native.load("avx512_bf16"), random_tokens(70)
    found = {}
    for name, options in {"int8": {}, "bfloat16": {"activations": "bfloat16"}, "exact": {"exact": True}}.items():
        caplog.clear()
        with caplog.at_level(logging.INFO, "baton.engine"):
            runner = tiny_runner(model, dtype="bfloat16", kernels="avx512_bf16", **options)
        logged = [record.getMessage() for record in caplog.records if "activations in int8" in record.getMessage()]
        assert ("activations in int8 at" in runner.kernels, len(logged)) == (
            (True, 1) if name == "int8" else (False, 0)
        )
        before = kernels.int8_linears()
        found[name] = all_logits(runner, tokens, [40, 1, 1, 12, 13])
        layers = runner.model_config.num_layers
        assert kernels.int8_linears() - before == (6 * 4 * layers if name == "int8" else 0)
        if name == "int8":
            assert f"at {4 * layers} matrices in Q8_0" in runner.kernels, "the head is none of them"
            for chunks in ([70], [1], [9, 8, 33]):
                assert torch.equal(all_logits(runner, tokens, chunks), found[name]), "a row does not depend on others"
    assert torch.equal(found["bfloat16"], found["exact"])
    assert 0.001 < median_error(found["int8"], found["bfloat16"]) < 0.1


@needs_int8
@pytest.mark.parametrize("options", [{"quantize": "int4"}, {"kernels": "avx2"}, {"dtype": "float32"}])
def test_activations_stay_as_they_are_where_no_matrix_is_computed_in_q8_0(
    options: dict[str, str], tmp_path: Path
) -> None:
    origin = make_checkpoint(tmp_path / "source", "llama2")
    model = checkpoint_directory(write_gguf(origin, tmp_path / "m.gguf", "Q8_0"))
    before = native.load("avx512_bf16").int8_linears()
    runner = tiny_runner(model, **{"dtype": "bfloat16", **options})
    all_logits(runner, random_tokens(20), [20])
    assert "int8" not in runner.kernels and native.load("avx512_bf16").int8_linears() == before


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
