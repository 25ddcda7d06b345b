"""The tokenizer of a GGUF file as `tokenizer.json` and `tokenizer_config.json`.

Two kinds are common: `gpt2`, a byte-level BPE whose way to split text is only named (`tokenizer.ggml.pre`), and
`llama`, SentencePiece's BPE, which stores a score per token: of two neighbours, those are merged whose merged token has
the highest score (Kudo and Richardson 2018), so the merges follow from the scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.core.errors import StartupError

Metadata = Mapping[str, Any]
MAX_TOKEN_CHARS = 1024
"""Of SentencePiece's: all cuts of a token are tried, in time that grows with its length squared."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = {"type": "Digits", "individual_digits": True}
_PRE: dict[str, tuple[Any, ...]] = {  # what splits text before the byte-level step; None: that step's own expression
    "gpt-2": (None,),
    "smollm": (_DIGITS, None),
    "starcoder": (_DIGITS, None),
    "refact": (_DIGITS, None),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "tekken": (_TEKKEN,),
}
_WHOLE_WORDS_FIRST = {"llama-bpe", "llama3", "llama-v3", "smaug-bpe", "tekken"}
"""Tokenizers that take a word which is a token without merging (`ignore_merges`)."""
_BEGINS = {"llama-bpe", "llama3", "llama-v3", "tekken"}
"""Tokenizers that put BOS before a text if the file does not say whether (`add_bos_token`), as llama.cpp does."""
_NFC = {"qwen2", "deepseek-r1-qwen"}


def tokenizer_json(metadata: Metadata) -> dict[str, Any]:
    """Returns the object of a `tokenizer.json`.

    Raises:
        StartupError: a key is missing or of a kind that is not supported; one line that names it.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens, types = _list(metadata, "tokenizer.ggml.tokens", str), _list(metadata, "tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise StartupError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise StartupError("tokenizer.ggml.tokens has two equal tokens")
    if kind == "gpt2":
        parts = _byte_level(metadata, vocabulary)
    elif kind == "llama":
        parts = _sentencepiece(metadata, tokens, vocabulary)
    else:
        raise StartupError(f"tokenizer.ggml.model {kind!r:.60} is not supported (only gpt2, llama)")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": number, "content": token, **flags, "special": types[number] != USER_DEFINED}
        for number, token in enumerate(tokens)
        if types[number] in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added} | parts


def tokenizer_config(metadata: Metadata) -> dict[str, str]:
    """Returns the object of a `tokenizer_config.json`: the special tokens by their Hugging Face names."""
    tokens = _list(metadata, "tokenizer.ggml.tokens", str)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    token_ids = {name: metadata.get(f"tokenizer.ggml.{stored}_token_id") for name, stored in names.items()}
    return {  # without those that stand for none, such as 2**32 - 1
        name: tokens[number]
        for name, number in token_ids.items()
        if isinstance(number, int) and 0 <= number < len(tokens)
    }


def _byte_level(metadata: Metadata, vocabulary: dict[str, int]) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in _PRE:
        raise StartupError(f"tokenizer.ggml.pre {pre!r:.60} is not supported (only {', '.join(_PRE)})")
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": None in _PRE[pre]}
    splits = [
        {"type": "Split", "pattern": {"Regex": part}, "behavior": "Isolated", "invert": False}
        if isinstance(part, str)
        else part
        for part in _PRE[pre]
        if part is not None
    ]
    merges = [merge.split(" ") for merge in _list(metadata, "tokenizer.ggml.merges", str)]
    if wrong := next((merge for merge in merges if len(merge) != 2), None):
        raise StartupError(f"tokenizer.ggml.merges has {' '.join(wrong)!r:.60}, which is not two tokens")
    if wrong := next((merge for merge in merges if not vocabulary.keys() >= {*merge, "".join(merge)}), None):
        raise StartupError(f"tokenizer.ggml.merges has {' '.join(wrong)!r:.60}: a part, or what they make, is no token")
    return {
        "normalizer": {"type": "NFC"} if pre in _NFC else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, level]},
        "post_processor": _beginning(metadata, default=pre in _BEGINS) or level | {"trim_offsets": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocabulary, merges) | {"ignore_merges": pre in _WHOLE_WORDS_FIRST},
    }


def _sentencepiece(metadata: Metadata, tokens: list[str], vocabulary: dict[str, int]) -> dict[str, Any]:
    scores = _list(metadata, "tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise StartupError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    long = next((number for number, token in enumerate(tokens) if len(token) > MAX_TOKEN_CHARS), None)
    if long is not None:
        raise StartupError(f"tokenizer.ggml.tokens: token {long} has more than {MAX_TOKEN_CHARS} characters")
    merges = [
        (-scores[number], vocabulary[token[:cut]], vocabulary[token[cut:]])
        for number, token in enumerate(tokens)
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    begin = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    end = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    spaces = {"pattern": {"String": " "}, "content": "▁"}, {"pattern": {"String": "▁"}, "content": " "}
    decoders = [{"type": "Replace", **spaces[1]}, {"type": "ByteFallback"}, {"type": "Fuse"}, *end]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*begin, {"type": "Replace", **spaces[0]}]},
        "pre_tokenizer": None,
        "post_processor": _beginning(metadata, default=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocabulary, [[tokens[left], tokens[right]] for _, left, right in sorted(merges)])
        | {"unk_token": _token(metadata, "unknown", tokens, 0), "fuse_unk": True, "byte_fallback": True},
    }


def _bpe(vocabulary: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    off = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    flags = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **off, **flags, "vocab": vocabulary, "merges": merges}


def _beginning(metadata: Metadata, *, default: bool) -> dict[str, Any] | None:
    """The rule that puts BOS before a text; None if there is none."""
    number = metadata.get("tokenizer.ggml.bos_token_id")
    if not metadata.get("tokenizer.ggml.add_bos_token", default) or number is None:
        return None
    token = _token(metadata, "bos", _list(metadata, "tokenizer.ggml.tokens", str))
    text, begin = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": token, "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text, {"SpecialToken": {"id": token, "type_id": 1}}, second],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def _token(metadata: Metadata, name: str, tokens: list[str], default: int | None = None) -> str:
    key = f"tokenizer.ggml.{name}_token_id"
    number = metadata.get(key, default)
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise StartupError(f"{key} must be a token of the {len(tokens)}, not {number!r:.60}")
    return tokens[number]


def _list(metadata: Metadata, key: str, kind: type) -> list[Any]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
        raise StartupError(f"{key} is missing, or not a list of {kind.__name__}")
    return value
