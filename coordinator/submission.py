"""The values that front ends pass to the pipeline and receive from it, the same for HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from baton.core.events import SpeculationCounters
from baton.core.request import FinishReason, Pooling, SamplingParams, TokenLogprob
from coordinator.policy.quotas import ANONYMOUS, Client
from coordinator.policy.timeline import Timeline
from coordinator.structured_output import Constraint
from coordinator.text.parser import Event, Parser

LARGE_ENTRIES = 4096
"""Of a message, with about 5 ms of CPU time: it is built off the event loop."""
MAX_TRACEPARENT = 64
MAX_SESSION = 256
SESSION = "x-session-id"
"""The header, or gRPC's metadata, of a client's session: its requests go to one revision."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A validated request: the prompt's token ids, and everything that a client may choose.

    `stop` are strings that end the text before them; `eos_token_ids` is empty under ignore_eos. `deadline_s` is the
    time the whole request may take, in seconds. `n` choices are generated, each with its own random numbers. Requests
    share cached KV only if their `cache_salt` is the same. `shown_token_ids` are special tokens that appear in the
    text; with `include_stop` the text ends with its stop string. Lower `priority` goes first in every queue.
    `traceparent` is the client's span (W3C Trace Context) and `session` its session, if it sent them. The output has to
    match `constraint`; until that is compiled, `sampling` has no grammar. `admitted`: it is one of several prompts of a
    request that counts against its client's quota as a whole. `new_parser` makes a parser of tool calls and reasoning
    for the text of one choice. `adapter` is the digest of the LoRA adapter that computes it; empty for the model
    itself. With `pooling` nothing is generated: the only delta has a vector.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    eos_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    deadline_s: float = 600.0
    client: Client = ANONYMOUS
    priority: int = 0
    n: int = 1
    cache_salt: str = ""
    shown_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    traceparent: str = ""
    session: str = ""
    constraint: Constraint | None = None
    admitted: bool = False
    adapter: str = ""
    new_parser: Callable[[], Parser | None] = field(default=lambda: None, compare=False)
    pooling: Pooling = ""

    def of(self, client: Client, traceparent: str = "", session: str = "", *, adapter: str = "") -> Submission:
        """Returns the submission as this client's, with the traceparent and the session that it sent, the adapter that
        it chose and a priority no more urgent than the client's own."""
        return replace(
            self,
            client=client,
            priority=max(self.priority, client.priority),
            adapter=adapter,
            traceparent=traceparent[:MAX_TRACEPARENT],
            session=session[:MAX_SESSION],
        )


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    speculation: SpeculationCounters | None = None
    reasoning_tokens: int = 0


class Delta(NamedTuple):
    """New text and the new token ids it came from; if the submission has a parser, `events` instead of the text. Text
    may lag behind ids (half a code point, a possible stop string). `logprobs` has one entry per id where they are asked
    for; `prompt_logprobs` comes with the first delta, one entry per prompt token after the first, as does
    `cached_tokens`, how many of the prompt's tokens were cached, and `split`, why it was computed where it was, if
    that was decided for the request. `stop_reason` is the stop string or the stop token
    that ended the text. The last delta of a choice, and only it, has `finish_reason`, `usage` (of this choice) and
    `timeline`. `pooled` is the vector of a submission with `pooling` (`TokenEvent.pooled`)."""

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    timeline: Timeline | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    choice: int = 0
    events: tuple[Event, ...] | None = None
    cached_tokens: int = 0
    pooled: bytes = b""
    split: str = ""


class Sink(Protocol):
    """Receives a delta in the callback in which its tokens arrive, without a switch to the reader's task."""

    @property
    def ready(self) -> bool:
        """Whether it can accept a delta now, without waiting."""
        ...

    def take(self, delta: Delta) -> None: ...


def is_large(deltas: Sequence[Delta]) -> bool:
    entries = 0
    for delta in deltas:
        entries += len(delta.token_ids) + len(delta.text) // 8 + len(delta.events or ()) + len(delta.pooled) // 16
        for scored in (delta.logprobs, delta.prompt_logprobs):
            if scored:
                entries += len(scored) * (len(scored[0].top_ids) + 1)
    return entries > LARGE_ENTRIES
