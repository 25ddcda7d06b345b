"""What a worker does with its sequences when its session is established again: pure.

The coordinator's welcome lists the sequences that it tracks at the worker, as of some moment after the join. Meanwhile
the worker may have received more over a link, and may have ended some of those listed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from baton.core.codes import ErrorCode
from baton.core.commands import TrackedSequence
from baton.core.events import SequenceEnded, StepEvents
from baton.core.output_log import OutputLog
from baton.core.request import SequenceId


@dataclass(frozen=True, slots=True)
class Reconciled:
    """Send `resend` and then report `unknown`; end every sequence that is not in `keep`."""

    resend: StepEvents
    unknown: tuple[SequenceEnded, ...]
    keep: frozenset[SequenceId]


def reconcile(
    tracked: Collection[TrackedSequence],
    before_join: Collection[SequenceId],
    present: Collection[SequenceId],
    log: OutputLog,
) -> Reconciled:
    """Compares the coordinator's list with the worker's sequences. `before_join` are the sequences that were present or
    logged before the join: one that is not in it arrived later, from which on the coordinator assigns work, and the
    welcome, which may have been written earlier, does not list it."""
    listed = {t.sequence for t in tracked}
    new = {*present, *log.sequences()}.difference(before_join, listed)
    resend = log.since((*tracked, *(TrackedSequence(sequence, 0) for sequence in sorted(new))))
    here = set(present)
    unknown = tuple(
        SequenceEnded(t.sequence, "error", ErrorCode.UNKNOWN_SEQUENCE, "this worker has no such sequence")
        for t in tracked
        if t.here and t.sequence not in here and not log.done(t.sequence)
    )
    return Reconciled(resend, unknown, frozenset(new | listed))
