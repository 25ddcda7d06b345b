"""Handles for decode workers, made where a placement is made: nothing a client says reaches them."""

from __future__ import annotations

import secrets

from baton.core.commands import Target
from baton.core.errors import InvariantError
from baton.core.handles import Handle, sign
from baton.core.request import SequenceId
from coordinator.policy.registry import Registry
from coordinator.policy.ticket import Placement


class Mint:
    """`key` signs the handles of this run; workers learn it when they join, and its clock: `time.monotonic` here."""

    def __init__(self, registry: Registry) -> None:
        self.key = secrets.token_bytes(32)
        self._registry = registry

    def targets(self, sequence: SequenceId, placement: Placement, deadline_at: float) -> tuple[Target, ...]:
        """The decode worker of a placement and its spare, each with the right to the sequence's KV."""
        decodes = (placement.decode, placement.spare)
        return tuple(self._target(sequence, placement.prefill, d, deadline_at) for d in decodes if d is not None)

    def _target(self, sequence: SequenceId, prefill: str, decode: str, deadline_at: float) -> Target:
        source, destination = self._registry.get(prefill), self._registry.get(decode)
        if source is None or destination is None:
            raise InvariantError(f"{prefill} or {decode} was picked and is not registered")
        handle = Handle(
            sequence,
            prefill,
            source.join.incarnation,
            decode,
            destination.join.incarnation,
            expires_ms=round(deadline_at * 1000),
            nonce=secrets.token_bytes(12),
        )
        return Target(decode, destination.join.incarnation, destination.join.link_address, sign(self.key, handle))
