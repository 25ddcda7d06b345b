"""Model directories with everything for text: tokenizer, configs and chat template, but no weights."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from coordinator.text.model import TextModel
from tests.support import tokenizers_kit as kit

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def model_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 512,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 1,
    } | changes


def text_dir(
    path: Path,
    tokenizer: Tokenizer | None = None,
    *,
    template: str | None = CHATML,
    config: dict[str, Any] | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
) -> Path:
    """Writes a directory that both `TextModel.load` and transformers can read."""
    path.mkdir(parents=True, exist_ok=True)
    (tokenizer or kit.byte_level()).save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings | (tokenizer_config or {})))
    (path / "config.json").write_text(json.dumps(model_config(**(config or {}))))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


@cache
def shared_text_model(template: str) -> TextModel:
    """A model of 4,096 tokens of context for all tests of a process: the child that renders its template takes longer
    to start than most of them."""
    with tempfile.TemporaryDirectory() as directory:
        return TextModel.load(text_dir(Path(directory), template=template, config={"max_position_embeddings": 4096}))
