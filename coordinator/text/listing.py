"""The JSON that lists a text's tokens, made slice by slice: there may be millions, and JSON of all of them in one call
would stop every other thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson
from tokenizers import Tokenizer

SLICE = 16 * 1024


def tokens_json(tokenizer: Tokenizer, ids: Sequence[int], max_model_len: int, names: bool) -> bytes:
    """The answer of /tokenize, with the tokens as texts where `names`."""
    head = orjson.dumps({"count": len(ids), "max_model_len": max_model_len})[:-1]
    shown = _json_list(ids, tokenizer.id_to_token) if names else b"null"
    return b"".join((head, b',"tokens":', _json_list(ids, int), b',"token_strs":', shown, b"}"))


def _json_list(ids: Sequence[int], entry: Callable[[int], Any]) -> bytes:
    slices = (ids[at : at + SLICE] for at in range(0, len(ids), SLICE))
    return b"[%b]" % b",".join(orjson.dumps([entry(i) for i in each])[1:-1] for each in slices)
