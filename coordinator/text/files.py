"""The text files of a Hugging Face model directory, read once at start.

config.json and tokenizer.json are required; generation_config.json, tokenizer_config.json (or the older
special_tokens_map.json) and a chat template (chat_template.jinja, or in tokenizer_config.json) are read if present. A
damaged file raises a one-line StartupError that names it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer

from baton.core.errors import StartupError
from baton.models.model_config import AnyConfig, parse_config, parse_config_json
from baton.runtime.paths import read_regular
from coordinator.text.template import ChatTemplate

MAX_TEMPLATE_CHARS = 1 << 20
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SAMPLING = {
    "temperature": (0.0, 1e6),
    "top_p": (1e-6, 1.0),
    "top_k": (-1, 1 << 31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}
_NOT_SERVED = {"typical_p": (None, 1, 1.0), "no_repeat_ngram_size": (None, 0), "num_beams": (None, 1)}


@dataclass(frozen=True, slots=True)
class TextFiles:
    """`parts` is the parsed tokenizer.json; `sampling` has generation_config's values of the sampling fields that are
    served; `ignored` names its other sampling fields that would change the output."""

    tokenizer: Tokenizer
    parts: dict[str, Any]
    config: AnyConfig
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    chat_template: ChatTemplate | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


def read_text_files(directory: Path) -> TextFiles:
    """Reads the files. Raises StartupError."""
    config = parse_config(parse_config_json(read_file(directory / "config.json")))
    tokenizer, parts = _tokenizer(directory / "tokenizer.json")
    settings = _object(directory / "tokenizer_config.json")
    generation = _object(directory / "generation_config.json")
    names = _special_tokens(_object(directory / "special_tokens_map.json") | settings)
    eos = [*config.eos_token_ids, *_ids(generation.get("eos_token_id"), config.vocab_size)]
    named = tokenizer.token_to_id(names["eos_token"]) if "eos_token" in names else None
    if named is not None:
        eos.append(named)
    return TextFiles(
        tokenizer=tokenizer,
        parts=parts,
        config=config,
        special_tokens=names,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        chat_template=_chat_template(directory, settings, names),
        sampling=_sampling(generation),
        ignored=tuple(n for n, neutral in _NOT_SERVED.items() if generation.get(n) not in neutral),
    )


def _tokenizer(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    raw = read_file(path)
    try:
        tokenizer = Tokenizer.from_buffer(raw)
        parts: dict[str, Any] = orjson.loads(raw)
    except Exception as error:  # tokenizers raises bare Exception
        raise StartupError(f"{path.name} is damaged: {str(error)[:200]}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer, parts | {"padding": None, "truncation": None}


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _TOKEN_NAMES:
        value = settings.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if value is not None and not isinstance(value, str):
            raise StartupError(f"tokenizer_config.json: {name} must be a string")
        if value:
            tokens[name] = value
    return tokens


def _chat_template(directory: Path, settings: dict[str, Any], names: dict[str, str]) -> ChatTemplate | None:
    path = directory / "chat_template.jinja"
    source = read_file(path).decode(errors="replace") if path.exists() else settings.get("chat_template")
    if isinstance(source, list):
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        source = named.get("default")
    if source is None or source == "":
        return None
    if not isinstance(source, str) or len(source) > MAX_TEMPLATE_CHARS:
        raise StartupError(f"chat template: must be a string of at most {MAX_TEMPLATE_CHARS} characters")
    return ChatTemplate(source, names)


def _sampling(generation: dict[str, Any]) -> dict[str, Any]:
    defaults = {}
    for name, (low, high) in _SAMPLING.items():
        value = generation.get(name)
        if value is None:
            continue
        kinds = (int,) if name == "top_k" else (int, float)
        if type(value) not in kinds or not low <= value <= high:
            raise StartupError(f"generation_config.json: invalid {name} {value!r:.60}")
        defaults[name] = value
    return defaults


def _ids(value: Any, vocab_size: int) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size:
            raise StartupError(f"generation_config.json: eos_token_id {i!r:.60} is not a token id below {vocab_size}")
    return ids


def _object(path: Path) -> dict[str, Any]:
    """Returns the object in an optional JSON file, empty if there is no file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{path.name} is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise StartupError(f"{path.name} must hold an object")
    return value


def read_file(path: Path) -> bytes:
    """Returns the content of a regular file. Raises StartupError, which names it."""
    try:
        return read_regular(path)
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from None
