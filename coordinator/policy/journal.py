"""The journal of one choice: the tokens that count, each once, in order, whichever worker sent them.

A repeated token must be equal and is ignored; tokens after a gap are held until it is filled (token 1 comes from
prefill and token 2 from decode, on different streams). Text, usage and end derive from `tokens`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from baton.core.errors import ProtocolError
from baton.core.request import FinishReason, GenerateRequest, TokenLogprob, finish_reason

MAX_HELD_TOKENS = 4096


Verdict = Literal["appended", "repeat", "held"]


class Journal:
    def __init__(self, output: Iterable[int] = ()) -> None:
        self.tokens: list[int] = list(output)
        self.logprobs: list[TokenLogprob] = []  # if requested; of the last tokens: those of `output` are unknown
        self.finish: FinishReason | None = None
        self._held: dict[int, tuple[int, TokenLogprob | None]] = {}  # by output index

    @property
    def next_index(self) -> int:
        return len(self.tokens)

    def drop_held(self) -> None:
        """Drops tokens after a gap: another attempt generates them again."""
        self._held.clear()

    def add(
        self,
        request: GenerateRequest,
        first_index: int,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> Verdict:
        """Adds tokens of a request, with as many log-probabilities or none. Tokens after the end are dropped.

        Raises:
            ProtocolError: a repeat that differs, an index below 0, or a gap too large to hold.
        """
        start = len(self.tokens)
        if first_index == start and not self._held and self.finish is None:  # nearly always
            for token in tokens:
                self.tokens.append(token)
                self.finish = finish_reason(request, len(self.tokens), token)
                if self.finish is not None:
                    break
            count = len(self.tokens) - start
            self.logprobs.extend(logprobs[:count])
            return "appended" if count else "repeat"
        if first_index < 0:
            raise ProtocolError(f"{request.request_id}: invalid output index {first_index}")
        for offset, token in enumerate(tokens):
            index = first_index + offset
            known = self.tokens[index] if index < start else self._held.get(index, (None,))[0]
            if known is not None and known != token:
                raise ProtocolError(f"{request.request_id}: output {index} was {known} and is {token}")
            if index >= start:
                self._held[index] = token, logprobs[offset] if logprobs else None
        if len(self._held) > MAX_HELD_TOKENS:
            raise ProtocolError(f"{request.request_id}: {len(self._held)} tokens await index {self.next_index}")
        while self.finish is None and len(self.tokens) in self._held:
            token, logprob = self._held.pop(len(self.tokens))
            self.tokens.append(token)
            if logprob is not None:
                self.logprobs.append(logprob)
            self.finish = finish_reason(request, len(self.tokens), token)
        if self.finish is not None:
            self._held.clear()
        if len(self.tokens) == start:
            return "held" if self._held else "repeat"
        return "appended"
