"""What is read from config.json, and that a model which cannot be served is refused with the name of the field."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from baton.core.errors import StartupError
from baton.engine.layers import inverse_frequencies
from baton.models.model_config import GeneralConfig, Llama3Rope, parse_config, parse_config_json, parse_model_config
from tests.support.checkpoints import EOS_ID, Arch, Shape, make_config

RERANKER: dict[str, Any] = {"architectures": ["LlamaForSequenceClassification"], "classifier_from_token": ["no", "yes"]}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
OLD_LLAMA3 = {"type" if key == "rope_type" else key: value for key, value in LLAMA3.items()}
RERANKER |= {"is_original_qwen3_reranker": True}


def config(arch: Arch = "llama", **changes: Any) -> dict[str, Any]:
    return make_config(arch, Shape()) | changes


@pytest.mark.parametrize(
    "case",
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures 'GPT2LMHeadModel' is not supported"),
        ({"architectures": [], "model_type": None}, "architectures None is not supported"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "architectures is Qwen2ForCausalLM but model_type is llama"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, "auto_map"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "num_attention_heads 6 is not a multiple of num_key"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None}, "hidden_size 64 is not a multiple of"),
        ({"head_dim": 15}, "head_dim 15 must be even"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be an integer from 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 3.0}, "num_hidden_layers"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
        ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a finite number"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta must be a finite number"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' is not supported"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}}, "rope_type 'linear' is not"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor is missing"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1"),
        ({"rope_parameters": []}, "rope_parameters must be an object"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters and rope_scaling are both set, and"),
        ({"rope_parameters": {}, "rope_scaling": {"type": "yarn"}}, "rope_type 'yarn' is not supported"),
        ({"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"type": "yarn"}}, "rope_type 'yarn' is not"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": 320}, "eos_token_id 320 is not a token id below 320"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id '2' is not a token id"),
        ({"dtype": "int8"}, "dtype 'int8' is not supported"),
        ({**RERANKER, "classifier_from_token": ["no"]}, "classifier_from_token must be two tokens"),
        ({**RERANKER, "is_original_qwen3_reranker": False}, "only supported with is_original_qwen3_reranker"),
    ],
    ids=lambda case: case[1][:40],
)
def test_bad_field_is_refused_by_name(case: tuple[dict[str, Any], str]) -> None:
    changes, message = case
    with pytest.raises(StartupError) as caught:
        parse_model_config(config(**changes))
    assert message in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff", "[" * 100_000, '"x"'])
def test_config_that_is_not_a_json_object_is_refused(text: str) -> None:
    with pytest.raises(StartupError, match=r"config\.json"):
        parse_config_json(text.encode("latin-1"))


def test_nan_in_the_config_is_refused() -> None:
    text = '{"model_type": "llama", "num_hidden_layers": NaN}'
    with pytest.raises(StartupError, match="num_hidden_layers must be an integer"):
        parse_model_config(parse_config_json(text))


def test_old_and_new_config_formats_give_the_same_model_config() -> None:
    old = parse_model_config(make_config("llama", Shape(old_config=True)))
    assert old == parse_model_config(make_config("llama", Shape()))
    assert old.rope_scaling == Llama3Rope(8.0, 1.0, 4.0, 64)
    assert old.torch_dtype == "float32"


@pytest.mark.parametrize(
    ("given", "as_in_transformers"),
    [
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_scaling": LLAMA3}, False),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": LLAMA3 | {"rope_theta": 5e5}}, True),
        ({"rope_parameters": {"type": "default"}, "rope_scaling": LLAMA3, "rope_theta": 5e5}, True),
        ({"rope_parameters": LLAMA3, "rope_scaling": LLAMA3, "rope_theta": 5e5}, True),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}, "rope_scaling": {}}, True),
        ({"rope_parameters": {}, "rope_scaling": OLD_LLAMA3, "rope_theta": 5e5}, True),
    ],
    ids=str,
)
def test_rope_scaling_completes_rope_parameters(given: dict[str, Any], as_in_transformers: bool) -> None:
    """transformers ignores rope_parameters beside rope_scaling, also a rope_theta that is only there."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields = config() | {"rope_parameters": None} | given
    parsed = parse_model_config(fields)
    assert (parsed.rope_theta, parsed.rope_scaling) == (5e5, Llama3Rope(8.0, 1.0, 4.0, 64))
    oracle, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**copy.deepcopy(fields)), "cpu")
    assert torch.allclose(inverse_frequencies(parsed), oracle) is as_in_transformers


