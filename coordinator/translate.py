"""From what a client asked for, as plain values, to a `Submission`: the one place where ranges and limits are checked,
the same for HTTP and gRPC. Every refusal is an `InvalidRequest` that names the field.

Length: `prompt + max_tokens` may be the context at most, and the prompt one token less. A `max_tokens` that a client
names is never cut; where it names none, a completion gets 16 and a chat the rest of the context, less if less fits.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.errors import ContextLengthExceeded, InvalidRequest
from baton.core.request import SamplingParams
from coordinator.chat import ChatMessage
from coordinator.submission import Submission
from coordinator.text import TextModel

DEFAULT_COMPLETION_TOKENS = 16
MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_MESSAGES = 4_096
_SURROGATE = re.compile("[\ud800-\udfff]")
ROLES = frozenset(["system", "developer", "user", "assistant", "tool"])


@dataclass(frozen=True, slots=True)
class Options:
    """What a client may choose; None stands for the model's default. `max_tokens_param` is the name under which the
    client gave `max_tokens`, for messages about it."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    max_tokens_param: str = "max_tokens"


class Translator:
    """Makes submissions for one model. `deadline_s` is the most time a request may take."""

    def __init__(self, text: TextModel, *, deadline_s: float = 600.0) -> None:
        self.text = text
        self._deadline_s = deadline_s

    async def from_text(
        self, request_id: str, prompt: str, options: Options, *, deadline_s: float | None = None
    ) -> Submission:
        """A completion of text."""
        check_options(options)
        if not prompt:
            raise InvalidRequest("the prompt is empty", param="prompt")
        check_text(prompt, "prompt")
        ids = await self.text.encode_soon(prompt)
        return self._submission(request_id, ids, options, DEFAULT_COMPLETION_TOKENS, "prompt", deadline_s)

    async def from_token_ids(
        self, request_id: str, prompt: Sequence[int], options: Options, *, deadline_s: float | None = None
    ) -> Submission:
        """A completion of token ids, taken as they are: nothing is put in front."""
        check_options(options)
        self.check_token_ids(prompt)
        return self._submission(request_id, prompt, options, DEFAULT_COMPLETION_TOKENS, "prompt", deadline_s)

    async def from_messages(
        self, request_id: str, messages: Sequence[ChatMessage], options: Options, *, deadline_s: float | None = None
    ) -> Submission:
        """A turn of a conversation."""
        check_options(options)
        check_messages(messages)
        ids = await self.text.encode_chat_soon(messages)
        return self._submission(request_id, ids, options, self.text.max_model_len, "messages", deadline_s)

    def check_token_ids(self, ids: Sequence[int], *, param: str = "prompt") -> None:
        """Ids the model has an embedding for; one past the tokenizer's vocabulary but not the model's is ordinary."""
        if not ids:
            raise InvalidRequest("the prompt is empty", param=param)
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.text.vocab_size:
            bad = low if low < 0 else high
            raise InvalidRequest(f"token ids are 0 to {self.text.vocab_size - 1}, not {_shown(bad)}", param=param)

    def _submission(
        self,
        request_id: str,
        prompt: Sequence[int],
        options: Options,
        default_tokens: int,
        param: str,
        deadline_s: float | None,
    ) -> Submission:
        if not prompt:
            raise InvalidRequest("the prompt has no tokens", param=param)
        context = self.text.max_model_len
        room = context - len(prompt)
        if room < 1:
            raise ContextLengthExceeded(
                f"this model's context is {context} tokens; the prompt has {len(prompt)} and needs room for one more",
                param=param,
            )
        wanted = options.max_tokens
        if wanted is not None and wanted > room:
            raise ContextLengthExceeded(
                f"this model's context is {context} tokens; the prompt has {len(prompt)} "
                f"and {options.max_tokens_param} asks for {wanted} more",
                param=options.max_tokens_param,
            )
        return Submission(
            request_id=request_id,
            prompt=tuple(prompt),
            max_tokens=min(default_tokens, room) if wanted is None else wanted,
            sampling=self._sampling(options),
            eos_token_ids=() if options.ignore_eos else self.text.eos_token_ids,
            stop=options.stop,
            deadline_s=self._deadline_s if deadline_s is None else min(deadline_s, self._deadline_s),
        )

    def _sampling(self, options: Options) -> SamplingParams:
        defaults = self.text.defaults
        temperature = defaults.temperature if options.temperature is None else options.temperature
        top_k = defaults.top_k if options.top_k is None else options.top_k
        seed = secrets.randbits(64) if options.seed is None else options.seed
        return SamplingParams(
            temperature=abs(float(temperature)),  # -0.0 is 0
            top_p=float(defaults.top_p if options.top_p is None else options.top_p),
            top_k=max(0, top_k) if top_k < self.text.vocab_size else 0,
            seed=seed & (1 << 64) - 1,
        )


def check_options(options: Options) -> None:
    """Raises InvalidRequest for a value out of its range."""
    _check_int(options.max_tokens_param, options.max_tokens, 1, (1 << 31) - 1)
    _check_int("top_k", options.top_k, -1, (1 << 31) - 1)
    _check_int("seed", options.seed, -(1 << 63), (1 << 63) - 1)
    temperature, top_p = options.temperature, options.top_p
    if temperature is not None and not 0 <= temperature <= 2:
        raise InvalidRequest(f"temperature must be from 0 to 2, not {_shown(temperature)}", param="temperature")
    if top_p is not None and not 0 < top_p <= 1:
        raise InvalidRequest(f"top_p must be above 0 and at most 1, not {_shown(top_p)}", param="top_p")
    if len(options.stop) > MAX_STOPS:
        raise InvalidRequest(f"at most {MAX_STOPS} stop strings, not {len(options.stop)}", param="stop")
    for stop in options.stop:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"a stop string has 1 to {MAX_STOP_CHARS} characters, not {len(stop)}", param="stop")
        check_text(stop, "stop")


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
    """Refuses NUL, which no tokenizer saw in training and many tools cut at, and what is not Unicode text."""
    if "\0" in text:
        raise InvalidRequest(f"{param} contains NUL", param=param)
    if _SURROGATE.search(text):
        raise InvalidRequest(f"{param} contains half a surrogate pair", param=param)


def _check_int(param: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise InvalidRequest(f"{param} must be from {low} to {high}, not {_shown(value)}", param=param)


def _shown(value: float) -> str:
    """A number for a message: never long, never an overflow."""
    if isinstance(value, int):
        return str(value) if abs(value) < 1 << 70 else "a huge number"
    return f"{value:.6g}"
