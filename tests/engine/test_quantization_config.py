"""What is read of quantization_config; what is not supported is refused by the name of its field."""

from __future__ import annotations

from typing import Any

import pytest

from baton.core.errors import StartupError
from baton.models import quantization_config
from baton.models.quantization_config import Scheme, parse_quantization_config
from tests.support.quantized import compressed

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
PACKED = {"num_bits": 4, "strategy": "group", "group_size": 128}


def packed(**weights: Any) -> dict[str, Any]:
    return compressed("pack-quantized", **(PACKED | weights))


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        (GPTQ, Scheme("gptq", 4, 1, 128, offset_zeros=True, scale_name="scales")),
        (GPTQ | {"checkpoint_format": "gptq_v2", "bits": 8}, Scheme("gptq", 8, 1, 128, scale_name="scales")),
        (GPTQ | {"group_size": -1}, Scheme("gptq", 4, 1, 0, offset_zeros=True, scale_name="scales")),
        (AWQ, Scheme("awq", 4, 1, 128, scale_name="scales")),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"},
            Scheme("awq", 4, 1, 64, scale_name="scales"),
        ),
        (FP8, Scheme("plain", 8, 128, 128, True, scale_name="weight_scale_inv")),
        ({"quant_method": "fp8", "activation_scheme": "static"}, Scheme("plain", 8, 0, 0, True)),
        (packed(), Scheme("packed", 4, 1, 128, True)),
        (packed(strategy=None, symmetric=False), Scheme("packed", 4, 1, 128)),
        (compressed("int-quantized"), Scheme("plain", 8, 1, 0, True)),
        (compressed("naive-quantized", type="float", strategy="tensor"), Scheme("plain", 8, 0, 0, True)),
        (
            compressed("float-quantized", type="float", strategy="block", block_structure=[128, 64]),
            Scheme("plain", 8, 128, 64, True),
        ),
    ],
    ids=str,
)
def test_schemes(config: dict[str, Any], scheme: Scheme) -> None:
    assert parse_quantization_config(config).scheme("model.layers.0.mlp.up_proj") == scheme


def test_layers_have_the_scheme_of_their_name_before_that_of_all() -> None:
    config = packed()
    down = {"targets": ["re:.*down_proj$"], "format": "int-quantized", "weights": {"num_bits": 8}}
    config["config_groups"]["group_1"] = down
    config["ignore"] = ["re:.*layers\\.7\\..*", "model.layers.1.mlp", "lm_head"]
    parsed = parse_quantization_config(config)
    bits = {name: scheme and scheme.bits for name in NAMES for scheme in [parsed.scheme(name)]}
    assert list(bits.values()) == [4, 8, None, None, 4, None]


NAMES = (
    "model.layers.0.mlp.up_proj",
    "model.layers.0.mlp.down_proj",
    "model.layers.7.mlp.down_proj",
    "model.layers.1.mlp.down_proj",
    "model.layers.11.mlp.up_proj",
    "lm_head",
)


def test_layers_that_gptqmodel_leaves_out_are_ignored() -> None:
    parsed = parse_quantization_config(GPTQ | {"dynamic": {"lm_head": {}, r"-:.*\.down_proj": {}, "+:.*up": None}})
    assert [parsed.ignores(name) for name in NAMES] == [False, True, True, True, False, False]


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        (".*lm_head", [5]),
        (".*mlp.*", [0, 1, 2, 3, 4]),
        (r"^model\.layers\.(?:[0-6])\.", [0, 1, 3]),
        ("model.layers.[0-9]+.mlp.up_proj$", [0, 4]),
        (r".*mlp\.(gate|up|gate_up)_proj.*", [0, 4]),
        (r"model\.layers\.([2-9]\d*|[1-9]\d+)\..*", [2, 4]),
        (r"^(?!.*(?:mlp)).*$", [5]),
        (r"^(?!.*\.(?:down)_proj).*", [0, 4, 5]),
    ],
)
def test_expressions_as_programs_that_quantise_write_them(pattern: str, matched: list[int]) -> None:
    parsed = parse_quantization_config(packed() | {"ignore": [f"re:{pattern}"]})
    assert [n for n, name in enumerate(NAMES) if parsed.ignores(name)] == matched


