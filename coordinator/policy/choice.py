"""One choice of a request: everything about it that changes in the coordinator, the events that may happen to it, and
the actions that follow. Pure.

    QUEUED    waits for a prefill worker and a decode worker (policy.dispatch)
    PREFILL   at a prefill worker, or a decode worker that computes the prompt; its first token is not known yet
    HANDOVER  the first token is known; the KV is on its way to a decode worker
    PARKED    no decode worker accepted the KV, or the one that did failed: it stays at the prefill worker until one
              has room
    DECODE    a decode worker has all KV and generates
    ENDED     finished, failed, or its client disconnected

The table of `policy.requests` lists which event leads from which stage to which.

Its journal, `Choice.tokens`, has the tokens that count, each once, in order, whichever worker sent them. A repeated
token must be equal and is ignored; tokens after a gap are kept until it is filled (token 1 comes from prefill and token
2 from decode, on different streams). Text, usage and end derive from these tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from baton.core.blocks import HINT_BYTES, KeyChain
from baton.core.codes import ErrorCode
from baton.core.commands import Command
from baton.core.compatibility import Compatibility
from baton.core.errors import (
    BatonError,
    DeadlineExceeded,
    GrammarLimit,
    HandoffError,
    InvalidRequest,
    InvariantError,
    KVCorrupt,
    ProtocolError,
    Unavailable,
    WorkerLost,
)
from baton.core.events import (
    NO_STAMPS,
    HandedOver,
    Parked,
    SequenceEnded,
    SpeculationCounters,
    StageStamps,
    TokenEvent,
)
from baton.core.machine import MachineState
from baton.core.request import ChoiceId, FinishReason, GenerateRequest, SequenceId, TokenLogprob, finish_reason
from coordinator.policy.pool import Prefix, Worker
from coordinator.policy.quotas import ANONYMOUS, Client
from coordinator.policy.split import Decision

QueuePosition = tuple[int, int, int]
"""Priority, age, and number of the submission."""
SUSPECT_DEATHS = 2
NEVER = 1 << 62


class Stage(MachineState):
    QUEUED = "queue"
    PREFILL = "prefill"
    HANDOVER = "handover"
    PARKED = "parked"
    DECODE = "decode"
    ENDED = "ended"


# Events. The first five come from workers, under the current attempt.


class PrefillTokens(NamedTuple):
    """Its prefill worker sent tokens, which are in the journal."""

    worker: str
    event: TokenEvent


class DecodeTokens(NamedTuple):
    """A decode worker sent tokens, which are in the journal: it has all KV."""

    worker: str
    event: TokenEvent


class HandedOverBy(NamedTuple):
    worker: str
    event: HandedOver


class ParkedBy(NamedTuple):
    worker: str
    event: Parked


class EndedBy(NamedTuple):
    worker: str
    event: SequenceEnded

    def error(self, stage: Stage) -> BatonError:
        """Returns the error of a choice in this stage that ends by it."""
        code = self.event.code or ErrorCode.INTERNAL_ERROR
        kind = _WORKER_ERRORS.get(code, BatonError)
        return kind(f"{self.event.message} (stage {stage.value})", code=code)


# The error that a client receives for an error code of a worker; any other code is a bug of this project.
_WORKER_ERRORS: dict[ErrorCode, type[BatonError]] = {
    ErrorCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    ErrorCode.KV_CORRUPT: KVCorrupt,
    ErrorCode.WORKER_LOST: WorkerLost,
    ErrorCode.HANDOFF_FAILED: HandoffError,
    ErrorCode.STALE_HANDLE: HandoffError,
    ErrorCode.DRAINING: Unavailable,
    ErrorCode.GRAMMAR_FAILED: InvalidRequest,
    ErrorCode.GRAMMAR_LIMIT: GrammarLimit,
    ErrorCode.PROMPT_EXCEEDS_POOL: Unavailable,
    ErrorCode.EXCEEDS_POOL: Unavailable,
}


class Placed(NamedTuple):
    """The dispatcher has taken it out of the queue and named its workers."""


class OfferDue(NamedTuple):
    """Its parked KV may be offered again."""


class LostWorker(NamedTuple):
    """A worker is lost; if it drained, it gave back what it had. `alone` is the only choice in its last step, if there
    was only one."""

    worker: str
    reason: str
    alone: ChoiceId | None
    drained: bool


class Stop(NamedTuple):
    """The front needs no more output: the answer is complete (`answered`), or its client no longer waits."""

    reason: str
    answered: bool


class Fail(NamedTuple):
    error: BatonError


# Actions, which the caller of `policy.requests` executes in order. It signs the handles for the named decode workers.


class StartPrefill(NamedTuple):
    """Compute `request` at `prefill` and offer its KV to `targets`, in order."""

    prefill: str
    request: GenerateRequest
    targets: tuple[str, ...]
    deadline_at: float


class AssignTargets(NamedTuple):
    """Offer the parked KV of `sequence` to `targets`, under `attempt`."""

    prefill: str
    sequence: SequenceId
    targets: tuple[str, ...]
    attempt: int
    deadline_at: float


class Send(NamedTuple):
    """Send a command to a worker if its session is open; otherwise drop it, since a redial reconciles the state."""

    worker: str
    command: Command


class Notify(NamedTuple):
    """Notify the reader of this choice that its state has changed."""

    name: ChoiceId


class Rescheduled(NamedTuple):
    """`sequence` will be continued under another attempt, at output `next_index`."""

    sequence: SequenceId
    next_index: int
    reason: str


class KVParked(NamedTuple):
    """The KV of `sequence` stays at its prefill worker (`baton.core.events.Parked`)."""

    sequence: SequenceId
    reason: str


Action = StartPrefill | AssignTargets | Send | Notify | Rescheduled | KVParked


class Entered(NamedTuple):
    """A choice entered `stage` at time `at`, on `worker` if the stage has one."""

    stage: Stage
    at: float
    worker: str = ""


class Held(NamedTuple):
    """What a choice adds to the counters of its prefill worker (the first) and of its decode worker (the others)."""

    backlog_tokens: int = 0
    reserved_blocks: int = 0
    running: int = 0
    growth: int = 0


NOTHING = Held()


MAX_AHEAD_TOKENS = 4096
Verdict = Literal["appended", "repeat", "ahead"]


@dataclass(slots=True, eq=False)
class Choice:
    """One choice of a request. Times are seconds on the caller's monotonic clock; 0.0 if an event has not happened."""

    request: GenerateRequest  # as it was last queued, with the output so far at that time; not with its attempt
    age: int  # position of its request in the order of admission
    started_at: float
    deadline_at: float
    client: Client = ANONYMOUS
    attempt: int = 1  # the one that counts
    stage: Stage = Stage.QUEUED
    tokens: list[int] = field(init=False)  # the journal
    logprobs: list[TokenLogprob] = field(default_factory=list)  # if requested; those of earlier output are unknown
    finish: FinishReason | None = None
    ahead: dict[int, tuple[int, TokenLogprob | None]] = field(default_factory=dict)  # after a gap, by output index
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # once received
    pooled: bytes = b""  # the vector of a request with `pooling`, once received
    error: BatonError | None = None

    # In the queue.
    queue_position: QueuePosition | None = None  # None outside the queue
    prefix: Prefix = field(default_factory=dict)  # hints of its full blocks, which workers may hold
    generated_by: Compatibility | None = None  # the facts of the workers of which it has output
    traffic_place: float | None = None  # `Traffic.place`; None: there were no shares when it was queued
    revision: str = ""  # of the workers that it was placed on last
    unservable: tuple[str, str] | None = None  # why no present worker can serve it, and the error code
    unservable_since: float = 0.0
    queued_at: float = 0.0
    queued_s: float = 0.0
    prompt_charged: bool = False  # its tenant's counter includes the prompt: it has been placed before
    output_charged: int = 0  # output tokens in that counter

    # At its workers.
    prefill: Worker | None = None
    decode: Worker | None = None  # the preferred one, then the one that has the KV
    targets: tuple[Worker, ...] = ()  # decode workers named for this attempt; each may hold the sequence
    to_compute: int = 0  # tokens of the prompt that are expected to be computed
    decision: Decision | None = None  # where its prompt is computed, and why
    counts_as_running: bool = False  # against its key's `max_running`
    held: Held = NOTHING
    grows_at: int = NEVER  # with more output tokens than this it needs another block at its decode worker
    kv_parked: bool = False  # the prefill worker keeps the KV: no target of this attempt has taken it
    times_parked: int = 0
    offer_at: float = 0.0  # parked KV is not offered before
    recomputed: bool = False  # damaged or missing KV was computed again
    prefilled: int = 0  # tokens computed by its first prefill that produced a token

    # Losses.
    deaths: list[str] = field(default_factory=list)  # workers that were lost or ended it while it ran there, and why
    alone_deaths: int = 0  # of these, in steps of this choice alone
    tokens_at_failure: int = -2  # its tokens when it was last rescheduled because something failed

    # For the timeline and usage.
    first_token_at: float = 0.0
    cached_tokens: int = 0
    stamps: StageStamps = NO_STAMPS  # as workers measured since it was last queued
    earlier_stamps: list[StageStamps] = field(default_factory=list)  # of each earlier run
    history: list[Entered] = field(default_factory=list)
    speculation: SpeculationCounters | None = None
    earlier_speculation: SpeculationCounters | None = None

    name: ChoiceId = field(init=False)
    # The action that reports a change of it: built once, returned for every token.
    notification: Notify = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.request.choice_id
        self.notification = Notify(self.name)
        self.tokens = list(self.request.output)
        self.queued_at = self.started_at
        self.history.append(Entered(self.stage, self.started_at))

    def __repr__(self) -> str:
        return f"<Choice {self.sequence} {self.stage.value}, {self.next_index} tokens>"

    @property
    def state(self) -> Stage:
        """The stage, under the name that `baton.core.machine` reads."""
        return self.stage

    @property
    def sequence(self) -> SequenceId:
        """Its id on the workers under the current attempt."""
        return SequenceId(*self.name, self.attempt)

    @property
    def ended(self) -> bool:
        return self.stage is Stage.ENDED

    @property
    def alone(self) -> bool:
        """Whether it is computed in steps of its own."""
        return len(self.deaths) >= SUSPECT_DEATHS

    @property
    def on_decode(self) -> bool:
        """Whether its decode worker computes the prompt, too: both are the same worker then."""
        return self.prefill is not None and self.prefill is self.decode

    @property
    def needs_decode(self) -> bool:
        """Whether tokens remain for a decode worker after the one that prefill samples."""
        return self.request.max_tokens - len(self.request.output) > 1

    @property
    def next_index(self) -> int:
        """Of the next token of the output."""
        return len(self.tokens)

    @property
    def produced(self) -> int:
        """Number of tokens generated since it was last queued."""
        return len(self.tokens) - len(self.request.output)

    @property
    def prefill_worker(self) -> str:
        return "" if self.prefill is None else self.prefill.worker_id

    @property
    def decode_worker(self) -> str:
        return "" if self.decode is None else self.decode.worker_id

    @property
    def awaits_prompt_logprobs(self) -> bool:
        return self.request.sampling.prompt_logprobs is not None and self.prompt_logprobs is None

    def runs_at(self, worker: str) -> bool:
        """Returns whether that worker has the sequence, as far as the coordinator knows."""
        return worker == (self.decode_worker if self.stage is Stage.DECODE else self.prefill_worker)

    def workers(self) -> set[str]:
        """Returns every worker that may hold state of this choice."""
        named = (self.prefill, self.decode, *self.targets)
        return {worker.worker_id for worker in named if worker is not None}

    def accept(self, event: TokenEvent) -> Verdict:
        """Records what a worker sent about tokens of the current attempt.

        Raises:
            ProtocolError: a repeat that differs, an index below 0, or too many tokens after a gap; tokens without the
                log-probabilities asked for, or for a request with `pooling`, or a vector for another one.
        """
        request = self.request
        sampling, logprobs, scores = request.sampling, event.logprobs, event.prompt_logprobs
        if len(logprobs) != (0 if sampling.logprobs is None else len(event.tokens)):
            mismatch = f"{len(logprobs)} log-probabilities received with {len(event.tokens)} tokens"
            raise ProtocolError(f"{request.request_id}: {mismatch}")
        if bool(event.pooled) != bool(request.pooling) or len(event.pooled) % 4:
            raise ProtocolError(f"{request.request_id}: a vector of {len(event.pooled)} bytes for '{request.pooling}'")
        if event.stamps is not None:
            self.add_stamps(event.stamps)
        if event.cached_tokens and not request.output:
            self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        if sampling.prompt_logprobs is not None and len(scores) == len(request.prompt) - 1:
            self.prompt_logprobs = scores
        if event.speculation is not None:
            before = self.earlier_speculation
            self.speculation = event.speculation if before is None else before + event.speculation
        if event.pooled:
            verdict: Verdict = "repeat" if self.pooled else "appended"
            self.pooled, self.finish = event.pooled, "stop"
            return verdict
        return self._append(event.first_index, event.tokens, logprobs)

    def _append(self, first_index: int, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> Verdict:
        """Adds tokens with as many log-probabilities or none. Those after the end are dropped."""
        start, request = len(self.tokens), self.request
        if first_index == start and not self.ahead and self.finish is None:  # nearly always
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
            known = self.tokens[index] if index < start else self.ahead.get(index, (None,))[0]
            if known is not None and known != token:
                raise ProtocolError(f"{request.request_id}: output {index} was {known} and is {token}")
            if index >= start:
                self.ahead[index] = token, logprobs[offset] if logprobs else None
        if len(self.ahead) > MAX_AHEAD_TOKENS:
            raise ProtocolError(f"{request.request_id}: {len(self.ahead)} tokens await index {self.next_index}")
        while self.finish is None and len(self.tokens) in self.ahead:
            token, logprob = self.ahead.pop(len(self.tokens))
            self.tokens.append(token)
            if logprob is not None:
                self.logprobs.append(logprob)
            self.finish = finish_reason(request, len(self.tokens), token)
        if self.finish is not None:
            self.ahead.clear()
        if len(self.tokens) == start:
            return "ahead" if self.ahead else "repeat"
        return "appended"

    def add_stamps(self, stamps: StageStamps) -> None:
        """Merges a worker's stamps: a worker measures only its own stages, so the larger value is the measured one."""
        self.stamps = self.stamps.largest(stamps)

    def begin_attempt(self, attempt: int) -> None:
        """Makes `attempt` the only one that counts; drops tokens after a gap, which it generates again.

        Raises:
            InvariantError: `attempt` is not higher than the current one.
        """
        if attempt <= self.attempt:
            raise InvariantError(f"attempt {attempt} is not higher than {self.attempt}")
        self.attempt = attempt
        self.ahead.clear()
        self.kv_parked = False

    def resume(self, attempt: int, now: float) -> None:
        """Returns to the queue as `attempt`, with all tokens so far as its output; generation continues after them.

        Raises:
            InvariantError: `attempt` is not higher than the current one.
        """
        self.begin_attempt(attempt)
        sampling = self.request.sampling
        if self.prompt_logprobs is not None:  # not requested again: the prompt may then come from a prefix cache
            sampling = replace(sampling, prompt_logprobs=None)
        self.request = replace(self.request, output=tuple(self.tokens), sampling=sampling)
        if self.prefill is not None and self.request.output:
            self.generated_by = self.prefill.join.facts
        self.prefill = self.decode = self.decision = None
        self.targets, self.times_parked, self.queued_at = (), 0, now
        self.earlier_speculation = self.speculation
        self.earlier_stamps.append(self.stamps)
        self.stamps = NO_STAMPS

    def enter(self, stage: Stage, now: float) -> None:
        self.stage, self.unservable = stage, None
        at_prefill = stage in (Stage.PREFILL, Stage.HANDOVER, Stage.PARKED)
        worker = self.prefill_worker if at_prefill else self.decode_worker if stage is Stage.DECODE else ""
        self.history.append(Entered(stage, now, worker))

    def late(self) -> DeadlineExceeded:
        limit_s, stage = self.deadline_at - self.started_at, self.stage.value
        return DeadlineExceeded(f"the request did not finish within its deadline of {limit_s:.6g} s (stage {stage})")

    def all_stamps(self) -> StageStamps:
        """Returns the seconds spent in each stage, over all attempts."""
        return sum(self.earlier_stamps, self.stamps)


def block_hints(request: GenerateRequest, digest: str | None, sizes: Collection[int], known: Prefix) -> Prefix:
    """Returns the hints of the blocks of these sizes that a worker may already hold; the last token is always computed.
    `known` are those of another choice with the same tokens. None without the `digest` of a model."""
    tokens, prefix = request.prompt + request.output, dict[int, tuple[bytes, ...]]()
    if digest is None or request.pooling == "mean":  # which reuses no KV
        return prefix
    for size in sizes:
        if size in known:
            prefix[size] = known[size]
            continue
        chain = KeyChain(digest, request.tenant, request.cache_salt, request.adapter, size)
        keys = chain.grow(lambda start, end: tokens[start:end], len(tokens) - 1)
        prefix[size] = tuple(key[:HINT_BYTES] for key in keys)
    return prefix
