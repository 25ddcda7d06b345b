"""Grammars: which tokens may come next in an output that must match a grammar.

A grammar is in llguidance's serialised form (https://github.com/guidance-ai/llguidance). Its automaton tracks the
output of a sequence: it consumes new tokens, after rolling back to where the output differs from the consumed tokens,
so a resumed sequence, or one whose draft tokens were rejected, needs only its output.

All automata of a grammar share one lexer, so that its states are computed once. A lexer has a limit of states, and
reaching it is an error that llguidance never leaves: the automaton then starts again from its output with a new lexer.
Only a grammar whose single output exceeds the limit is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher, LLTokenizer
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

COMPILED = 16  # compiled grammars cached
MAX_LEXER_STATES = 50_000  # of a lexer, about 0.5 KB each; a string of bounded length takes 12 for each of its tokens
STACK_BYTES = 8 << 20  # of the thread that computes masks; the coordinator first tests a grammar with half of it
_TOO_MANY_STATES = "too many states"
_LIMITS = (_TOO_MANY_STATES, "too many expressions", "Too many items", "items; max is")  # in llguidance's messages
_NO_TOKEN = "NoExtensionBias"  # llguidance's whole message
_ENDLESS = (
    "no output can match it: a part of it matches nothing, or a reference leads back to itself before any text or value"
)
Bits: TypeAlias = "NDArray[np.uint8]"
Masks: TypeAlias = "list[Bits | None]"
PackedMasks: TypeAlias = "list[bytes | None]"
"""As a process computes them: without numpy, which takes longer to import than all else that it needs."""


class GrammarError(Exception):
    """A grammar is invalid, or its output cannot be continued: one line for the client."""


class GrammarTooComplex(GrammarError):
    """A grammar exceeds a limit of ours: one line for the client."""


def load_tokenizer(directory: Path, vocab_size: int) -> LLTokenizer:
    """Loads the tokenizer of a model directory. Takes about 2 s for 150,000 tokens.

    Raises:
        GrammarError: there is none, or llguidance cannot use it.
    """
    from llguidance import LLTokenizer, TokenizerWrapper  # here: a process that serves no model need not load it
    from tokenizers import Tokenizer

    check_tokenizer(directory)
    path = directory / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
        added = tokenizer.get_added_tokens_decoder()
        special = [i for i, token in added.items() if token.special]
        try:
            read = LLTokenizer(str(path), n_vocab=vocab_size)
        except ValueError:  # no known EOS token by name: any will do, since `masks` receives the end ids
            read = LLTokenizer(str(path), n_vocab=vocab_size, eos_token=special[0] if special else vocab_size - 1)
        return LLTokenizer(TokenizerWrapper(_PlainText(read, tokenizer, added.keys() - special)), n_vocab=vocab_size)
    except Exception as error:  # includes panics of its Rust code
        raise GrammarError(
            f"structured output is not supported with this tokenizer: {first_line(str(error))}"
        ) from None


class _PlainText:
    """A tokenizer as llguidance asks for it. Reading a tokenizer.json itself, llguidance takes added tokens such as
    `<think>` for special ones, whatever their `special` flag, and yet encodes text that spells one as that token, so
    the grammar refuses its own literal. Here an added token with `special: false` is text like any other token, and
    text that spells a special token is encoded as plain text: grammars name special tokens by id or name."""

    def __init__(self, read: LLTokenizer, tokenizer: Tokenizer, plain: Collection[int]) -> None:
        self._read, self._tokenizer = read, tokenizer
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True
        self.eos_token_id, self.bos_token_id = read.eos_token, None
        self.special_token_ids = [i for i in range(read.vocab_size) if read.is_special_token(i) and i not in plain]
        self.tokens = [read.decode_bytes([i]) for i in range(read.vocab_size)]
        alone = b"".join(self.tokens[i] for i in self._encoded("a"))
        self._prefix = "" if alone == b"a" else "\x02"  # a tokenizer may put a space before a text
        self._of_prefix = self._encoded(self._prefix)

    def __call__(self, text: str) -> list[int]:
        ids, prefix = self._encoded(self._prefix + text), self._of_prefix
        if ids[: len(prefix)] != prefix:  # joined with the text: any tokens that spell it will do
            return self._read.greedy_tokenize(text)
        return ids[len(prefix) :]

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def check_tokenizer(directory: Path) -> None:
    """Raises GrammarError if a model directory has no tokenizer."""
    if not (directory / "tokenizer.json").exists():
        raise GrammarError("structured output needs a tokenizer.json, and the model directory has none")


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compiles a grammar. Raises GrammarError."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False, max_lexer_states=MAX_LEXER_STATES)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarError(first_line(matcher.get_error()))
    return matcher


def error_of(matcher: LLMatcher) -> GrammarError:
    """Returns the error that a matcher is in."""
    message = matcher.get_error()
    kind = GrammarTooComplex if any(limit in message for limit in _LIMITS) else GrammarError
    return kind(first_line(message))


def first_line(message: str) -> str:
    line = " ".join(message.replace("<non-verbose/>", "").split())[:300]
    return _ENDLESS if line == _NO_TOKEN else line or "the grammar is not valid"


class Lexers:
    """Compiled grammars, least recently used first, each with the number of its lexer; a number is never used twice."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.tokenizer = tokenizer
        self._compiled: OrderedDict[str, tuple[int, LLMatcher]] = OrderedDict()
        self._numbers = 0

    def matcher(self, grammar: str, full: int = 0) -> tuple[int, LLMatcher]:
        """Returns a lexer's number and a matcher that uses it, not the lexer `full`. Raises GrammarError."""
        known = self._compiled.pop(grammar, None)
        if known is None or known[0] == full:
            matcher = compile_grammar(self.tokenizer, grammar)
            self._numbers += 1
            known = self._numbers, matcher
        self._compiled[grammar] = known
        if len(self._compiled) > COMPILED:
            self._compiled.popitem(last=False)
        return known[0], known[1].deep_copy()  # shares the lexer

    @property
    def compilations(self) -> int:
        return self._numbers


