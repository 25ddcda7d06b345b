"""Translates what a client requested, as plain values, into a `Submission`: the only place where ranges and limits are
checked, the same for HTTP and gRPC. Every refusal is an `InvalidRequest` that names the field.

Length: `prompt + max_tokens` is at most the context, so the prompt is at most one token less. A client's `max_tokens`
is never reduced; without one, a completion gets 16 and a chat what remains of the context or of the KV pools, or less
if less fits.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from baton.core.errors import ContextLengthExceeded, InvalidRequest
from baton.core.request import SamplingParams, TokenBias
from baton.core.sampling_limits import MAX_BIASES, MAX_STOP_TOKENS, check_count, check_range, check_sampling, shown
from coordinator.api_keys import MAX_PRIORITY
from coordinator.structured_output import Constraint
from coordinator.submission import Submission
from coordinator.text.chat import PLAIN, ChatMessage, Rendering
from coordinator.text.model import TextModel

DEFAULT_COMPLETION_TOKENS = 16
MAX_STOPS = 64
MAX_STOP_CHARS = 256
MAX_STOP_CHARS_IN_ALL = 4 * MAX_STOP_CHARS
MAX_SALT_CHARS = 256
MAX_BAD_WORDS = 64
MAX_CHOICES = 128
MAX_MESSAGES = 4_096
MAX_SCORES = 1_000_000
"""Log-probabilities in one response, over all choices and the prompt: about 30 MB of JSON."""
MAX_PROMPT_SCORES = 300_000
"""Log-probabilities of a prompt: they arrive in one message of a worker, which then takes 0.2 s to read."""
ROLES = frozenset(["system", "developer", "user", "assistant", "tool"])


@dataclass(frozen=True, slots=True)
class Options:
    """What a client may choose; None stands for the model's default. `bad_words` are texts, `bad_word_ids` the same as
    token ids; completions repeat the prompt's log-probabilities in each choice. `prompts` is the number of prompts,
    with `n` choices each. The output fills the gap between the prompt and `suffix`. `max_tokens` that do not fit are
    refused, unless `fit_max_tokens` is set. The fields that end in `_param` are the client's names, for error
    messages."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    cache_salt: str | None = None
    priority: int = 0
    constraint: Constraint | None = None
    json_whitespace: str | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    each_choice_has_prompt: bool = False
    prompts: int = 1
    suffix: str | None = None
    fit_max_tokens: bool = False
    max_tokens_param: str = "max_tokens"
    stop_param: str = "stop"
    prompt_logprobs_param: str = "prompt_logprobs"


