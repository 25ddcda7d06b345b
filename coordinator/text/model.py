"""Encoding and decoding of text for one model.

Encoding may take long, so the async methods run it on dedicated threads (with the batch calls of `tokenizers`, which,
unlike the single ones, release the GIL), limit what may wait for them, and refuse early what cannot fit: a token stands
for `max_token_bytes` bytes at most, so a text of more than that times the context never fits.

How special tokens in text are read:
- chat: a client's text never becomes a control token (see chat.py);
- a plain completion prompt is read as in `tokenizers` and transformers: text that spells a special token becomes that
  token. The client may send any token ids anyway, and users of this endpoint write templates by hand. The tokenizer
  adds BOS by its own rule, but a text that already begins with BOS gets no second one;
- the texts before and after a gap to fill: as in a chat (see infill.py).

Sampling defaults are generation_config's temperature, top_p, top_k, min_p and repetition_penalty, else 1, 1 and off.
`do_sample` is ignored: a server's client expects sampling unless it requests temperature 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import orjson
from tokenizers import Tokenizer

from baton.core.errors import ContextLengthExceeded, InvalidRequest, StartupError, Unavailable
from baton.core.request import SamplingParams
from coordinator.text.chat import PLAIN, SCHEMA_WORDS, ChatEncoder, ChatMessage, Rendering
from coordinator.text.files import TextFiles, read_text_files
from coordinator.text.infill import infill_of
from coordinator.text.pooling import PoolingModel, read_pooling
from coordinator.text.stream import Vocabulary
from coordinator.text.tool_calls import FORMATS, THINK, detect_format

INLINE_CHARS = 2_000
SMALL_BYTES = 64 * 1024
MESSAGE_BYTES = 64
MAX_WAITING_BYTES = 32 * 1024 * 1024
"""Limit on all prompts that are rendered or encoded or wait for it. A prompt of up to SMALL_BYTES may always wait: the
number of connections bounds those."""
LONG_AT_ONCE = 2
"""Long prompts encoded at the same time; one more thread is reserved for short ones."""
SLICE = 16 * 1024
"""Tokens of a list that are serialized per call."""
VALUES_AT_ONCE = 4_096
"""Values visited before yielding to the event loop: about 0.5 ms."""
_T = TypeVar("_T")


class TextModel:
    """The text side of a model. Immutable after construction, except for its threads and the work that waits for them.
    `tool_format` is the form of its tool calls, None if it is unknown; `thinks`: its output may begin with
    reasoning; `marker_ids` are the added tokens that mark calls and reasoning."""

    def __init__(
        self,
        files: TextFiles,
        *,
        max_model_len: int | None = None,
        tool_parser: str = "auto",
        pooling: PoolingModel | None = None,
    ) -> None:
        self.tokenizer: Tokenizer = files.tokenizer
        self.vocabulary = Vocabulary(files.tokenizer, files.parts)
        self.vocab_size = files.config.vocab_size
        _check_vocabulary(self.vocabulary, self.vocab_size)
        self.max_model_len = files.config.longest(max_model_len)
        self.pooling = PoolingModel(hidden_size=files.config.hidden_size) if pooling is None else pooling
        self.eos_token_ids = files.eos_token_ids
        self.special_tokens = dict(files.special_tokens)
        bos = files.special_tokens.get("bos_token")
        self.bos_token_id: int | None = None if bos is None else files.tokenizer.token_to_id(bos)
        self.ignored_defaults = files.ignored
        self.defaults = SamplingParams(**files.sampling)
        self.max_token_bytes = _max_token_bytes(files.parts, self.vocabulary)
        self._chat = (
            None if files.chat_template is None else ChatEncoder(files.chat_template, files.tokenizer, files.parts)
        )
        template = "" if files.chat_template is None else files.chat_template.source
        self.chat_template = template or None
        self.template_has_tools = "tools" in template
        self.tool_format = detect_format(template) if tool_parser == "auto" else tool_parser
        if template and not self.template_has_tools:
            self.tool_format = "hermes"  # as chat.py describes
        self.thinks = THINK[1] in template or self.tool_format == "harmony"
        self.marker_ids = _marker_ids(files.tokenizer, self.tool_format, self.thinks)
        self.infill = infill_of(files.tokenizer, files.parts, byte_level=self.vocabulary.byte_level)
        self._threads = ThreadPoolExecutor(max_workers=LONG_AT_ONCE + 1, thread_name_prefix="tokenize")
        self._rendering = ThreadPoolExecutor(max_workers=1, thread_name_prefix="render")  # there is one child
        self._long = {self._threads: asyncio.Semaphore(LONG_AT_ONCE), self._rendering: asyncio.Semaphore(1)}
        self._waiting_bytes = 0

    @classmethod
    def load(
        cls, directory: Path, *, max_model_len: int | None = None, tool_parser: str = "auto", **pooling: Any
    ) -> TextModel:
        """Reads a model directory; `pooling` are options of `read_pooling`. Raises StartupError with one line that
        names the file."""
        files = read_text_files(directory)
        served = read_pooling(directory, **pooling)
        return cls(files, max_model_len=max_model_len, tool_parser=tool_parser, pooling=served)

    @property
    def has_chat(self) -> bool:
        return self._chat is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        bos = self.bos_token_id
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos]:
            return ids[1:]
        return ids

    def bad_word(self, text: str) -> list[tuple[int, ...]]:
        """Returns the token sequences that spell a word, at the beginning of a line and after a space; none is
        empty."""
        alone = self.encode(text, add_special_tokens=False)
        spaced = self.encode(" " + text.lstrip(), add_special_tokens=False)
        return [tuple(ids) for ids in (alone, spaced) if ids]

    async def encode_async(
        self, text: str, *, add_special_tokens: bool = True, param: str = "prompt", truncates: bool = False
    ) -> list[int]:
        """Encodes a text without blocking the event loop; with `truncates` the caller cuts what does not fit.

        Raises:
            ContextLengthExceeded: the text cannot fit.
            Unavailable: too many bytes of prompts wait already.
        """
        size = _utf8_length(text)
        if not truncates:
            self._check_bytes(size, param=param)
        if len(text) <= INLINE_CHARS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        with self._waiting(size):
            work = partial(self.encode, text, add_special_tokens=add_special_tokens)
            return await self._in_turn(self._threads, size, work)

    async def encode_infill_async(self, prefix: str, suffix: str) -> list[int]:
        """Returns a prompt whose output fills the gap between two texts.

        Raises:
            InvalidRequest: the model has no tokens for that, or `Infill.encode` refuses the texts.
            ContextLengthExceeded, Unavailable: as `encode_async`.
        """
        if (infill := self.infill) is None:
            message = "this model's tokenizer has no tokens to fill in the middle: suffix is not supported"
            raise InvalidRequest(message, code="unsupported_parameter", param="suffix")
        size = 0
        for param, text in (("prompt", prefix), ("suffix", suffix)):
            size += _utf8_length(text)
            self._check_bytes(size, param=param)
        begin = [i for i in self.encode("")[:1] if i == self.bos_token_id]
        with self._waiting(size):
            return begin + await self._in_turn(self._threads, size, partial(infill.encode, prefix, suffix))

    async def encode_chat_async(self, messages: Sequence[ChatMessage], how: Rendering = PLAIN) -> list[int]:
        """Returns the ids of a conversation, rendered by the model's template, without blocking the event loop.

        Raises:
            InvalidRequest: the model has no template, or the template refuses these messages.
            ContextLengthExceeded, Unavailable: as `encode_async`.
        """
        size = sum(_utf8_length(message.content) for message in messages)
        size += sum(_utf8_length(message.reasoning) + _utf8_length(message.tool_call_id or "") for message in messages)
        size += await _text_bytes([message.tool_calls for message in messages if message.tool_calls])
        self._check_bytes(size, param="messages")
        for param, given in (("tools", how.tools), ("chat_template_kwargs", how.variables)):
            size += await _text_bytes(given)
            self._check_bytes(size, param=param)
        if (chat := self._chat) is None:
            raise InvalidRequest("this model has no chat template: use /v1/completions", param="messages")
        size += MESSAGE_BYTES * len(messages)  # a message without text takes as long as this many bytes
        with self._waiting(size):
            rendered = await self._in_turn(self._rendering, size, partial(chat.render, messages, how, guard=True))
            return await self._in_turn(self._threads, size, partial(chat.encode_rendered, rendered))

    def prompt_ends_in_reasoning(self, prompt: Sequence[int]) -> bool:
        """Returns whether a prompt ends within the model's reasoning: some templates begin it."""
        return self.thinks and self.decode(prompt[-8:], skip_special_tokens=False).rstrip().endswith(THINK[0])

    def _check_bytes(self, size: int, *, param: str) -> None:
        """Refuses texts whose length alone shows that they do not fit the context."""
        if self.max_token_bytes is None:
            return
        least = -(-size // self.max_token_bytes)
        if least >= self.max_model_len:
            raise ContextLengthExceeded(
                f"this model's context is {self.max_model_len} tokens; the prompt has at least {least}",
                param=param,
                prompt_tokens=least,
                max_prompt_tokens=self.max_model_len - 1,
            )

    @contextmanager
    def _waiting(self, size: int) -> Iterator[None]:
        """Counts a prompt of `size` bytes as waiting. Raises Unavailable if a long one would exceed the limit."""
        if size > SMALL_BYTES and self._waiting_bytes and self._waiting_bytes + size > MAX_WAITING_BYTES:
            raise Unavailable("too many long prompts are waiting to be encoded", retry_after_s=1)
        self._waiting_bytes += size
        try:
            yield
        finally:
            self._waiting_bytes -= size

    async def _in_turn(self, threads: ThreadPoolExecutor, size: int, work: Callable[[], _T]) -> _T:
        """Runs `work` for a prompt of `size` bytes on a thread: long ones wait here, so that a short one does not queue
        behind all of them."""
        loop = asyncio.get_running_loop()
        if size <= SMALL_BYTES:
            return await loop.run_in_executor(threads, work)
        async with self._long[threads]:
            return await loop.run_in_executor(threads, work)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        texts: list[str] = self.tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return texts[0]

    async def decode_async(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decodes token ids without blocking the event loop."""
        if len(token_ids) <= INLINE_CHARS:
            return self.decode(token_ids, skip_special_tokens=skip_special_tokens)
        work = partial(self.decode, token_ids, skip_special_tokens=skip_special_tokens)
        return await self._in_turn(self._threads, 4 * len(token_ids), work)

    def start(self) -> None:
        """Starts the child that renders templates, so that the first conversation need not wait for it."""
        if self._chat is not None:
            self._chat.template.renderer.start()

    def check(self) -> None:
        """Raises StartupError if the chat template does not compile. Blocks, longest right after `start`."""
        if self._chat is not None:
            self._chat.check()

    def close(self) -> None:
        for threads in (self._threads, self._rendering):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._chat is not None:
            self._chat.template.renderer.close()


def tokens_json(tokenizer: Tokenizer, ids: Sequence[int], max_model_len: int, names: bool) -> bytes:
    """Returns the answer of /tokenize, with the tokens as text if `names`; built slice by slice: serializing millions
    in one call would block all other threads."""
    head = orjson.dumps({"count": len(ids), "max_model_len": max_model_len})[:-1]
    shown = _json_list(ids, tokenizer.id_to_token) if names else b"null"
    return b"".join((head, b',"tokens":', _json_list(ids, int), b',"token_strs":', shown, b"}"))


def _json_list(ids: Sequence[int], entry: Callable[[int], Any]) -> bytes:
    slices = (ids[at : at + SLICE] for at in range(0, len(ids), SLICE))
    return b"[%b]" % b",".join(orjson.dumps([entry(i) for i in each])[1:-1] for each in slices)


def _marker_ids(tokenizer: Tokenizer, form: str | None, thinks: bool) -> dict[str, int]:
    added = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
    markers = FORMATS.get(form or "", ()) + (THINK if thinks else ())
    return {marker: added[marker] for marker in markers if marker in added}


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


async def _text_bytes(value: Any) -> int:
    """Counts the UTF-8 bytes of the strings within a JSON value, except SCHEMA_WORDS. Yields to the event loop."""
    left, size, count = [value], 0, 0
    while left:
        item = left.pop()
        if isinstance(item, str):
            size += 0 if item in SCHEMA_WORDS else _utf8_length(item)
        elif isinstance(item, Mapping):
            left.extend(item.keys())
            left.extend(item.values())
        elif isinstance(item, list | tuple):
            left.extend(item)
        count += 1
        if count % VALUES_AT_ONCE == 0:
            await asyncio.sleep(0)
    return size


def _check_vocabulary(vocabulary: Vocabulary, vocab_size: int) -> None:
    if vocabulary.size > vocab_size:
        token = next(t for t, i in vocabulary.tokens.items() if i >= vocab_size)
        raise StartupError(
            f"tokenizer.json: token {token!r:.60} has id {vocabulary.tokens[token]}, "
            f"but config.json's vocab_size is {vocab_size}"
        )


def _max_token_bytes(parts: Mapping[str, Any], vocabulary: Vocabulary) -> int | None:
    """Returns the most UTF-8 bytes of text that one token can stand for, None if unbounded (one token may stand for a
    whole word or a run of unknown characters)."""
    model = parts["model"]
    if "merges" not in model or (model.get("fuse_unk") and not model.get("byte_fallback")):
        return None
    tokens = vocabulary.tokens
    widest = max(map(len, tokens)) if vocabulary.byte_level else max(len(t.encode()) for t in tokens)
    return widest if _keeps_length(parts.get("normalizer")) else 4 * widest


def _keeps_length(normalizer: Mapping[str, Any] | None) -> bool:
    """Returns whether normalising never makes a text shorter."""
    if normalizer is None or normalizer["type"] == "Prepend":
        return True
    if normalizer["type"] == "Replace":
        return normalizer.get("pattern") == {"String": " "} and normalizer.get("content") == "▁"
    children = normalizer.get("normalizers")
    return normalizer["type"] == "Sequence" and isinstance(children, list) and all(map(_keeps_length, children))
