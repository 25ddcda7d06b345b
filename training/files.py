"""The tokenizer's files: tokenizer.json, tokenizer_config.json and the chat template."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from training.data import BOS, END, PAD, SPECIAL_TOKENS
from training.model import write_json

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role: ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the files that `AutoTokenizer.from_pretrained(folder)` needs."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    added = {str(i): {"content": token, **plain} for i, token in enumerate(SPECIAL_TOKENS)}
    config = {
        "added_tokens_decoder": added,
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", config)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
