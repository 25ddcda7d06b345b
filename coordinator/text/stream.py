"""Incremental decoding of token ids to text.

    ids -> drop what decodes to nothing -> text that later ids cannot change -> hold back a possible stop string -> out

The concatenated output is what `tokenizer.decode(prompt + ids, skip_special_tokens=True)` has beyond the prompt's text:
a prefix of it, and all of it after `finish()`. There are two decoders:

- byte-level (GPT-2, Llama 3, Qwen): a token is a string of bytes; an incremental UTF-8 decoder returns exactly the same
  text as decoding everything together, and holds back at most three bytes of an incomplete code point.
- any other: the tokenizer decodes each group of tokens together with the previous one, at first the prompt's last
  tokens, so that rules about the start of a text apply once: in SentencePiece's it loses its space. A group ends where
  later tokens cannot change it. With byte fallback (Llama 2) a run of `<0x..>` tokens is decoded as a whole and one bad
  byte corrupts all of it, so its text is emitted when the run has ended.

The result does not depend on how the ids were split over calls, and each token is decoded a bounded number of times.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_UNSETTLED = 16
_TAIL = 16
"""Tokens of a prompt among which those are that the output is decoded with: rules about a start concern one or two."""


class Vocabulary:
    """The properties of a tokenizer that decoding needs, computed once and shared by all streams of a model. `parts` is
    its parsed tokenizer.json, if the caller has it: it is costly to parse again for a large tokenizer."""

    def __init__(self, tokenizer: Tokenizer, parts: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.tokens: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self.size = 1 + max(self.tokens.values(), default=-1)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        if parts is None:
            parts = json.loads(tokenizer.to_str())
        kinds = _decoder_kinds(parts.get("decoder") or {})
        self.byte_level = kinds == ["ByteLevel"]
        self.byte_fallback = "ByteFallback" in kinds
        self._bytes: list[bytes | None] = [None] * self.size
        self._from_char = _byte_level_alphabet()

    def token(self, token_id: int) -> str | None:
        """Returns the token in the decoder's form, None if it decodes to nothing: special, or beyond the vocabulary."""
        if token_id >= self.size or token_id < 0 or token_id in self.special_ids:
            return None
        token: str | None = self.tokenizer.id_to_token(token_id)
        return token

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a byte-level token."""
        if not 0 <= token_id < self.size:
            return b""
        known = self._bytes[token_id]
        if known is None:
            token = self.token(token_id) or ""
            try:
                known = bytes(self._from_char[c] for c in token)
            except KeyError:  # an added token with characters that represent no byte
                known = token.encode()
            self._bytes[token_id] = known
        return known

    def spelling(self, token_id: int) -> tuple[str, bytes]:
        """Returns a single token as readable text and as the bytes it stands for. A special token is spelled out; an id
        beyond the vocabulary is empty."""
        token: str | None = self.tokenizer.id_to_token(token_id)
        if token is None:
            return "", b""
        if token_id in self.special_ids:
            raw = token.encode()
        elif self.byte_level:
            raw = self.token_bytes(token_id)
        elif self.byte_fallback and _is_byte(token):
            raw = bytes([int(token[3:5], 16)])
        else:
            raw = token.replace("▁", " ").encode()
        return raw.decode(errors="replace"), raw

    def decoder(self, before: Sequence[int] = ()) -> Decoder:
        """Returns a decoder of text that follows the tokens `before`."""
        return _ByteLevel(self) if self.byte_level else _Grouped(self, before)


class TextPiece(NamedTuple):
    """`stopped` is the stop string that ended the text; `consumed` counts the ids of this push up to the one that
    completed it, all of them otherwise."""

    text: str
    stopped: str | None = None
    consumed: int = 0


class TextStream:
    """The text of one choice, modified by `push` and `finish`; after a stop string it accepts no more ids. The text of
    the first `min_tokens` ids is not searched for stop strings. Special tokens are omitted, except `shown_ids`, and so
    is the stop string, unless `include_stop` is set."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: Iterable[str] = (),
        min_tokens: int = 0,
        shown_ids: frozenset[int] = frozenset(),
        include_stop: bool = False,
        prompt: Sequence[int] = (),
    ) -> None:
        decoder = vocabulary.decoder(prompt)
        self._decoder: Decoder = _Showing(vocabulary, decoder, shown_ids) if shown_ids else decoder
        self._unchecked = min_tokens
        self._stop = tuple(dict.fromkeys(stop))
        self._include_stop = include_stop
        self._held = ""
        self.stopped: str | None = None

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        """Returns the text that these ids complete, up to a stop string."""
        if self.stopped is not None:
            return TextPiece("", self.stopped, 0)
        push = self._decoder.push
        if not self._stop:
            return TextPiece("".join([push(i) for i in token_ids]), None, len(token_ids))
        out: list[str] = []
        for count, token_id in enumerate(token_ids, 1):
            fresh = push(token_id)
            if self._unchecked > 0:
                self._unchecked -= 1
                out.append(fresh)
            elif fresh:
                out.append(self._release(fresh))
                if self.stopped is not None:
                    return TextPiece("".join(out), self.stopped, count)
        return TextPiece("".join(out), None, len(token_ids))

    def finish(self) -> str:
        """Returns the text held back, after the last id. It may still complete a stop string: see `stopped`."""
        if self.stopped is not None:
            return ""
        rest = self._release(self._decoder.flush())
        if self.stopped is None:
            rest, self._held = rest + self._held, ""
        return rest

    def _release(self, fresh: str) -> str:
        """Appends text and returns what can be emitted: up to a stop string, else all but a tail that may begin one."""
        text = self._held + fresh
        found = [(at, -len(stop), stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, _, self.stopped = min(found)
            self._held = ""
            return text[: at + len(self.stopped) * self._include_stop]
        keep = _longest_tail(text, self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _longest_tail(text: str, stops: tuple[str, ...]) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of a stop string."""
    best = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), best, -1):
            if text.endswith(stop[:length]):
                best = length
                break
    return best


class _Showing:
    """Wraps a decoder and spells out some special tokens."""

    def __init__(self, vocabulary: Vocabulary, decoder: Decoder, shown_ids: frozenset[int]) -> None:
        self._vocabulary, self._decoder, self._shown_ids = vocabulary, decoder, shown_ids

    def push(self, token_id: int) -> str:
        if token_id in self._shown_ids:
            return self._decoder.flush() + self._vocabulary.spelling(token_id)[0]
        return self._decoder.push(token_id)

    def flush(self) -> str:
        return self._decoder.flush()


class _ByteLevel:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._bytes = vocabulary.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Grouped:
    """State: `_before`, the last group emitted, whose text is known; `_group`, ids not emitted yet."""

    def __init__(self, vocabulary: Vocabulary, before: Sequence[int] = ()) -> None:
        self._vocabulary = vocabulary
        tail = [i for i in before[-4 * _TAIL :] if vocabulary.token(i) is not None]
        while vocabulary.byte_fallback and tail and _is_byte(vocabulary.token(tail[-1]) or ""):
            tail.pop()  # an incomplete run of bytes has no text of its own
        self._before = tail[-_TAIL:]
        self._before_text = self._decode(self._before)
        self._group: list[int] = []

    def push(self, token_id: int) -> str:
        token = self._vocabulary.token(token_id)
        if token is None:
            return ""
        self._group.append(token_id)
        if self._vocabulary.byte_fallback:
            return "" if _is_byte(token) else self._take()
        text = self._text()
        return "" if text.endswith(_REPLACEMENT) and len(self._group) < _MAX_UNSETTLED else self._take(text)

    def flush(self) -> str:
        return self._take() if self._group else ""

    def _text(self) -> str:
        return self._decode(self._before + self._group)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._vocabulary.tokenizer.decode(ids, skip_special_tokens=True) if ids else ""
        return text

    def _take(self, text: str | None = None) -> str:
        fresh = (self._text() if text is None else text)[len(self._before_text) :]
        self._before, self._group = self._group, []
        self._before_text = self._decode(self._before)
        return fresh


Decoder = _Showing | _ByteLevel | _Grouped
"""Decodes one text. `push` returns the text that one more token completes, `flush` the rest at the end."""


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _decoder_kinds(decoder: Mapping[str, Any]) -> list[str]:
    children = decoder.get("decoders")
    if decoder.get("type") == "Sequence" and isinstance(children, list):
        return [kind for child in children for kind in _decoder_kinds(child)]
    return [str(decoder.get("type"))]


def _byte_level_alphabet() -> dict[str, int]:
    """Returns the byte of each character: a byte is written as itself if printable in Latin-1, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
