"""Signs handles for decode workers where a placement is executed: nothing that a client sends gets into them."""

from __future__ import annotations

import secrets

from baton.core.commands import Target
from baton.core.handles import Handle, sign
from baton.core.request import SequenceId
from coordinator.policy.pool import Worker


class HandleSigner:
    """`key` signs the handles of this run; workers receive it when they join, with its clock: `time.monotonic` here."""

    def __init__(self) -> None:
        self.key = secrets.token_bytes(32)

    def target(self, sequence: SequenceId, source: Worker, destination: Worker, deadline_at: float) -> Target:
        """A decode worker with the right to the sequence's KV at `source`, until the request's deadline."""
        handle = Handle(
            sequence,
            source.worker_id,
            source.incarnation,
            destination.worker_id,
            destination.incarnation,
            expires_ms=round(deadline_at * 1000),
            nonce=secrets.token_bytes(12),
        )
        signed = sign(self.key, handle)
        return Target(destination.worker_id, destination.incarnation, destination.join.link_address, signed)