@pytest.mark.parametrize(
    "given",
    [
        {"rope_parameters": LLAMA3, "rope_scaling": LLAMA3 | {"factor": 4.0}},
        {"rope_parameters": LLAMA3, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": LLAMA3 | {"rope_theta": 1e4}},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}, "rope_scaling": LLAMA3},
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "XForCausalLM"])
def test_rope_settings_that_contradict_each_other_are_refused(given: dict[str, Any], architecture: str) -> None:
    with pytest.raises(StartupError, match="rope_parameters and rope_scaling are both set, and contradict"):
        parse_config(config(architectures=[architecture], **given))


def test_architectures_differ_in_biases_qk_norm_and_rope_scaling() -> None:
    def parsed(arch: Arch, **shape: Any) -> Any:
        return parse_model_config(make_config(arch, Shape(**shape)))

    assert parsed("llama2").rope_scaling is None
    assert parsed("qwen2").qkv_bias and not parsed("qwen2").o_bias and not parsed("qwen2").qk_norm
    assert parsed("qwen3").qk_norm and not parsed("qwen3").qkv_bias
    assert parsed("qwen3", bias=True).o_bias
    assert not parsed("llama").qkv_bias


def test_sliding_windows_are_read_per_layer() -> None:
    def windows(arch: Arch, **changes: Any) -> tuple[int, ...]:
        return parse_model_config(config(arch, **changes)).windows

    assert windows("mistral") == (24, 24, 24)
    assert windows("mistral", sliding_window=None) == (0, 0, 0)
    assert windows("llama", sliding_window=24) == (0, 0, 0)
    assert windows("qwen2", sliding_window=24) == (0, 0, 0)
    assert windows("qwen2", use_sliding_window=True, sliding_window=24, max_window_layers=2) == (0, 0, 24)
    absent = config("qwen3", use_sliding_window=True, max_window_layers=1)
    del absent["sliding_window"]
    assert parse_model_config(absent).windows == (0, 4096, 4096)
    assert windows("qwen3", use_sliding_window=True, sliding_window=None) == (0, 0, 0)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows("qwen3", use_sliding_window=True, sliding_window=9, layer_types=types) == (9, 0, 9)
    with pytest.raises(StartupError, match="layer_types must list 3 layers"):
        windows("qwen3", use_sliding_window=True, sliding_window=9, layer_types=types[:2])


def test_eos_ids_are_a_tuple_without_repeats() -> None:
    assert parse_model_config(config(eos_token_id=None)).eos_token_ids == ()
    assert parse_model_config(config(eos_token_id=7)).eos_token_ids == (7,)
    assert parse_model_config(config(eos_token_id=[7, 9, 7])).eos_token_ids == (7, 9)


def test_kv_layout_follows_from_the_config() -> None:
    layout = parse_model_config(config("mistral")).kv_layout(16, "bfloat16")
    assert layout.block_size == 16
    assert [layer.window for layer in layout.layers] == [24, 24, 24]
    assert layout.bytes_per_token == 3 * 2 * 2 * 16 * 2


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_other_architectures_are_left_to_transformers(model_impl: str) -> None:
    gpt2 = {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 320,
        "n_embd": 64,
        "n_positions": 1024,
        "eos_token_id": [5],
    }
    assert parse_config(gpt2, model_impl) == GeneralConfig(320, 64, 1024, (5,))
    whisper = gpt2 | {"architectures": ["WhisperForCausalLM"], "n_positions": None, "max_target_positions": 448}
    assert parse_config(whisper, model_impl) == GeneralConfig(320, 64, 448, (5,))
    yarn = config(rope_parameters={"rope_type": "yarn"})
    assert parse_config(yarn, model_impl) == GeneralConfig(320, 64, 4096, (EOS_ID,))


def test_auto_is_the_own_path_where_it_supports_the_model() -> None:
    assert parse_config(config()) == parse_model_config(config()) == parse_config(config(), "baton")
    assert isinstance(parse_config(config(), "transformers"), GeneralConfig)
    with pytest.raises(StartupError, match="rope_type 'yarn' is not supported"):
        parse_config(config(rope_parameters={"rope_type": "yarn"}), "baton")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_hidden_layers": 0},
            "num_hidden_layers must be",
        ),  # an error on Baton's own path is no reason to leave it
        ({"architectures": ["XForCausalLM"], "auto_map": {}}, "auto_map requires code"),
        (
            {"architectures": ["XForCausalLM"], "quantization_config": {"bits": 4}},
            "quant_method None is not supported for a model that transformers",
        ),
        ({"architectures": ["XForCausalLM"], "text_config": {}}, "text_config: a multimodal model is not supported"),
        ({"architectures": ["XForConditionalGeneration"]}, "'XForConditionalGeneration' does not generate text, or is"),
        ({"architectures": ["XForCausalLM"], "vocab_size": None}, "vocab_size is missing"),
        ({"architectures": ["XForCausalLM"], "eos_token_id": 999}, "eos_token_id 999 is not a token id"),
        ({"architectures": ["XForCausalLM"], "dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
    ],
)
def test_what_no_path_serves_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError) as caught:
        parse_config(config(**changes))
    assert message in caught.value.message