Text = str | Sequence[int]
"""A text, or its token ids."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """What a client may choose for texts that are pooled. With `truncate` only that many of the last tokens of each
    count, with -1 as many as fit."""

    truncate: int | None = None
    add_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None
    deadline_s: float | None = None


_TRANSLATED = frozenset(["seed", "logit_bias", "stop_token_ids", "bad_words", "allowed_token_ids"])
_AS_GIVEN = {f.name for f in fields(SamplingParams)} & {f.name for f in fields(Options)} - _TRANSLATED


class Translator:
    """Builds submissions for one model. `deadline_s` is the longest time that a request may take. `pools_hold` is
    `WorkerTable.max_model_len`."""

    def __init__(
        self,
        text: TextModel,
        *,
        deadline_s: float = 600.0,
        pools_hold: Callable[[int], int | None] = lambda prompt_tokens: None,
    ) -> None:
        self.text = text
        self._deadline_s = deadline_s
        self._pools_hold = pools_hold

    def max_model_len(self, prompt_tokens: int = 0) -> int:
        """Returns the tokens of the longest prompt and output together: the model's context, or what the workers can
        hold, if that is less."""
        held = self._pools_hold(prompt_tokens)
        return self.text.max_model_len if held is None else min(self.text.max_model_len, held)

    async def from_text(
        self,
        request_id: str,
        prompt: str,
        options: Options,
        *,
        params: SamplingParams | None = None,
        deadline_s: float | None = None,
    ) -> Submission:
        """Builds a completion of text. `params` is the result of `checked` for these options, if already known."""
        params = params or self.checked(options)
        if not prompt and options.suffix is None:
            raise InvalidRequest("the prompt is empty", param="prompt")
        check_text(prompt, "prompt")
        if options.suffix is None:
            ids = await self.text.encode_async(prompt)
            return self._submission(request_id, ids, options, params, DEFAULT_COMPLETION_TOKENS, "prompt", deadline_s)
        check_text(options.suffix, "suffix")
        ids = await self.text.encode_infill_async(prompt, options.suffix)
        filled = self._submission(request_id, ids, options, params, DEFAULT_COMPLETION_TOKENS, "prompt", deadline_s)
        ends = () if options.ignore_eos or self.text.infill is None else self.text.infill.ends
        return replace(filled, eos_token_ids=tuple(dict.fromkeys((*filled.eos_token_ids, *ends))))

    async def from_token_ids(
        self,
        request_id: str,
        prompt: Sequence[int],
        options: Options,
        *,
        params: SamplingParams | None = None,
        deadline_s: float | None = None,
    ) -> Submission:
        """Builds a completion of token ids, used as given: nothing is prepended."""
        params = params or self.checked(options)
        if options.suffix is not None:
            raise InvalidRequest("suffix needs a prompt of text, not token ids", param="suffix")
        if options.truncate_prompt_tokens is not None:
            prompt = prompt[-options.truncate_prompt_tokens :]
        self._check_room(len(prompt), "prompt")  # before any id is read: there may be a million
        prompt = tuple(prompt)  # ids in a protobuf message are slow to read more than once
        self.check_token_ids(prompt)
        return self._submission(request_id, prompt, options, params, DEFAULT_COMPLETION_TOKENS, "prompt", deadline_s)

    async def from_messages(
        self,
        request_id: str,
        messages: Sequence[ChatMessage],
        options: Options,
        *,
        how: Rendering = PLAIN,
        deadline_s: float | None = None,
        param: str = "messages",
    ) -> Submission:
        """Builds the next turn of a conversation, which the field `param` of the request contains."""
        params = self.checked(options)
        check_messages(messages)
        ids = await self.text.encode_chat_async(messages, how)
        return self._submission(request_id, ids, options, params, self.text.max_model_len, param, deadline_s)

    async def to_pool(self, request_id: str, text: Text, options: PoolOptions, *, param: str) -> Submission:
        """Builds the submission of a text, in the field `param` of the request, to be pooled. It may have as many
        tokens as the context: none follows."""
        truncate = options.truncate
        check_range("truncate_prompt_tokens", truncate, -1, (1 << 31) - 1)
        if truncate == 0:
            raise InvalidRequest("truncate_prompt_tokens must be positive, or -1", param="truncate_prompt_tokens")
        check_range("priority", options.priority, -MAX_PRIORITY, MAX_PRIORITY)
        check_salt(options.cache_salt)
        ids: Sequence[int]
        if isinstance(text, str):
            if not text:
                raise InvalidRequest("the text is empty", param=param)
            check_text(text, param)
            special, truncates = options.add_special_tokens, truncate is not None
            ids = await self.text.encode_async(text, add_special_tokens=special, param=param, truncates=truncates)
        else:
            ids = text
        longest = self.max_model_len(len(ids))
        if truncate is not None:
            ids = ids[-(longest if truncate < 0 else truncate) :]
        if len(ids) > longest:
            raise ContextLengthExceeded(
                f"this model's context is {longest} tokens; this text has {len(ids)}",
                param=param,
                prompt_tokens=len(ids),
                max_prompt_tokens=longest,
            )
        prompt = tuple(ids)
        self.check_token_ids(prompt, param=param)
        return Submission(
            request_id=request_id,
            prompt=prompt,
            max_tokens=1,
            cache_salt=options.cache_salt or "",
            priority=options.priority,
            deadline_s=self._deadline_s if options.deadline_s is None else min(options.deadline_s, self._deadline_s),
            pooling=self.text.pooling.pooling,
        )

    def check_token_ids(self, ids: Sequence[int], *, param: str = "prompt") -> None:
        """Checks that the model has an embedding for each id; the tokenizer may have fewer ids."""
        if not ids:
            raise InvalidRequest("the prompt is empty", param=param)
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.text.vocab_size:
            bad = low if low < 0 else high
            raise InvalidRequest(f"token ids are 0 to {self.text.vocab_size - 1}, not {shown(bad)}", param=param)

    def _submission(
        self,
        request_id: str,
        prompt: Sequence[int],
        options: Options,
        params: SamplingParams,
        default_tokens: int,
        param: str,
        deadline_s: float | None,
    ) -> Submission:
        if options.truncate_prompt_tokens is not None:
            prompt = prompt[-options.truncate_prompt_tokens :]
        if not prompt:
            raise InvalidRequest("the prompt has no tokens", param=param)
        context = self.text.max_model_len
        room = self._check_room(len(prompt), param)
        requested = options.max_tokens
        default_tokens = min(default_tokens, _scored_tokens(options, len(prompt)))
        fits = max(self.max_model_len(len(prompt)) - len(prompt), 1)  # too long a prompt is refused at admission
        max_tokens = min(default_tokens, fits) if requested is None else requested
        if options.fit_max_tokens:
            max_tokens = min(max_tokens, fits)
        if max_tokens > room:
            raise ContextLengthExceeded(
                f"this model's context is {context} tokens; the prompt has {len(prompt)} "
                f"and {options.max_tokens_param} requests {requested} more",
                param=options.max_tokens_param,
            )
        check_range("min_tokens", params.min_tokens, 0, max_tokens)
        _check_scores(options, len(prompt), max_tokens)
        seed = secrets.randbits(64) if options.seed is None else options.seed & (1 << 64) - 1
        return Submission(
            request_id=request_id,
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            sampling=replace(params, seed=seed),
            constraint=self._constraint(options),
            eos_token_ids=() if options.ignore_eos else self.text.eos_token_ids,
            stop=options.stop,
            n=options.n,
            cache_salt=options.cache_salt or "",
            priority=options.priority,
            include_stop=options.include_stop,
            shown_token_ids=frozenset() if options.skip_special_tokens else self.text.vocabulary.special_ids,
            deadline_s=self._deadline_s if deadline_s is None else min(deadline_s, self._deadline_s),
        )

    def _constraint(self, options: Options) -> Constraint | None:
        """Returns the constraint of the output, if any."""
        constraint = options.constraint
        if constraint is not None and (options.ignore_eos or not self.text.eos_token_ids):
            feature = "ignore_eos" if options.ignore_eos else "a model without an end-of-sequence token"
            raise InvalidRequest(f"{constraint.param} cannot be combined with {feature}", param=constraint.param)
        return constraint

    def _check_room(self, prompt_tokens: int, param: str) -> int:
        """Returns how many tokens fit after the prompt, at least one."""
        context = self.text.max_model_len
        if prompt_tokens >= context:
            raise ContextLengthExceeded(
                f"this model's context is {context} tokens; the prompt has {prompt_tokens} and needs room for one more",
                param=param,
                prompt_tokens=prompt_tokens,
                max_prompt_tokens=context - 1,
            )
        return context - prompt_tokens

    def checked(self, options: Options) -> SamplingParams:
        """Returns the sampling parameters without the seed, the same for every prompt of a request. Raises
        InvalidRequest for values out of range, before anything else is done for the request."""
        self.text.pooling.check_generates()
        check_options(options)
        check_count("allowed_token_ids", len(options.allowed_token_ids or ()), self.text.vocab_size)
        given = {name: value for name in _AS_GIVEN if (value := getattr(options, name)) is not None}
        params = replace(self.text.defaults, **given)
        if params.top_p == 0:  # no token but the most likely one; workers accept no such top_p
            params = replace(params, top_k=1, top_p=1.0)
        biases = options.logit_bias or {}
        for bias in biases.values():
            check_range("logit_bias", bias, -100, 100)  # before conversion: a float cannot hold every integer
        words = itertools.chain(options.bad_word_ids, *map(self.text.bad_word, options.bad_words))
        params = replace(
            params,
            temperature=params.temperature or 0.0,  # -0.0 is 0
            top_k=max(0, params.top_k) if params.top_k < self.text.vocab_size else 0,
            seed=0,
            logit_bias=tuple(TokenBias(token, float(biases[token])) for token in sorted(biases)),
            stop_token_ids=tuple(dict.fromkeys(options.stop_token_ids)),
            bad_words=tuple(dict.fromkeys(words)),
            allowed_token_ids=tuple(sorted(set(options.allowed_token_ids or ()))),
        )
        check_sampling(params, options.max_tokens or (1 << 31) - 1, self.text.vocab_size)
        return params


def check_options(options: Options) -> None:
    """Raises InvalidRequest for what `SamplingParams` cannot check: a value that a client may write in more than one
    way, a text, a list that must not be empty."""
    check_range(options.max_tokens_param, options.max_tokens, 1, (1 << 31) - 1)
    check_range("top_k", options.top_k, -1, (1 << 31) - 1)
    check_range("seed", options.seed, -(1 << 63), (1 << 63) - 1)
    check_range("n", options.n, 1, MAX_CHOICES)
    check_range("priority", options.priority, -MAX_PRIORITY, MAX_PRIORITY)
    check_range("truncate_prompt_tokens", options.truncate_prompt_tokens, 1, (1 << 31) - 1)
    if _choices(options) > MAX_CHOICES:
        message = f"a request has at most {MAX_CHOICES} choices, not {options.prompts} prompts with {options.n} each"
        raise InvalidRequest(message, param="prompt")
    check_count("logit_bias", len(options.logit_bias or ()), MAX_BIASES)
    check_count("stop_token_ids", len(options.stop_token_ids), MAX_STOP_TOKENS)
    _check_texts(options.stop_param, options.stop, MAX_STOPS)
    if (stop_chars := sum(map(len, options.stop))) > MAX_STOP_CHARS_IN_ALL:  # each token is matched against all of them
        message = f"stop strings have at most {MAX_STOP_CHARS_IN_ALL} characters together, not {stop_chars}"
        raise InvalidRequest(message, param=options.stop_param)
    _check_texts("bad_words", options.bad_words, MAX_BAD_WORDS)
    check_salt(options.cache_salt)
    if options.allowed_token_ids == ():
        raise InvalidRequest("allowed_token_ids is empty: no token could be chosen", param="allowed_token_ids")


def check_salt(salt: str | None) -> None:
    if salt is None:
        return
    if not 1 <= len(salt) <= MAX_SALT_CHARS:
        raise InvalidRequest(f"cache_salt has 1 to {MAX_SALT_CHARS} characters, not {len(salt)}", param="cache_salt")
    check_text(salt, "cache_salt")


def _choices(options: Options) -> int:
    return options.prompts * options.n


def _prompt_scores(options: Options, prompt_tokens: int) -> tuple[int, int]:
    """Returns the numbers of the prompt's log-probabilities: in the message of a worker, and in the response."""
    once = 0 if options.prompt_logprobs is None else prompt_tokens * (options.prompt_logprobs + 1)
    return once, once * (_choices(options) if options.each_choice_has_prompt else options.prompts)


