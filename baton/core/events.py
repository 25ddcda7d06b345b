"""What a worker reports to the coordinator: one StepEvents per step for all its sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from operator import add, attrgetter
from typing import NamedTuple

from baton.core.codes import ErrorCode
from baton.core.request import SequenceId, TokenLogprob
from baton.core.step import GrammarFailure

MAX_PART_BYTES = 4 << 20
"""A step may end many short prompts, and a message of a worker has a limit (baton/runtime/streams.py)."""
MAX_PLAIN_TOKENS = 64
"""Of an event without scores: so few need no look at their size."""


@dataclass(frozen=True, slots=True)
class StageStamps:
    """Seconds that a sequence spent in each stage on one worker; 0 if the stage did not happen there."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    reserve_s: float = 0.0
    transfer_s: float = 0.0
    decode_queue_s: float = 0.0
    decode_s: float = 0.0

    def __add__(self, other: StageStamps) -> StageStamps:
        return StageStamps(*map(add, _stages(self), _stages(other)))

    def largest(self, other: StageStamps) -> StageStamps:
        """Returns the larger value of each stage."""
        return StageStamps(*map(max, _stages(self), _stages(other)))


_stages = attrgetter(*(f.name for f in fields(StageStamps)))
NO_STAMPS = StageStamps()


@dataclass(frozen=True, slots=True)
class SpeculationCounters:
    """Steps that verified draft tokens, the tokens drafted for them, and the accepted ones, each of which saved a step.
    `forced`: a benchmark decided which draft tokens count as accepted, so the output is not real."""

    steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    forced: bool = False

    def plus(self, drafted: int, accepted: int, *, forced: bool = False) -> SpeculationCounters:
        """Returns the counters with one more step, which verified `drafted` tokens."""
        return self + SpeculationCounters(1, drafted, accepted, forced)

    def __add__(self, other: SpeculationCounters) -> SpeculationCounters:
        """Returns the totals of two sequences."""
        return SpeculationCounters(
            self.steps + other.steps,
            self.drafted_tokens + other.drafted_tokens,
            self.accepted_tokens + other.accepted_tokens,
            self.forced or other.forced,
        )


NO_SPECULATION = SpeculationCounters()


class TokenEvent(NamedTuple):
    """`tokens[i]` is output `first_index + i`, `logprobs[i]` its log-probability if the request asks for them.

    Three fields come with the first token that a prefill worker samples: `prompt_logprobs`, if requested (entry i is
    that of prompt token i + 1; the first has none), `stamps` of the stages so far (a short output may end before the
    hand-over is reported), and `cached_tokens`, how many tokens before it were not computed. The decode worker reports
    `cached_tokens` too: its event may arrive first. `speculation` is the sequence's so far, if tokens were drafted.
    `pooled`, float32 in little-endian order, comes instead of tokens for a request with `pooling`."""

    sequence: SequenceId
    first_index: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    cached_tokens: int = 0
    speculation: SpeculationCounters | None = None
    stamps: StageStamps | None = None
    pooled: bytes = b""

    @property
    def max_bytes(self) -> int:
        """An upper bound of its size in a message."""
        scores = sum(
            len(each) * (24 + 9 * len(each[0].top_ids)) for each in (self.logprobs, self.prompt_logprobs) if each
        )
        return 512 + 5 * len(self.tokens) + scores + len(self.pooled)


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """The worker is done with a sequence. If it failed, `code` and `message` say why. `reason` is for logs, and for
    coordinators of older versions: a finish reason, "aborted", or "error" with a code."""

    sequence: SequenceId
    reason: str
    code: ErrorCode | None = None
    message: str = ""
    stamps: StageStamps = field(default_factory=StageStamps)


def grammar_failed(sequence: SequenceId, failure: GrammarFailure, stamps: StageStamps) -> SequenceEnded:
    message = f"generation cannot continue under the requested grammar: {failure.reason}"
    code = ErrorCode.GRAMMAR_LIMIT if failure.exceeds_limit else ErrorCode.GRAMMAR_FAILED
    return SequenceEnded(sequence, "error", code, message, stamps)


