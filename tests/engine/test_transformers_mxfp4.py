"""gpt-oss as it is published, with experts in MXFP4: transformers' tokens, from dequantised weights or from blocks."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from baton.core.errors import StartupError
from baton.engine.checkpoint import read_model_config
from baton.engine.kernels.build import BLOCK_LEVELS, level_of, processor_levels
from baton.engine.memory import unread_sizes
from tests.support.engine_driver import Job, all_logits, random_tokens, run, tiny_runner
from tests.support.transformers_models import generated, make_mxfp4_checkpoint

PROMPTS, NEW_TOKENS = (37, 11, 24), 12
KERNELS = ["auto", pytest.param("torch", marks=pytest.mark.long)] if processor_levels() else ["torch"]
EXPERTS = "model.layers.2.mlp.experts"
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mxfp4_checkpoint(tmp_path_factory.mktemp("models") / "m")


@pytest.mark.parametrize("kernels", KERNELS)
def test_tokens_equal_those_that_transformers_generates(kernels: str, model: Path) -> None:
    prompts = [random_tokens(length, seed) for seed, length in enumerate(PROMPTS)]
    runner = tiny_runner(model, block_size=4, kernels=kernels)
    jobs = [Job(prompt, NEW_TOKENS, chunk=7) for prompt in prompts]
    run(runner, jobs, seed=1)
    assert [job.output for job in jobs] == generated(model, prompts, NEW_TOKENS)
    level = level_of(kernels)
    assert unread_sizes(model, read_model_config(model), 16, "float32", level=level)[1] == runner.parameter_bytes
    if level in ("avx2", "avx512"):
        experts = [each for each in runner.adapters._model._model.modules() if hasattr(each, "gate_up_proj")]
        assert [each.gate_up_proj.untyped_storage().nbytes() for each in experts] == [4] * 4  # a single NaN


@pytest.mark.skipif(not processor_levels(), reason="no compiled kernels on this machine")
def test_bfloat16_is_computed_from_blocks_with_the_bits_of_the_dequantised_weights(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = random_tokens(24)
    with caplog.at_level("INFO"):
        packed = tiny_runner(model, dtype="bfloat16")
    assert "8 of 8 weights are computed from their blocks, 0 dequantised" in caplog.text
    assert unread_sizes(model, read_model_config(model), 16, "bfloat16", level=level_of("auto"))[1] == (
        packed.parameter_bytes
    )
    path = dequantised(model, tmp_path / "m")
    wide = tiny_runner(path, dtype="bfloat16")
    experts = 4 * 4 * 3 * 64 * 96  # weights
    assert wide.parameter_bytes - packed.parameter_bytes >= experts * 2 * 0.46
    assert torch.equal(*(all_logits(runner, tokens, [9, 9, 6]) for runner in (packed, wide)))


def test_the_memory_of_experts_whose_scales_float16_cannot_hold_is_that_of_dequantised_ones(
    model: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(model, tmp_path / "m")
    tensors = load_file(path / "model.safetensors")
    tensors[f"{EXPERTS}.down_proj_scales"][:, 3, 1] = 127 + 20
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config, level = read_model_config(path), BLOCK_LEVELS[0]
    before, after = (unread_sizes(each, config, 16, "bfloat16", level=level)[1] for each in (model, path))
    weights = 4 * 64 * 96
    assert after - before == weights * 2 - weights // 32 * 34
    if level_of("auto") == level:
        assert tiny_runner(path, dtype="bfloat16").parameter_bytes == after


def dequantised(model: Path, path: Path) -> Path:
    shutil.copytree(model, path)
    tensors, config = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        blocks, scales = (tensors.pop(f"{name}_{kind}") for kind in ("blocks", "scales"))
        tensors[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    return path


def without_scales(tensors: Tensors) -> None:
    del tensors[f"{EXPERTS}.down_proj_scales"]


def short(tensors: Tensors) -> None:
    tensors[f"{EXPERTS}.down_proj_blocks"] = tensors[f"{EXPERTS}.down_proj_blocks"][:, :, :1].clone()


def of_floats(tensors: Tensors) -> None:
    tensors[f"{EXPERTS}.gate_up_proj_scales"] = tensors[f"{EXPERTS}.gate_up_proj_scales"].float()


def narrow(tensors: Tensors) -> None:
    for kind in ("blocks", "scales"):
        tensors[f"{EXPERTS}.down_proj_{kind}"] = tensors[f"{EXPERTS}.down_proj_{kind}"][:, :32].clone()


def not_a_number(tensors: Tensors) -> None:
    tensors[f"{EXPERTS}.down_proj_scales"][1, 2, 0] = 255


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (without_scales, f"tensor {EXPERTS}.down_proj_scales is missing, which MXFP4 requires"),
        (short, f"tensor {EXPERTS}.down_proj_blocks has shape [4, 64, 1, 16] and dtype torch.uint8, MXFP4 requires"),
        (of_floats, f"tensor {EXPERTS}.gate_up_proj_scales has shape [4, 192, 2] and dtype torch.float32"),
        (narrow, f"tensor {EXPERTS}.down_proj in MXFP4 has shape [4, 96, 32], config.json requires [4, 96, 64]"),
        (not_a_number, f"tensor {EXPERTS}.down_proj_scales holds NaN"),
    ],
)
def test_damaged_experts_are_refused_by_name(
    kernels: str, damage: Callable[[Tensors], None], reason: str, tmp_path: Path
) -> None:
    path = make_mxfp4_checkpoint(tmp_path / "m")
    tensors = load_file(path / "model.safetensors")
    damage(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartupError, match=re.escape(reason)):
        tiny_runner(path, kernels=kernels)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"modules_to_not_convert": ["model.layers.*.mlp.experts"]}, "_blocks is quantised, quantization_config says"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list of names"),
        ({"quant_method": "gptq"}, "quant_method 'gptq' is not supported for a model that transformers computes"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = make_mxfp4_checkpoint(tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= changes
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match=re.escape(reason)):
        tiny_runner(path)