def _scored_tokens(options: Options, prompt_tokens: int) -> int:
    """Returns how many tokens of each choice can have the requested log-probabilities; at least one."""
    if options.logprobs is None:
        return MAX_SCORES
    left = MAX_SCORES - _prompt_scores(options, prompt_tokens)[1]
    return max(left // (_choices(options) * (options.logprobs + 1)), 1)


def _check_scores(options: Options, prompt_tokens: int, max_tokens: int) -> None:
    """Raises InvalidRequest for more log-probabilities than a response may have."""
    once, in_all = _prompt_scores(options, prompt_tokens)
    for scores, limit in ((once, MAX_PROMPT_SCORES), (in_all, MAX_SCORES)):
        if scores > limit:
            reason = f"the response would have {scores} log-probabilities of the prompt; the limit is {limit}"
            raise InvalidRequest(f"{reason}: request fewer, or fewer choices", param=options.prompt_logprobs_param)
    if options.logprobs is not None and max_tokens > _scored_tokens(options, prompt_tokens):
        scores = in_all + _choices(options) * max_tokens * (options.logprobs + 1)
        reason = f"the response would have {scores} log-probabilities; the limit is {MAX_SCORES}"
        raise InvalidRequest(f"{reason}: request fewer, or fewer tokens or choices", param="logprobs")


def _check_texts(param: str, texts: Sequence[str], limit: int) -> None:
    check_count(param, len(texts), limit)
    for text in texts:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            message = f"an entry of {param} has 1 to {MAX_STOP_CHARS} characters, not {len(text)}"
            raise InvalidRequest(message, param=param)
        check_text(text, param)


def check_messages(messages: Sequence[ChatMessage]) -> None:
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"at most {MAX_MESSAGES} messages, not {len(messages)}", param="messages")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise InvalidRequest(f"role must be one of {', '.join(sorted(ROLES))}", param=f"messages[{index}].role")
        check_text(message.content, f"messages[{index}].content")


def check_text(text: str, param: str) -> None:
    """Refuses NUL, which no tokenizer saw in training and many tools truncate at. Both fronts accept only Unicode
    text."""
    if "\0" in text:
        raise InvalidRequest(f"{param} contains NUL", param=param)
