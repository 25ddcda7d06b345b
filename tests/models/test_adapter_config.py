"""What `adapter_config.json` means: PEFT's rules for names, ranks and scaling, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.models.adapter_config import LowRank, adapted_modules, adapter_digest, check_tensors, tensor_name
from baton.models.model_config import ModelConfig, parse_model_config
from tests.support.checkpoints import Shape, make_config

MODEL: ModelConfig = parse_model_config(make_config("llama", Shape(num_layers=2)))
BASE: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}


def modules(max_rank: int = 64, **given: Any) -> dict[str, LowRank]:
    return adapted_modules(json.dumps(BASE | given).encode(), MODEL, max_rank)


def names(**given: Any) -> list[str]:
    return [name.removeprefix("model.layers.") for name in modules(**given)]


def test_modules_are_selected_by_name_by_the_end_of_it_or_by_a_regular_expression() -> None:
    by_end = ["0.self_attn.q_proj", "0.mlp.down_proj", "1.self_attn.q_proj", "1.mlp.down_proj"]
    assert names() == by_end
    assert names(target_modules=["model.layers.1.mlp.up_proj", "_proj"]) == ["1.mlp.up_proj"]
    assert names(target_modules=r".*1\.self_attn\.[kv]_proj") == ["1.self_attn.k_proj", "1.self_attn.v_proj"]
    assert len(names(target_modules="all-linear")) == 14
    assert names(exclude_modules=["q_proj"]) == [by_end[1], by_end[3]]
    assert names(layers_to_transform=[1]) == by_end[2:] == names(layers_to_transform=1)


def test_rank_and_scaling_follow_the_patterns() -> None:
    made = modules(rank_pattern={"down_proj": 16}, alpha_pattern={r"0\.self_attn\.q_proj": 2})
    assert made["model.layers.0.self_attn.q_proj"] == LowRank(4, 0.5, 64, 64)
    assert made["model.layers.1.self_attn.q_proj"].scaling == 2.0
    assert made["model.layers.0.mlp.down_proj"] == LowRank(16, 0.5, 64, 160)
    assert modules(use_rslora=True)["model.layers.0.self_attn.q_proj"].scaling == 4.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type must be LORA, not 'IA3'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is not supported, given \['lm_head'\]"),
        ({"use_dora": True}, "use_dora is not supported"),
        ({"bias": "lora_only"}, "bias 'lora_only' is not supported"),
        ({"lora_bias": True}, "lora_bias is not supported"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' is not supported"),
        ({"r": 65}, "rank of model.layers.0.self_attn.q_proj is 65; --max-lora-rank allows 1 to 64"),
        ({"rank_pattern": {"q_proj": 3.5}}, "rank of .* is 3.5"),
        ({"r": "4"}, "r must be a number above 0, not '4'"),
        ({"lora_alpha": 0}, "lora_alpha must be a number above 0"),
        ({"target_modules": "(q_proj"}, r"target_modules: '\(q_proj' is no regular expression"),
        ({"alpha_pattern": {r"(q)\1": 4}}, r"alpha_pattern: .* at 3, which is not supported"),
        ({"target_modules": ["w1"]}, r"target_modules \['w1'\] match no linear layer"),
        ({"target_modules": None}, "target_modules is missing"),
        ({"target_modules": [1]}, "target_modules must be a string or a list"),
        ({"layers_to_transform": "1"}, "layers_to_transform must be a list"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"adapter_config.json: .*{message}") as caught:
        modules(**given)
    assert "\n" not in caught.value.message and caught.value.param == "lora_path"


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"])
def test_a_pattern_that_re_never_ends_to_match_is_answered(key: str) -> None:
    pattern = "(.+)+!"
    given = {key: {pattern: 4} if key.endswith("pattern") else pattern}
    if key == "target_modules":
        with pytest.raises(InvalidRequest, match=r"target_modules .* match no linear layer"):
            modules(**given)
    else:
        assert modules(**given) == modules()


def test_a_pattern_that_takes_too_many_steps_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"adapter_config\.json: exclude_modules: .* is too costly"):
        modules(exclude_modules="(" * 5 + ".?" + "){40}" * 5 + "!")


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_what_is_no_config_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"adapter_config\.json"):
        adapted_modules(text, MODEL, 64)


def test_the_first_tensor_that_differs_is_named() -> None:
    adapted = modules(target_modules=["q_proj"], layers_to_transform=[0])
    a, b = (tensor_name("model.layers.0.self_attn.q_proj", matrix) for matrix in "AB")
    right: dict[str, tuple[int, ...]] = {a: (4, 64), b: (64, 4)}
    check_tensors(adapted, right)
    for shapes, message in (
        ({a: (4, 64)}, f"tensor {b} is missing"),
        (right | {b: (64, 8)}, rf"tensor {b} has shape \[64, 8\], expected \[64, 4\]"),
        (right | {"base_model.model.lm_head.lora_A.weight": (4, 64)}, "lm_head.lora_A.weight' is of no linear layer"),
    ):
        with pytest.raises(InvalidRequest, match=f"adapter_model.safetensors: .*{message}"):
            check_tensors(adapted, shapes)


def test_the_digest_is_that_of_both_files() -> None:
    digests = {adapter_digest(*files) for files in ((b"a", b"b"), (b"ab", b""), (b"a", b"c"), (b"b", b"b"))}
    assert len(digests) == 4 and all(len(digest) == 32 for digest in digests)
