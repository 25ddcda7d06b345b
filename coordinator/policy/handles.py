"""Signed handles to the KV of a sequence for the decode workers that a placement names. Pure.

A handle is signed when a placement is executed: clients neither send nor receive it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from baton.core.commands import Target
from baton.core.errors import InvariantError
from baton.core.handover import Handle, sign
from baton.core.request import SequenceId
from coordinator.policy.workers import WorkerTable

NONCE_BYTES = 12


def signed_targets(
    workers: WorkerTable,
    key: bytes,
    sequence: SequenceId,
    prefill: str,
    targets: Iterable[str],
    deadline_at: float,
    random_bytes: Callable[[int], bytes],
) -> tuple[Target, ...]:
    """Returns the present ones of the decode workers, each with a handle to the sequence's KV at `prefill` that is
    valid until its deadline, a time on the coordinator's clock. `key` is that of the coordinator's run.

    Raises:
        InvariantError: the prefill worker is not present.
    """
    source = workers.get(prefill)
    if source is None:
        raise InvariantError(f"{prefill} was chosen but is not present")
    signed = list[Target]()
    for name in targets:
        if (to := workers.get(name)) is None:
            continue
        handle = Handle(
            sequence,
            source.worker_id,
            source.incarnation,
            to.worker_id,
            to.incarnation,
            expires_ms=round(deadline_at * 1000),
            nonce=random_bytes(NONCE_BYTES),
        )
        signed.append(Target(to.worker_id, to.incarnation, to.join.link_address, sign(key, handle)))
    return tuple(signed)
