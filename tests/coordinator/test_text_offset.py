"""`text_offset` of log-probabilities: where each token's text begins in the text of the choice."""

from __future__ import annotations

from typing import Any

import pytest

from baton.core.request import TokenLogprob
from coordinator.openai.render import CompletionLogprobs
from coordinator.text.stream import TextStream, Vocabulary
from tests.support import tokenizers_kit as kit

TEXT = "Hé 🎉🎉 日本 ok"
VOCABULARIES = {"byte_level": Vocabulary(kit.byte_level()), "byte_fallback": Vocabulary(kit.byte_fallback())}


def scored(ids: list[int]) -> list[TokenLogprob]:
    return [TokenLogprob(token_id=i, logprob=-1.0, rank=1, top_ids=(), top_logprobs=()) for i in ids]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_every_offset_is_the_length_of_the_text_before(name: str) -> None:
    vocabulary = VOCABULARIES[name]
    ids = vocabulary.tokenizer.encode(TEXT, add_special_tokens=False).ids
    prompt = [vocabulary.tokens["a"]]
    for shown in (frozenset[int](), vocabulary.special_ids):
        ids = [ids[0], vocabulary.tokens["</s>"], *ids[1:]]
        found: Any = CompletionLogprobs(vocabulary, prompt, shown).of_output(scored(ids))
        stream, offsets = TextStream(vocabulary, shown_ids=shown, prompt=prompt), []
        text = ""
        for token in ids:
            offsets.append(len(text))
            text += stream.push([token]).text
        assert found["text_offset"] == offsets and "🎉🎉 日本" in text
        ids.remove(vocabulary.tokens["</s>"])


def test_offsets_of_a_prompt_count_its_characters() -> None:
    vocabulary = VOCABULARIES["byte_level"]
    ids = vocabulary.tokenizer.encode("🎉b", add_special_tokens=False).ids
    found: Any = CompletionLogprobs(vocabulary, ids).of_prompt(scored(ids[1:]))
    assert found["text_offset"] == [0] * (len(ids) - 1) + [1]
