"""The journal of one choice: the tokens that count, each once, in order, whichever worker sent them.

Only the current attempt counts. A repeated token must be equal and is ignored; tokens after a gap are held until it is
filled (token 1 comes from prefill and token 2 from decode, on different streams). Text, usage and end derive from
`tokens`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from baton.core.errors import InvariantError, ProtocolError
from baton.core.request import FinishReason, GenerateRequest, TokenLogprob, finish_reason

MAX_HELD_TOKENS = 4096


Verdict = Literal["appended", "stale", "repeat", "held"]


class Journal:
    """Complete state: `tokens` and, if the request asks for them, their `logprobs` (for the last tokens only: those of
    tokens that came with the request are unknown); `prompt_logprobs` once received; `attempt`, `finish`, and the tokens
    `_held`, by output index."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.attempt = request.attempt
        self.tokens: list[int] = list(request.output)
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: tuple[TokenLogprob, ...] | None = None
        self.finish: FinishReason | None = None
        self._held: dict[int, tuple[int, TokenLogprob | None]] = {}

    @property
    def next_index(self) -> int:
        return len(self.tokens)

    def begin_attempt(self, attempt: int) -> None:
        """Makes `attempt` the only one that counts; drops the held tokens of earlier ones.

        Raises:
            InvariantError: `attempt` is not higher than the current one.
        """
        if attempt <= self.attempt:
            raise InvariantError(f"attempt {attempt} is not higher than {self.attempt}")
        self.attempt = attempt
        self._held.clear()

    def resume(self, attempt: int) -> None:
        """Restarts the request as `attempt`, with all tokens so far as its output; generation continues after them.

        Raises:
            InvariantError: `attempt` is not higher than the current one.
        """
        self.begin_attempt(attempt)
        sampling = self.request.sampling
        if self.prompt_logprobs is not None:  # not requested again: the prompt may then come from a prefix cache
            sampling = replace(sampling, prompt_logprobs=None)
        self.request = replace(self.request, output=tuple(self.tokens), attempt=attempt, sampling=sampling)

    def accept(
        self,
        attempt: int,
        first_index: int,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...] = (),
        prompt_logprobs: tuple[TokenLogprob, ...] = (),
    ) -> Verdict:
        """Adds tokens that a worker sent, and log-probabilities if the request asks for them.

        Tokens after the end are dropped.

        Raises:
            ProtocolError: a repeat that differs, an index below 0, a gap too large to hold, or tokens without the
                log-probabilities asked for.
        """
        if attempt != self.attempt:
            return "stale"
        if first_index < 0:
            raise ProtocolError(f"{self.request.request_id}: invalid output index {first_index}")
        params = self.request.sampling
        if len(logprobs) != (0 if params.logprobs is None else len(tokens)):
            what = f"{len(logprobs)} log-probabilities received with {len(tokens)} tokens"
            raise ProtocolError(f"{self.request.request_id}: {what}")
        if params.prompt_logprobs is not None and len(prompt_logprobs) == len(self.request.prompt) - 1:
            self.prompt_logprobs = prompt_logprobs
        if first_index == len(self.tokens) and not self._held and self.finish is None:
            return self._append(tokens, logprobs)
        for offset, token in enumerate(tokens):
            index = first_index + offset
            known = self.tokens[index] if index < len(self.tokens) else self._held.get(index, (None,))[0]
            if known is not None and known != token:
                raise ProtocolError(
                    f"{self.request.request_id}: output {index} was {known} and is {token} in attempt {attempt}"
                )
            if index >= len(self.tokens):
                self._held[index] = token, logprobs[offset] if logprobs else None
        if len(self._held) > MAX_HELD_TOKENS:
            raise ProtocolError(f"{self.request.request_id}: {len(self._held)} tokens await index {self.next_index}")
        start = len(self.tokens)
        while self.finish is None and len(self.tokens) in self._held:
            token, logprob = self._held.pop(len(self.tokens))
            self.tokens.append(token)
            if logprob is not None:
                self.logprobs.append(logprob)
            self.finish = finish_reason(self.request, len(self.tokens), token)
        if self.finish is not None:
            self._held.clear()
        if len(self.tokens) == start:
            return "held" if self._held else "repeat"
        return "appended"

    def _append(self, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> Verdict:
        """The fast path of `accept`: all tokens are the next ones, as nearly always."""
        start = len(self.tokens)
        for token in tokens:
            self.tokens.append(token)
            self.finish = finish_reason(self.request, len(self.tokens), token)
            if self.finish is not None:
                break
        count = len(self.tokens) - start
        self.logprobs.extend(logprobs[:count])
        return "appended" if count else "repeat"
