"""A request as the dispatcher sees it: what it needs, where it was sent, what it holds there."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.request import ChoiceId
from coordinator.policy.worker_view import Prefix


@dataclass(frozen=True, slots=True)
class Ticket:
    """What one choice of a request needs: `prefill_tokens` are computed by prefill unless it holds them, `total_tokens`
    is the most the sequence can ever hold. `prefix` names the full blocks that a worker may hold already."""

    name: ChoiceId
    prefill_tokens: int
    total_tokens: int
    needs_decode: bool = True
    prefix: Prefix = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Placement:
    name: ChoiceId
    prefill: str
    decode: str | None
    spare: str | None


@dataclass(slots=True)
class Active:
    """`prefill` is None once it is no longer needed: the KV has been handed over, or the worker is gone. `to_compute`
    tokens were expected to be computed there. While it is `arriving`, its decode worker may not count its blocks.
    `produced` tokens of it are known."""

    ticket: Ticket
    prefill: str | None
    decode: str | None
    to_compute: int
    prefilling: bool = True
    arriving: bool = True
    produced: int = 0
