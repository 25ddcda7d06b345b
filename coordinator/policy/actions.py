"""What the caller of `policy.requests` has to do, in order. It signs the handles for the named decode workers. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.commands import Command
from baton.core.request import ChoiceId, GenerateRequest, SequenceId


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
class Rescheduled:
    """`sequence` will be continued under another attempt, at output `next_index`."""

    sequence: SequenceId
    next_index: int
    reason: str


@dataclass(frozen=True, slots=True)
class KVParked:
    """No decode worker accepted the KV of `sequence`: it stays at its prefill worker."""

    sequence: SequenceId
    reason: str


Action = StartPrefill | AssignTargets | Send | Notify | Rescheduled | KVParked
