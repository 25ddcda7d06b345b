"""Log-probabilities as OpenAI's objects: chat's, the older one of completions, and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.core.request import TokenLogprob
from coordinator.text.stream import Vocabulary


def chat_logprobs(vocabulary: Vocabulary, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    def spelled(token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = vocabulary.spelling(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(raw)}

    content = []
    for entry in entries:
        top = [spelled(*pair) for pair in zip(entry.top_ids, entry.top_logprobs, strict=True)]
        content.append({**spelled(entry.token_id, entry.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """State: `offset`, where the next token begins in the text. Tokens that are no part of it have no width."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.offset = 0

    def of_output(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return self._object([(entry.token_id, entry) for entry in entries])

    def of_prompt(self, prompt: Sequence[int], entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The first token of a prompt follows nothing and has no probability."""
        return self._object([(prompt[0], None), *((entry.token_id, entry) for entry in entries)])

    def _object(self, tokens: Sequence[tuple[int, TokenLogprob | None]]) -> dict[str, Any]:
        spell = self._vocabulary.spelling
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, entry in tokens:
            text = spell(token_id)[0]
            found["tokens"].append(text)
            found["text_offset"].append(self.offset)
            if self._vocabulary.token(token_id) is not None:
                self.offset += len(text)
            if entry is None:
                found["token_logprobs"].append(None)
                found["top_logprobs"].append(None)
                continue
            top = {spell(i)[0]: value for i, value in zip(entry.top_ids, entry.top_logprobs, strict=True)}
            found["token_logprobs"].append(entry.logprob)
            found["top_logprobs"].append(top | {text: entry.logprob})
        return found


def joined(first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """Two objects of completions as one."""
    return {name: first[name] + then[name] for name in first}


def prompt_logprobs(vocabulary: Vocabulary, entries: Sequence[TokenLogprob]) -> list[Any]:
    """One object per prompt token, by token id, and null for the first."""

    def one(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": vocabulary.spelling(token_id)[0]}

    found: list[Any] = [None]
    for entry in entries:
        top = zip(entry.top_ids, entry.top_logprobs, strict=True)
        options = {str(i): one(i, value, rank) for rank, (i, value) in enumerate(top, 1)}
        found.append(options | {str(entry.token_id): one(entry.token_id, entry.logprob, entry.rank)})
    return found
