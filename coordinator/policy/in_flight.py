"""A request in flight, as the coordinator tracks it: its stage, its workers, and the actions that it causes. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from baton.core.commands import Command
from baton.core.errors import BatonError, DeadlineExceeded
from baton.core.events import SpeculationCounters, StageStamps
from baton.core.request import ChoiceId, GenerateRequest, SequenceId
from coordinator.policy.journal import Journal

SUSPECT_DEATHS = 2


class Stage(Enum):
    QUEUED = "queue"
    PREFILL = "prefill"
    HANDOVER = "handover"
    PARKED = "parked"
    DECODE = "decode"
    ENDED = "ended"


LEGAL_MOVES: dict[Stage, frozenset[Stage]] = {
    Stage.QUEUED: frozenset({Stage.PREFILL, Stage.ENDED}),
    Stage.PREFILL: frozenset({Stage.HANDOVER, Stage.PARKED, Stage.DECODE, Stage.QUEUED, Stage.ENDED}),
    Stage.HANDOVER: frozenset({Stage.PARKED, Stage.DECODE, Stage.QUEUED, Stage.ENDED}),
    Stage.PARKED: frozenset({Stage.HANDOVER, Stage.DECODE, Stage.QUEUED, Stage.ENDED}),
    Stage.DECODE: frozenset({Stage.QUEUED, Stage.ENDED}),
    Stage.ENDED: frozenset(),
}
AT_PREFILL = (Stage.PREFILL, Stage.HANDOVER, Stage.PARKED)
WAITING = (Stage.QUEUED, Stage.PARKED)

# Actions. The caller executes them in order and signs the handles for the named decode workers.


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """Compute `request` at `prefill` and offer its KV to `targets`, in order."""

    prefill: str
    request: GenerateRequest
    targets: tuple[str, ...]
    deadline_at: float


@dataclass(frozen=True, slots=True)
class AssignTargets:
    """Offer the parked KV of `sequence` to `targets`, under `attempt`."""

    prefill: str
    sequence: SequenceId
    targets: tuple[str, ...]
    attempt: int
    deadline_at: float


@dataclass(frozen=True, slots=True)
class Send:
    """Send a command to a worker if its session is open; otherwise drop it, since a redial reconciles the state."""

    worker: str
    command: Command


@dataclass(frozen=True, slots=True)
class Notify:
    """Notify the reader of this choice that its state has changed."""

    name: ChoiceId


@dataclass(frozen=True, slots=True)
class Log:
    text: str


Action = StartPrefill | AssignTargets | Send | Notify | Log


class Entered(NamedTuple):
    """A request entered `stage` at time `at`, on `worker` if the stage has one."""

    stage: Stage
    at: float
    worker: str = ""


class WorkerInstance(NamedTuple):
    worker: str
    incarnation: int


@dataclass(slots=True, eq=False)
class Request:
    """One choice of a request. Times are seconds on the caller's monotonic clock; 0.0 if an event has not happened.

    `targets` are the decode workers named for the current attempt; each may hold the sequence. `refused` is set when
    all targets refused before the first token was known; parked KV is offered again from `offer_at` on. `deaths` lists
    the workers that were lost in whose step it ran, with the reason; in `alone_deaths` of these steps it was alone.
    `history` lists the stages it went through; `stamps` are the times that workers measured for them since it was last
    queued, `earlier_stamps` those of each earlier run.
    `prefixes` caches the hints of the prompt's full blocks by block size for later choices, which have the same prompt.
    `unservable_since` is when the last worker that could serve it left, `unservable` the reason and error code.
    """

    journal: Journal
    age: int
    started_at: float
    deadline_at: float
    stage: Stage = Stage.QUEUED
    error: BatonError | None = None
    prefill_worker: str = ""
    decode_worker: str = ""
    targets: tuple[WorkerInstance, ...] = ()
    refused: bool = False
    times_parked: int = 0
    offer_at: float = 0.0
    recomputed: bool = False
    deaths: list[str] = field(default_factory=list)
    alone_deaths: int = 0
    unservable: tuple[str, str] | None = None
    unservable_since: float = 0.0
    queued_at: float = 0.0
    queued_s: float = 0.0
    first_token_at: float = 0.0
    cached_tokens: int = 0
    prefixes: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    stamps: StageStamps = field(default_factory=StageStamps)
    earlier_stamps: list[StageStamps] = field(default_factory=list)
    history: list[Entered] = field(default_factory=list)
    speculation: SpeculationCounters | None = None
    earlier_speculation: SpeculationCounters | None = None
    name: ChoiceId = field(init=False)
    notify: Notify = field(init=False)  # built once: it is returned for every token

    def __post_init__(self) -> None:
        self.name = self.journal.request.choice_id
        self.notify = Notify(self.name)
        self.history.append(Entered(self.stage, self.started_at))

    @property
    def request(self) -> GenerateRequest:
        """The request as it was last queued, with the output so far at that time."""
        return self.journal.request

    @property
    def sequence(self) -> SequenceId:
        """Its id on the workers under the current attempt."""
        request = self.journal.request
        return SequenceId(request.request_id, request.choice, self.journal.attempt)

    @property
    def ended(self) -> bool:
        return self.stage is Stage.ENDED

    @property
    def alone(self) -> bool:
        """Whether it is computed in steps of its own."""
        return len(self.deaths) >= SUSPECT_DEATHS

    def runs_at(self, worker: str) -> bool:
        """Returns whether that worker has the sequence, as far as the coordinator knows."""
        return worker == (self.decode_worker if self.stage is Stage.DECODE else self.prefill_worker)

    def workers(self) -> set[str]:
        """Returns every worker that may hold state of this request."""
        return {w for w in (self.prefill_worker, self.decode_worker, *(t.worker for t in self.targets)) if w}

    def late(self) -> DeadlineExceeded:
        limit_s, stage = self.deadline_at - self.started_at, self.stage.value
        return DeadlineExceeded(f"the request did not finish within its deadline of {limit_s:.1f} s (stage {stage})")

    def all_stamps(self) -> StageStamps:
        """Returns the seconds spent in each stage, over all attempts."""
        return sum(self.earlier_stamps, self.stamps)
