"""Quantised checkpoints have the weights of their reference dequantisation, bit for bit, whole and in parts; computed
from their packed form they have the logits of the dequantised model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.core.errors import StartupError
from baton.engine.checkpoint import Checkpoint, read_model_config
from baton.engine.kernels import native
from baton.engine.parallel import TPGroup
from baton.engine.weights import Projection, WeightReader
from tests.engine.tiles import load
from tests.support.checkpoints import make_checkpoint
from tests.support.engine_driver import all_logits, bfloat16_levels, random_tokens, tiny_runner
from tests.support.quantized import awq, gptq, packed, plain, words, write_quantized

LEVELS = [level for level in bfloat16_levels() if load(level).computes_blocks]
KINDS = {
    "gptq": gptq(),
    "gptq, one group": gptq(group=-1),
    "gptq, groups of 48": gptq(group=48),
    "gptq v2": gptq(version=2),
    "gptq v2, 8 bits, symmetric": gptq(bits=8, version=2, symmetric=True),
    "gptq, 8 bits": gptq(bits=8),
    "gptq, act order": gptq(act_order=True),
    "awq": awq(),
    "awq, groups of 128": awq(group=128),
    "packed": packed(),
    "packed, float16": packed(dtype=torch.float16, group=64),
    "packed, asymmetric": packed(symmetric=False),
    "packed, channels": packed(group=0),
    "packed, 8 bits": packed(bits=8),
    "packed, act order": packed(act_order=True),
    "int8": plain("int", (0, 0)),
    "int8, asymmetric": plain("int", (0, 0), symmetric=False),
    "fp8 of compressed-tensors, channels": plain("float", (0, 0)),
    "fp8 of compressed-tensors, tensor": plain("float"),
    "fp8 of compressed-tensors, blocks": plain("float", (32, 48)),
    "fp8, blocks": plain("float", (128, 128), "fp8"),
    "fp8, tensor": plain("float", None, "fp8"),
}
IN_BLOCKS = {
    "gptq": True,
    "gptq, groups of 48": False,
    "gptq, act order": False,
    "gptq v2, 8 bits, symmetric": True,
    "awq, groups of 128": True,
    "packed": True,
    "packed, asymmetric": True,
    "packed, channels": True,
    "packed, 8 bits": True,
    "int8": True,
    "int8, asymmetric": False,
    "fp8, blocks": False,
}
Q_PROJ = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source"), "qwen3", intermediate_size=160, dtype="bfloat16")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_reference_bit_for_bit(source: Path, kind: str, tmp_path: Path) -> None:
    expected = write_quantized(source, tmp_path / "m", KINDS[kind])
    checkpoint = Checkpoint(tmp_path / "m")
    assert checkpoint.tensors.keys() == Checkpoint(source).tensors.keys()
    assert len(expected) == 3 * 7
    for name, weight in expected.items():
        assert checkpoint.tensors[name].shape == weight.shape
        assert torch.equal(checkpoint.read(name), weight), name
        for rows, columns in ((slice(5, 30), slice(None)), (slice(None), slice(13, 61)), (slice(3, 4), slice(32, 64))):
            assert torch.equal(checkpoint.read(name, rows, columns), weight[rows, columns]), name


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_integers_are_packed_as_by_compressed_tensors(bits: int, symmetric: bool) -> None:
    """The package packs integers, and dequantises to the dtype of the scales, as tests/support/quantized.py does."""
    _, layer = packed(bits=bits, symmetric=symmetric)
    tensors, weight = layer(40, 64, torch.Generator().manual_seed(1))
    middle = 1 << bits - 1
    bytes_of = tensors["weight_packed"].view(torch.uint8)
    unsigned = bytes_of if bits == 8 else torch.stack([bytes_of & 15, bytes_of >> 4], -1).flatten(1)
    signed = (unsigned.short() - middle).to(torch.int8)
    assert torch.equal(pack_to_int32(signed, bits), tensors["weight_packed"])
    scales, zeros = tensors["weight_scale"], None
    if not symmetric:
        zeros = torch.round(signed[:, ::32].float() - weight[:, ::32] / scales.float()).to(torch.int8)
        assert torch.equal(pack_to_int32(zeros, bits, packed_dim=0), tensors["weight_zero_point"])
    args = QuantizationArgs(num_bits=bits, strategy="group", group_size=32, symmetric=symmetric)
    assert torch.equal(dequantize(signed, scales, zeros, args), weight.to(scales.dtype))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", IN_BLOCKS)
def test_logits_are_those_of_the_dequantised_model(
    source: Path, level: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_quantized(source, tmp_path / "m", KINDS[kind])
    packings: list[str] = []
    for name in ("pack_blocks", "pack_weight"):
        original = getattr(native, name)

        def counted(*given: Any, name: str = name, original: Any = original, **more: Any) -> Any:
            packings.append(name)
            return original(*given, **more)

        monkeypatch.setattr(native, name, counted)

    def logits() -> tuple[Tensor, int]:
        runner = tiny_runner(tmp_path / "m", dtype="bfloat16", kernels=level)
        return all_logits(runner, random_tokens(70), [40, 1, 1, 12, 13]), runner.parameter_bytes

    computed, size = logits()
    assert packings.count("pack_blocks") == (4 * 3 if IN_BLOCKS[kind] else 0)
    packings.clear()
    monkeypatch.setattr(native.Kernels, "computes_blocks", False)
    expected, dequantised = logits()
    assert "pack_blocks" not in packings and size <= (0.8 if IN_BLOCKS[kind] else 1) * dequantised
    assert torch.equal(computed, expected)


def projections(model_dir: Path, rank: int, size: int, in_blocks: bool) -> list[Projection]:
    config = read_model_config(model_dir)
    reader = WeightReader(Checkpoint(model_dir), config, TPGroup(rank, size), torch.float32, torch.device("cpu"))
    reader.in_blocks = in_blocks
    layers = [reader.layer(index) for index in range(config.num_layers)]
    values = [getattr(layer, field.name) for layer in layers for field in fields(layer)]
    return [value for value in values if isinstance(value, Projection)]


def weight_of(projection: Projection) -> Tensor:
    return projection.weight if projection.blocks is None else projection.blocks.dequantized()


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("kind", ["gptq", "gptq, act order", "awq, groups of 128", "packed, asymmetric", "fp8, blocks"])
def test_ranks_read_parts_of_the_same_weights(source: Path, kind: str, in_blocks: bool, tmp_path: Path) -> None:
    write_quantized(source, tmp_path / "m", KINDS[kind])
    alone = projections(tmp_path / "m", 0, 1, False)
    left, right = (projections(tmp_path / "m", rank, 2, in_blocks) for rank in (0, 1))
    for one, a, b in zip(map(weight_of, alone), map(weight_of, left), map(weight_of, right), strict=True):
        if a.shape[1] == one.shape[1]:  # column-parallel: other outputs
            assert {tuple(row) for row in one.tolist()} == {tuple(row) for row in torch.cat([a, b]).tolist()}
        else:
            assert torch.equal(torch.cat([a, b], dim=1), one)


@pytest.mark.parametrize("ignore", ["model.layers.1.mlp", "down_proj", "re:.*down_proj$"])
def test_modules_that_are_ignored_stay_as_they_are(source: Path, ignore: str, tmp_path: Path) -> None:
    config, layer = packed()
    config["ignore"] = ["lm_head", ignore]
    write_quantized(source, tmp_path / "m", (config, layer))
    with pytest.raises(StartupError, match=r"down_proj\.weight_packed is quantised, quantization_config says that it"):
        Checkpoint(tmp_path / "m")
    tensors, original = load_file(tmp_path / "m" / "model.safetensors"), load_file(source / "model.safetensors")
    for name in [name for name in original if "down_proj" in name or ".1.mlp." in name]:
        for last in ("weight_packed", "weight_scale", "weight_shape"):
            del tensors[f"{name.removesuffix('weight')}{last}"]
        tensors[name] = original[name]
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(Checkpoint(tmp_path / "m").read(name), original[name])


Edit = Callable[[dict[str, Tensor]], object]


def replaced(name: str, change: Callable[[Tensor], Tensor]) -> Edit:
    return lambda tensors: tensors.update({f"{Q_PROJ}.{name}": change(tensors[f"{Q_PROJ}.{name}"])})


REFUSED: dict[str, tuple[str, Edit, str]] = {
    "scales missing": ("gptq", lambda tensors: tensors.pop(f"{Q_PROJ}.scales"), "scales is missing, which"),
    "zeros missing": ("awq", lambda tensors: tensors.pop(f"{Q_PROJ}.qzeros"), "qzeros is missing, which"),
    "shape missing": ("packed", lambda tensors: tensors.pop(f"{Q_PROJ}.weight_shape"), "weight_shape is missing"),
    "shape of scales": ("gptq", replaced("scales", lambda t: t[:1].clone()), r"scales has shape \[1, 64\], quant"),
    "dtype of words": ("awq", replaced("qweight", lambda t: t.long()), "qweight has dtype torch.int64, expected"),
    "dtype of scales": ("packed", replaced("weight_scale", lambda t: t.int()), "weight_scale has dtype torch.int32"),
    "words of the other axis": ("packed", replaced("weight_packed", lambda t: t.T.contiguous()), "weight_packed has s"),
    "group numbers": ("gptq, act order", replaced("g_idx", lambda t: t + 1), "g_idx has numbers that are not from 0"),
    "scales that are NaN": ("fp8, blocks", replaced("weight_scale_inv", lambda t: t * torch.nan), "holds NaN"),
    "scales in blocks": ("packed", replaced("weight_scale", lambda t: t * torch.inf), "holds NaN"),
    "fp8 without scales": (
        "fp8, tensor",
        lambda tensors: tensors.pop(f"{Q_PROJ}.weight_scale"),
        "weight_scale is missing, which",
    ),
    "a stranger": ("gptq", lambda tensors: tensors.update({"x.scales": torch.ones(1)}), "x.scales does not belong"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_that_do_not_fit_the_scheme_are_refused_by_name(source: Path, case: str, tmp_path: Path) -> None:
    kind, edit, message = REFUSED[case]
    write_quantized(source, tmp_path / "m", KINDS[kind])
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(StartupError, match=message) as caught:
        tiny_runner(tmp_path / "m", dtype="bfloat16")
    assert "\n" not in caught.value.message and len(caught.value.message) < 300


def test_biases_of_zeros_are_left_out_and_others_refused(source: Path, tmp_path: Path) -> None:
    write_quantized(source, tmp_path / "m", KINDS["gptq"])
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file) | {f"{Q_PROJ}.bias": torch.zeros(64).half()}
    save_file(tensors, file, metadata={"format": "pt"})
    tiny_runner(tmp_path / "m")
    tensors[f"{Q_PROJ}.bias"][3] = 1.0
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(StartupError, match=r"q_proj\.bias does not belong to this model"):
        tiny_runner(tmp_path / "m")


def test_zero_points_of_version_1_are_one_less_than_those_of_version_2() -> None:
    """As GPTQModel converts them: word by word, so that a zero point of 0 borrows from the next."""
    zeros = torch.tensor([[8, 1, 15, 3, 9, 8, 7, 1]])
    assert torch.equal(words(zeros - 1, 4, 1) + 0x11111111, words(zeros, 4, 1))
