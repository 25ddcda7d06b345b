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
from dataclasses import replace
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from coordinator.text.parser import CallBegun, Event, Parser, Reasoning, Text

_REPLACEMENT = "\ufffd"
_MAX_UNSETTLED = 16
_TAIL = 16
"""Tokens of a prompt among which those are that the output is decoded with: rules about a start concern one or two."""
MAX_BYTE_RUN = 4096
"""Byte tokens at the end of a prompt that are passed over in the search for them."""


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

    def decoder(self, before: Sequence[int] = (), spelled: Mapping[int, str] | None = None) -> Decoder:
        """Returns a decoder of text that follows the tokens `before`; it writes special tokens as in `spelled`."""
        decoder = _ByteLevel(self) if self.byte_level else _Grouped(self, before)
        return _Showing(decoder, spelled) if spelled else decoder

    def spellings(self, ids: Iterable[int]) -> dict[int, str]:
        return {i: self.spelling(i)[0] for i in ids}


class TextPiece(NamedTuple):
    """`stopped` is the stop string that ended the text; `consumed` counts the ids of this push up to the one that
    completed it, all of them otherwise. With a parser the text is in `events`."""

    text: str
    stopped: str | None = None
    consumed: int = 0
    events: tuple[Event, ...] = ()


class TextStream:
    """The text of one choice, modified by `push` and `finish`; after a stop string it accepts no more ids. The text of
    the first `min_tokens` ids is not searched for stop strings. Special tokens are omitted, except `shown_ids`, and so
    is the stop string, unless `include_stop` is set; a stop string may have special tokens in it all the same. With a
    `parser` stop strings apply to the content only, not to calls and reasoning, and `reasoning_tokens` counts the ids
    whose text is reasoning."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: Iterable[str] = (),
        min_tokens: int = 0,
        shown_ids: frozenset[int] = frozenset(),
        include_stop: bool = False,
        prompt: Sequence[int] = (),
        parser: Parser | None = None,
    ) -> None:
        stop = tuple(dict.fromkeys(stop))
        hidden = _stand_ins(vocabulary, stop, shown_ids)
        self._decoder = vocabulary.decoder(prompt, vocabulary.spellings(shown_ids) | hidden)
        self._unchecked = min_tokens
        self._parser = parser
        self._search = _StopSearch(vocabulary, stop, hidden, include_stop)
        self.reasoning_tokens = 0

    @property
    def parses(self) -> bool:
        return self._parser is not None

    @property
    def stopped(self) -> str | None:
        return self._search.stopped

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        """Returns the text that these ids complete, up to a stop string."""
        if self.stopped is not None:
            return TextPiece("", self.stopped, 0)
        push = self._decoder.push
        if not self._search and self._parser is None:
            return TextPiece("".join([push(i) for i in token_ids]), None, len(token_ids))
        out: list[str] = []
        events: list[Event] = []
        for count, token_id in enumerate(token_ids, 1):
            self._take(push(token_id), out, events)
            self._unchecked -= 1
            if self.stopped is not None:
                return TextPiece("".join(out), self.stopped, count, tuple(events))
        return TextPiece("".join(out), None, len(token_ids), tuple(events))

    def finish(self) -> TextPiece:
        """Returns the text held back, after the last id. It may still complete a stop string."""
        if self.stopped is not None:
            return TextPiece("", self.stopped)
        out: list[str] = []
        events: list[Event] = []
        self._take(self._decoder.flush(), out, events)
        if self._parser is not None and self.stopped is None:
            self._content(self._parser.finish(), events)
        remaining = self._search.flush()
        if self._parser is None:
            out.append(remaining)
        elif remaining:
            events.append(Text(remaining))
        return TextPiece("".join(out), self.stopped, 0, tuple(events))

    def _take(self, fresh: str, out: list[str], events: list[Event]) -> None:
        """Appends the text of one id, or what it is parsed to."""
        if self._parser is None:
            out.append(self._search.push(fresh, checked=self._unchecked <= 0))
            return
        parsed = self._parser.push(fresh)
        self.reasoning_tokens += self._parser.reasoning or any(isinstance(event, Reasoning) for event in parsed)
        self._content(parsed, events)

    def _content(self, parsed: Iterable[Event], events: list[Event]) -> None:
        for event in parsed:
            if isinstance(event, Text):
                text = self._search.push(event.text, checked=self._unchecked <= 0)
                events += [Text(text)] if text else []
                if self.stopped is not None:
                    return
                continue
            if before := self._search.flush():
                events.append(Text(before))
            events.append(self._search.without_stand_ins(event))


class _StopSearch:
    """Searches a text for stop strings, and holds back what may be the beginning of one. False without any."""

    def __init__(
        self, vocabulary: Vocabulary, stop: tuple[str, ...], hidden: Mapping[int, str], include_stop: bool
    ) -> None:
        self._stops = {text: text for text in stop}
        for token, stand_in in hidden.items():
            spelled = vocabulary.spelling(token)[0]
            self._stops |= {text.replace(spelled, stand_in): named for text, named in self._stops.items()}
        self._patterns = tuple(self._stops)
        self._hidden = dict.fromkeys(map(ord, hidden.values()))
        self._include_stop = include_stop
        self._held = ""
        self.stopped: str | None = None

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def push(self, fresh: str, *, checked: bool = True) -> str:
        """Appends text and returns what can be emitted: up to a stop string, else all but a tail that may begin one."""
        if not checked or not fresh:
            return self._shown(fresh)
        text = self._held + fresh
        matches = [(at, -len(stop), stop) for stop in self._patterns if (at := text.find(stop)) >= 0]
        if matches:
            at, _, pattern = min(matches)
            self.stopped = self._stops[pattern]
            self._held = ""
            return self._shown(text[:at]) + self.stopped * self._include_stop
        keep = _longest_tail(text, self._patterns)
        self._held = text[len(text) - keep :]
        return self._shown(text[: len(text) - keep])

    def flush(self) -> str:
        """Returns the text held back, which no stop string follows."""
        held, self._held = self._held, ""
        return self._shown(held)

    def without_stand_ins(self, event: Event) -> Event:
        return (
            event if not self._hidden or isinstance(event, CallBegun) else replace(event, text=self._shown(event.text))
        )

    def _shown(self, text: str) -> str:
        return text.translate(self._hidden) if self._hidden else text


def _stand_ins(vocabulary: Vocabulary, stop: tuple[str, ...], shown: frozenset[int]) -> dict[int, str]:
    """Returns a character for each omitted special token that occurs in a stop string: a lone surrogate, which no
    decoded text has, takes its place in the text that is searched."""
    names = ((i, vocabulary.spelling(i)[0]) for i in sorted(vocabulary.special_ids - shown)) if stop else ()
    indexes = [i for i, name in names if name and any(name in text for text in stop)]
    return {i: chr(0xD800 + number) for number, i in enumerate(indexes[:2048])}


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
    """Wraps a decoder and writes some special tokens as `spelled` says."""

    def __init__(self, decoder: Decoder, spelled: Mapping[int, str]) -> None:
        self._decoder, self._spelled = decoder, spelled

    def push(self, token_id: int) -> str:
        if (text := self._spelled.get(token_id)) is not None:
            return self._decoder.flush() + text
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
        end, least = len(before), len(before) - MAX_BYTE_RUN
        # An incomplete run of bytes has no text of its own.
        while (
            vocabulary.byte_fallback and end > max(least, 0) and _is_byte(vocabulary.token(before[end - 1]) or "<0x00>")
        ):
            end -= 1
        tail = [i for i in before[max(end - 4 * _TAIL, 0) : end] if vocabulary.token(i) is not None]
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
    unprintable = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(unprintable)}
