"""What a client asks for, as values every tier agrees on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "aborted", "error"]


class SequenceId(NamedTuple):
    """One try at one choice of one request: the name of a sequence on every tier and on the wire."""

    request_id: str
    choice: int = 0
    attempt: int = 1

    def __str__(self) -> str:
        return f"{self.request_id}/{self.choice}#{self.attempt}"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is chosen from logits. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off.

    `seed` is a 64-bit pattern, always set: admission draws one for a request that names none.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One choice to generate. `prompt` and `output` are token ids and stay apart on every hop, so that a resumed
    attempt sees the same request: `output` is what earlier attempts already produced.

    `eos_token_ids` is empty when the client asked to ignore EOS. `deadline_s` is the time left, in seconds, when the
    value was made; each process turns it into an instant of its own monotonic clock.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    eos_token_ids: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    choice: int = 0
    attempt: int = 1
    deadline_s: float = 600.0
    tenant: str = ""
    priority: int = 0
    cache_salt: str = ""

    @property
    def sequence_id(self) -> SequenceId:
        return SequenceId(self.request_id, self.choice, self.attempt)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens whose KV must exist before the next one is sampled: the prompt and the output so far."""
        return len(self.prompt) + len(self.output)

    @property
    def max_total_tokens(self) -> int:
        """Positions the sequence can ever hold KV for (the last token sampled is never computed)."""
        return len(self.prompt) + self.max_tokens


def finish_reason(request: GenerateRequest, output_len: int, last_token: int) -> FinishReason | None:
    """Why the sequence ends after `last_token`, the `output_len`-th output token (1-based), or None.

    Workers and journal call the same function, so they cannot disagree about the end.
    """
    if last_token in request.eos_token_ids:
        return "stop"
    if output_len >= request.max_tokens:
        return "length"
    return None
