"""The error codes of requests for which no workers can be chosen. Only clients receive them, so they are not among the
codes between tiers (baton/core/codes.py)."""

from __future__ import annotations

from enum import StrEnum

from baton.core.commands import Role


class PlacementCode(StrEnum):
    # Refused before it is queued.
    EXCEEDS_QUEUE = "exceeds_queue"
    WOULD_EXCEED_DEADLINE = "would_exceed_deadline"

    # No present worker can serve it. One that no worker can hold: `ErrorCode.EXCEEDS_POOL`.
    NO_PREFILL_WORKER = "no_prefill_worker"
    NO_DECODE_WORKER = "no_decode_worker"
    ADAPTER_NOT_LOADED = "adapter_not_loaded"

    # Not tried again.
    RETRY_BUDGET_EXHAUSTED = "retry_budget_exhausted"


NO_WORKER: dict[Role, PlacementCode] = {
    "prefill": PlacementCode.NO_PREFILL_WORKER,
    "decode": PlacementCode.NO_DECODE_WORKER,
}