class Automaton:
    """The state of a grammar after an output. State: the matcher, the number of its lexer, and the output that it has
    consumed."""

    def __init__(self, lexers: Lexers, grammar: str) -> None:
        """Raises GrammarError if the grammar is invalid."""
        self._lexers = lexers
        self._grammar = grammar
        self._eos = tuple(lexers.tokenizer.eos_tokens)
        self._lexer, self._matcher = lexers.matcher(grammar)
        self._consumed: tuple[int, ...] = ()

    @property
    def consumed(self) -> tuple[int, ...]:
        return self._consumed

    def masks(self, output: tuple[int, ...], drafts: tuple[int, ...], ends: tuple[int, ...]) -> PackedMasks:
        """Returns the 1 + len(drafts) masks after the output and after each draft token; None from the first disallowed
        draft token on. Where the tokens so far satisfy the grammar, `ends` are allowed too.

        Raises:
            GrammarError: the grammar does not allow the output.
            GrammarTooComplex: it exceeds a limit.
        """
        newest = self._lexers.compilations
        while True:
            try:
                return self._masks(output, drafts, ends)
            except GrammarTooComplex:
                if _TOO_MANY_STATES not in self._matcher.get_error() or self._lexer > newest:
                    raise  # another limit, or this output alone has reached that of a new lexer
            self._lexer, self._matcher = self._lexers.matcher(self._grammar, full=self._lexer)
            self._consumed = ()

    def _masks(self, output: tuple[int, ...], drafts: tuple[int, ...], ends: tuple[int, ...]) -> PackedMasks:
        matcher, common = self._matcher, common_length(self._consumed, output)
        if common < len(self._consumed):
            matcher.rollback(len(self._consumed) - common)
        self._consumed = output
        if common < len(output) and not matcher.consume_tokens(list(output[common:])):
            raise error_of(matcher)
        masks: PackedMasks = [self._mask(ends)]
        for token in drafts:
            if matcher.try_consume_tokens([token]) != 1:
                break
            masks.append(self._mask(ends))
        if len(masks) > 1:
            matcher.rollback(len(masks) - 1)
        return masks + [None] * (1 + len(drafts) - len(masks))

    def _mask(self, ends: tuple[int, ...]) -> bytes:
        matcher = self._matcher
        bits = bytearray(matcher.compute_bitmask())
        if matcher.is_error():
            raise error_of(matcher)
        for token in self._eos:  # the tokenizer's own EOS tokens need not end this request
            bits[token >> 3] &= 0xFF ^ 1 << (token & 7)
        if matcher.is_accepting():
            for token in ends:
                bits[token >> 3] |= 1 << (token & 7)
        if bits.count(0) == len(bits):
            raise GrammarError("the grammar allows no next token")
        return bytes(bits)


def common_length(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The length of the common prefix of two outputs."""
    if other[: len(one)] == one:
        return len(one)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
