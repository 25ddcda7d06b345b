"""Limits of sampling parameters, checked by the front for clients and again by every worker, so that no value out of
range reaches a tensor."""

from __future__ import annotations

from collections.abc import Iterable

from baton.core.errors import InvalidRequest
from baton.core.request import GenerateRequest, SamplingParams

MAX_LOGPROBS = 20
MAX_BIASES = 300
MAX_STOP_TOKENS = 64
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 64
MAX_GRAMMAR_CHARS = 256 * 1024

_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_k": (0, (1 << 31) - 1),
    "seed": (0, (1 << 64) - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}


def check_sampling(params: SamplingParams, max_tokens: int, vocab_size: int) -> None:
    """Raises InvalidRequest, which names the first field out of range. `vocab_size` is the width of the logits."""
    for name, (low, high) in _RANGES.items():
        check_range(name, getattr(params, name), low, high)
    check_top_p(params.top_p)
    check_range("min_tokens", params.min_tokens, 0, max_tokens)
    check_count("logit_bias", len(params.logit_bias), MAX_BIASES)
    _check_ids("logit_bias", (token for token, _ in params.logit_bias), vocab_size)
    for _, bias in params.logit_bias:
        check_range("logit_bias", bias, -100, 100)
    check_count("stop_token_ids", len(params.stop_token_ids), MAX_STOP_TOKENS)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    check_count("bad_words", len(params.bad_words), MAX_BAD_WORDS)
    for word in params.bad_words:
        check_bad_word_length(len(word))
        _check_ids("bad_words", word, vocab_size)
    check_count("grammar", len(params.grammar), MAX_GRAMMAR_CHARS, "characters")
    alone = {word[0] for word in params.bad_words if len(word) == 1}
    if params.allowed_token_ids and alone.issuperset(params.allowed_token_ids):
        raise InvalidRequest("bad_words excludes all of allowed_token_ids", param="bad_words")


def check_range(param: str, value: float | None, low: float, high: float) -> None:
    """Raises InvalidRequest if `value` is out of range; None passes, NaN does not."""
    if value is not None and not low <= value <= high:
        raise InvalidRequest(f"{param} must be from {low} to {high}, not {shown(value)}", param=param)


def check_top_p(value: float | None) -> None:
    if value is not None and not 0 < value <= 1:
        raise InvalidRequest(f"top_p must be above 0 and at most 1, not {shown(value)}", param="top_p")


def shown(value: float) -> str:
    """Returns a number as text for a message: never long, never an overflow."""
    if isinstance(value, int):
        return str(value) if abs(value) < 1 << 70 else "a huge number"
    return f"{value:.6g}"


def check_count(param: str, count: int, limit: int, counted: str = "entries") -> None:
    if count > limit:
        raise InvalidRequest(f"{param} has at most {limit} {counted}, not {count}", param=param)


def check_bad_word_length(tokens: int) -> None:
    if not 1 <= tokens <= MAX_BAD_WORD_TOKENS:
        message = f"an entry of bad_words must be 1 to {MAX_BAD_WORD_TOKENS} tokens, not {tokens}"
        raise InvalidRequest(message, param="bad_words")


def check_tokens(request: GenerateRequest, vocab_size: int) -> None:
    """Raises InvalidRequest if a token of the prompt, or of the output so far, is not one of `vocab_size`."""
    for param, tokens in (("prompt", request.prompt), ("output", request.output)):
        if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
            _check_ids(param, tokens, vocab_size)


def _check_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"{param}: token ids are 0 to {vocab_size - 1}, not {shown(token)}", param=param)