@dataclass(frozen=True, slots=True)
class Parked:
    """No target accepted the KV, or the one that did failed: it waits at the prefill worker until new targets are
    assigned."""

    sequence: SequenceId
    reason: str


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The decode worker has acknowledged all KV of the sequence."""

    sequence: SequenceId
    decode_worker: str
    bytes: int
    stamps: StageStamps = field(default_factory=StageStamps)


@dataclass(frozen=True, slots=True)
class PromptCost:
    """What computing a prompt costs at a worker now, as it measures it: seconds per token, the tokens that a step
    computes beside what runs, and the seconds that a step takes without them."""

    token_s: float
    step_tokens: int
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """Counters and gauges of a worker. A block that only the cache holds counts as free. `prompt_tokens_cached` were
    not computed, `kv_bytes_reused` not sent to a decode worker, because they were cached there.
    `preempted` sequences wait for blocks; `preemptions` counts all preemptions. `steps_ahead` were planned while the
    previous step was outstanding, `rows_discarded` computed in vain. `chunks_early` counts chunks of first
    layers, sent while the others were computed. `step_s` is the time spent in all `steps`. `prompt_cost` is None until
    it is measured."""

    blocks_total: int = 0
    blocks_free: int = 0
    running: int = 0
    waiting: int = 0
    prompt_tokens_computed: int = 0
    tokens_generated: int = 0
    kv_bytes_sent: int = 0
    kv_bytes_received: int = 0
    steps: int = 0
    backlog_tokens: int = 0
    hand_overs: int = 0
    sequences: int = 0
    chunks_resent: int = 0
    handles_refused: int = 0
    stale_messages: int = 0
    prompt_tokens_cached: int = 0
    kv_bytes_reused: int = 0
    links_refused: int = 0
    speculation: SpeculationCounters | None = None
    preemptions: int = 0
    preempted: int = 0
    steps_ahead: int = 0
    rows_discarded: int = 0
    chunks_early: int = 0
    step_s: float = 0.0
    prompt_cost: PromptCost | None = None


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """All GPUs of a worker on its leader's node: memory of all processes, as the driver counts it, and the mean share
    (0 to 1) of the driver's last interval in which a kernel ran."""

    memory_used_bytes: int
    memory_total_bytes: int
    utilisation: float


@dataclass(frozen=True, slots=True)
class KVCacheEvents:
    """Hints (the first bytes of keys, `baton.core.blocks`) of full blocks that became or stopped being reusable at
    a worker. `cleared`: hints reported before are no longer valid."""

    stored: tuple[bytes, ...] = ()
    evicted: tuple[bytes, ...] = ()
    cleared: bool = False


@dataclass(frozen=True, slots=True)
class StepEvents:
    """From a worker, after a step, or when something else has happened (`step_id` 0). `alone`, at the start of a step:
    the step computes only this sequence."""

    step_id: int = 0
    tokens: tuple[TokenEvent, ...] = ()
    ended: tuple[SequenceEnded, ...] = ()
    parked: tuple[Parked, ...] = ()
    handed_over: tuple[HandedOver, ...] = ()
    load: Load | None = None
    kv_cache_events: KVCacheEvents | None = None
    alone: SequenceId | None = None


def in_parts(events: StepEvents) -> Iterator[StepEvents]:
    """Yields events as messages of about MAX_PART_BYTES each, or of one event of tokens if that is larger."""
    part, size = list[TokenEvent](), 0
    for token in events.tokens if any(map(_is_large, events.tokens)) else ():
        if part and size + token.max_bytes > MAX_PART_BYTES:
            yield StepEvents(tokens=tuple(part))
            part, size = [], 0
        part.append(token)
        size += token.max_bytes
    yield replace(events, tokens=tuple(part)) if part else events


def _is_large(event: TokenEvent) -> bool:
    return bool(event.pooled or event.logprobs or event.prompt_logprobs) or len(event.tokens) > MAX_PLAIN_TOKENS
