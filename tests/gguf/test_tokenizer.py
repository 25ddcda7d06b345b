"""Tokenizers derived from GGUF: SentencePiece's merges by score, and the byte-level ones by the name of their split."""

from __future__ import annotations

import itertools
import random

import pytest
from tokenizers import Tokenizer

from baton.core.errors import StartupError
from baton.gguf.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, tokenizer_config, tokenizer_json

PIECES = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁ab", "ca", "▁▁", "aa", "b▁"]


def sentencepiece(**more: object) -> dict[str, object]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES)]
    scores = [0.0] * 259 + [-100.0 if len(piece) == 1 else -float(7 * rank % 13) for rank, piece in enumerate(PIECES)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **more,
    }


def byte_level(pre: str) -> dict[str, object]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ["a", "<end>"],
        "tokenizer.ggml.token_type": [NORMAL, CONTROL],
        "tokenizer.ggml.merges": [],
    }


LONG_FIRST = {
    "tokenizer.ggml.tokens": ["x" * 2000],
    "tokenizer.ggml.token_type": [NORMAL],
    "tokenizer.ggml.scores": [0.0],
}


def merged_by_score(metadata: dict[str, object], text: str) -> list[int]:
    """SentencePiece's algorithm as its paper states it: merge the neighbours whose merged piece scores highest."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]  # type: ignore[assignment]
    scores: list[float] = metadata["tokenizer.ggml.scores"]  # type: ignore[assignment]
    numbers = {token: number for number, token in enumerate(tokens)}
    pieces = list(text.replace(" ", "▁"))
    while True:
        pairs = [
            (scores[numbers[a + b]], -i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in numbers
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    ids: list[int] = []
    for piece in pieces:
        ids += [numbers[piece]] if piece in numbers else [numbers[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return ids


def made(metadata: dict[str, object]) -> Tokenizer:
    import json

    return Tokenizer.from_str(json.dumps(tokenizer_json(metadata)))


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_merges_by_score_as_its_algorithm_does(prefix: bool) -> None:
    metadata = sentencepiece(**{"tokenizer.ggml.add_space_prefix": prefix})
    tokenizer, chance = made(metadata), random.Random(1)
    for _ in range(300):
        text = "".join(chance.choices("abc aabü🙂", k=chance.randrange(1, 14)))
        ids = tokenizer.encode(text).ids
        assert ids == [1, *merged_by_score(metadata, (" " if prefix else "") + text)], text
        assert tokenizer.decode(ids) == text


def test_bos_is_added_only_where_the_file_says_so() -> None:
    assert (
        made(sentencepiece(**{"tokenizer.ggml.add_bos_token": False})).encode("a").ids
        != made(sentencepiece()).encode("a").ids
    )
    assert made(sentencepiece()).encode("a").ids[0] == 1
    assert made(sentencepiece()).encode("a", add_special_tokens=False).ids[0] != 1


@pytest.mark.parametrize(("pre", "begins"), [("llama-bpe", True), ("tekken", True), ("gpt-2", False), ("qwen2", False)])
def test_bos_is_added_as_llama_cpp_does_where_the_file_does_not_say(pre: str, begins: bool) -> None:
    """Files of Llama 3 often have no `add_bos_token`."""
    metadata = byte_level(pre) | {"tokenizer.ggml.bos_token_id": 1}
    assert made(metadata).encode("a").ids == [1] * begins + [0]
    assert made(metadata | {"tokenizer.ggml.add_bos_token": not begins}).encode("a").ids == [1] * (not begins) + [0]


def test_special_tokens_are_named_as_hugging_face_does() -> None:
    assert tokenizer_config(sentencepiece()) == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "it's 1234  x", ["it", "'s", "Ġ1234", "Ġ", "Ġx"]),
        ("smollm", "a 123", ["a", "Ġ", "1", "2", "3"]),
        ("llama-bpe", "IT'S 12345 ok!\n\nx", ["IT", "'S", "Ġ", "123", "45", "Ġok", "!ĊĊ", "x"]),
        ("qwen2", "v2.5 (12)", ["v", "2", ".", "5", "Ġ(", "1", "2", ")"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", "Ġ", "1", "2"]),
    ],
)
def test_text_is_split_as_the_named_way_says(pre: str, text: str, pieces: list[str]) -> None:
    split = made(byte_level(pre)).pre_tokenizer.pre_tokenize_str(text)
    assert [piece for piece, _ in split] == pieces


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.scores": [1.0]}, "tokenizer.ggml.scores has 1 entries"),
        ({"tokenizer.ggml.scores": None}, "tokenizer.ggml.scores is missing"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "two equal tokens"),
        (LONG_FIRST, "tokenizer.ggml.tokens: token 0 has more than 1024 characters"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused_by_its_key(change: dict[str, object], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        tokenizer_json(sentencepiece(**change))
