"""The journal of one choice: the tokens that count, each once, in order, whichever worker sent them.

Only the current attempt counts. A repeat must be equal and is ignored; a gap is held until it is filled (token 1 comes
from prefill and token 2 from decode, on different streams). Text, usage and the end derive from `tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from baton.core.errors import InvariantError
from baton.core.request import FinishReason, GenerateRequest, finish_reason

MAX_HELD_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Appended:
    """`tokens` are new, from output index `first_index` on; `finish` is set when the last of them ends the choice."""

    first_index: int
    tokens: tuple[int, ...]
    finish: FinishReason | None


Verdict = Appended | Literal["stale", "repeat", "held"]


class Journal:
    """Complete state: `tokens`, `attempt`, `finish`, and `_held` tokens by output index."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.attempt = request.attempt
        self.tokens: list[int] = list(request.output)
        self.finish: FinishReason | None = None
        self._held: dict[int, int] = {}

    @property
    def next_index(self) -> int:
        return len(self.tokens)

    def begin_attempt(self, attempt: int) -> None:
        """Only `attempt` counts from now on; what was held of earlier ones is dropped.

        Raises:
            InvariantError: attempts only rise.
        """
        if attempt <= self.attempt:
            raise InvariantError(f"attempt {attempt} after {self.attempt}")
        self.attempt = attempt
        self._held.clear()

    def resume(self, attempt: int) -> None:
        """The request begins anew as `attempt`, with all tokens so far as its output: the next one counts.

        Raises:
            InvariantError: attempts only rise.
        """
        self.begin_attempt(attempt)
        self.request = replace(self.request, output=tuple(self.tokens), attempt=attempt)

    def accept(self, attempt: int, first_index: int, tokens: tuple[int, ...]) -> Verdict:
        """Takes in tokens that a worker sent.

        What comes after the end is not kept.

        Raises:
            InvariantError: a repeat that differs, an index below 0, or a gap too large to hold.
        """
        if attempt != self.attempt:
            return "stale"
        if first_index < 0:
            raise InvariantError(f"{self.request.request_id}: output index {first_index}")
        for offset, token in enumerate(tokens):
            index = first_index + offset
            known = self.tokens[index] if index < len(self.tokens) else self._held.get(index)
            if known is not None and known != token:
                raise InvariantError(
                    f"{self.request.request_id}: output {index} came as {known} and as {token} in attempt {attempt}"
                )
            if index >= len(self.tokens):
                self._held[index] = token
        if len(self._held) > MAX_HELD_TOKENS:
            raise InvariantError(f"{self.request.request_id}: {len(self._held)} tokens wait for {self.next_index}")
        start = len(self.tokens)
        while self.finish is None and len(self.tokens) in self._held:
            token = self._held.pop(len(self.tokens))
            self.tokens.append(token)
            self.finish = finish_reason(self.request, len(self.tokens), token)
        if self.finish is not None:
            self._held.clear()
        if len(self.tokens) == start:
            return "held" if self._held else "repeat"
        return Appended(start, tuple(self.tokens[start:]), self.finish)
