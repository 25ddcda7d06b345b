"""Prompts to fill in the middle: text before and after a gap, between the tokens that a model was trained with.

The order is prefix, suffix, middle, except for Codestral, which reads the suffix first and continues the prefix. The
client's texts are encoded without control tokens, so that none can end the prefix or the suffix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from coordinator.text.chat import ControlTokens

_FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("[PREFIX]", "[SUFFIX]", None),  # Codestral, as mistral-common writes it: without its [MIDDLE]
)
_ENDS = ("▁<EOT>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<file_sep>", "<|endoftext|>")


@dataclass(frozen=True, slots=True)
class Infill:
    """The ids before the prefix and before the suffix, and after both, if there is one; `ends` end a middle. `lead` is
    a text that keeps a SentencePiece tokenizer from putting a space before the suffix, else empty."""

    prefix: int
    suffix: int
    middle: int | None
    ends: tuple[int, ...]
    lead: str
    controls: ControlTokens

    def encode(self, before: str, after: str) -> list[int]:
        """Returns the prompt, without BOS, whose output fills the gap between two texts. Blocks: call it from a thread.

        Raises:
            InvalidRequest: a noncharacter, or a control token that this tokenizer cannot encode as text.
        """
        head = [self.prefix, *self.controls.encode_text(before, "prompt")]
        lead = self.controls.encode_text(self.lead, "suffix")
        ids = self.controls.encode_text(self.lead + after, "suffix")
        tail = [self.suffix, *(ids[len(lead) :] if ids[: len(lead)] == lead else ids)]
        return [*tail, *head] if self.middle is None else [*head, *tail, self.middle]


def infill_of(tokenizer: Tokenizer, parts: Mapping[str, Any], *, byte_level: bool) -> Infill | None:
    """Returns how a tokenizer, whose parsed JSON is `parts`, fills in the middle; None if it has the tokens of no known
    family."""
    for family in _FAMILIES:
        names = [text for text in family if text is not None]
        ids = [i for text in names if (i := tokenizer.token_to_id(text)) is not None]
        if len(ids) < len(names):
            continue
        ends = {text: i for text in _ENDS if (i := tokenizer.token_to_id(text)) is not None}
        special = (t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special)
        controls = ControlTokens(tokenizer, parts, {*special, *names, *ends})
        middle = ids[2] if len(ids) > 2 else None
        return Infill(ids[0], ids[1], middle, tuple(ends.values()), "" if byte_level else "\n", controls)
    return None