@pytest.mark.parametrize("field", ["ignore", "targets", "dynamic"])
def test_an_expression_that_backtracks_without_end_takes_few_steps(field: str) -> None:
    costly, config = r"([\w.]+)+!", packed()
    if field == "dynamic":
        config = GPTQ | {"dynamic": {f"-:{costly}": {}}}
    elif field == "ignore":
        config["ignore"] = [f"re:{costly}"]
    else:
        config["config_groups"]["group_1"] = {"targets": [f"re:{costly}"], "weights": {"num_bits": 8}}
    scheme = parse_quantization_config(config).scheme("model.layers.0.self_attn.q_proj")
    assert scheme is not None and scheme.bits == 4


def test_expressions_that_take_too_many_steps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization_config, "_MAX_STEPS", 10_000)
    parsed = parse_quantization_config(packed() | {"ignore": ["re:" + "(" * 6 + ".?" + "){40}" * 6 + "!"]})
    with pytest.raises(StartupError, match=r"^config.json: quantization_config: '.*' is too costly: .* 10,000 steps"):
        parsed.ignores("model.layers.0.mlp.up_proj")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "quantization_config must be an object"),
        ({}, "quant_method None is not supported (only gptq, awq, fp8, compressed-tensors)"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported"),
        ({"quant_method": "mxfp4"}, "quant_method 'mxfp4' is not supported"),
        (GPTQ | {"bits": 3}, "bits 3 is not supported (only 4, 8)"),
        (GPTQ | {"bits": True}, "bits True is not supported"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported (only gptq, gptq_v2)"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format True is not supported"),
        (GPTQ | {"dynamic": {"+:.*down": {"bits": 8}}}, "dynamic is only supported with rules that leave"),
        (GPTQ | {"group_size": 0}, "group_size must be -1 or the inputs of a group, not 0"),
        (GPTQ | {"group_size": None}, "group_size must be -1"),
        (AWQ | {"version": "gemv"}, "version 'gemv' is not supported (only gemm)"),
        (AWQ | {"zero_point": False}, "zero_point False is not supported"),
        (AWQ | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list of names"),
        (AWQ | {"modules_to_not_convert": ["re:("]}, "modules_to_not_convert: '(' is no regular expression"),
        (AWQ | {"modules_to_not_convert": ["re:" + "a" * 5000]}, "has more than 4,096 characters"),
        (GPTQ | {"dynamic": {"-:(?<!x)a": {}}}, "dynamic: '(?<!x)a' has '(?<' at 0, which is not supported"),
        (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2' is not supported (only e4m3)"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size must be two sizes of a block, not [128]"),
        (FP8 | {"weight_block_size": [128, 0]}, "weight_block_size must be two sizes"),
        (packed() | {"format": "marlin-24"}, "format 'marlin-24' is not supported (only pack-quantized"),
        (packed() | {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized' is not supported"),
        (packed() | {"quantization_status": "frozen"}, "quantization_status 'frozen' is not supported"),
        (packed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is not supported"),
        (packed() | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config is not supported"),
        (packed() | {"config_groups": {}}, "config_groups is missing or empty"),
        (packed() | {"config_groups": {"g": {"targets": ["Linear"]}}}, "config_groups.g.weights must be an object"),
        (packed(num_bits=3), "config_groups.group_0.weights.num_bits 3 is not supported (only 4, 8)"),
        (packed(type="float"), "group_0.weights.type 'float' is not supported (only int)"),
        (packed(strategy="token"), "group_0.weights.strategy 'token' is not supported"),
        (packed(strategy="block", block_structure=[1, 1]), "group_0.weights.strategy 'block' is not supported"),
        (packed(dynamic=True), "group_0.weights.dynamic True is not supported"),
        (packed(group_size="128"), "group_0.weights.group_size must be -1 or the inputs of a group, not '128'"),
        (compressed("float-quantized", type="float", symmetric=False), "weights.symmetric False is not supported"),
    ],
    ids=str,
)
def test_unsupported_fields_are_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(StartupError) as caught:
        parse_quantization_config(config)
    assert message in caught.value.message and caught.value.message.startswith("config.json: quantization_config")
    assert "\n" not in caught.value.message and len(caught.value.message) < 200
