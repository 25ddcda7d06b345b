"""Prompts to fill in the middle: text before and after a gap, between the tokens that a model was trained with.

Each family's order is prefix, suffix, middle; only the tokens differ.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

_FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
_ENDS = ("▁<EOT>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<file_sep>", "<|endoftext|>")


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """The ids before the prefix, between prefix and suffix, and after the suffix; `ends` end a middle."""

    prefix: int
    suffix: int
    middle: int
    ends: tuple[int, ...]


def infill_tokens(tokenizer: Tokenizer) -> InfillTokens | None:
    """Returns the tokens of a tokenizer, None if it has none of a known family."""
    for family in _FAMILIES:
        prefix, suffix, middle = map(tokenizer.token_to_id, family)
        if prefix is not None and suffix is not None and middle is not None:
            ends = [i for text in _ENDS if (i := tokenizer.token_to_id(text)) is not None]
            return InfillTokens(prefix, suffix, middle, tuple(ends))
    return None
