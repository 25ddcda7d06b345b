"""What a worker sends again, reports as lost and ends when its session is established again."""

from __future__ import annotations

from baton.core.codes import ErrorCode
from baton.core.commands import TrackedSequence
from baton.core.events import SequenceEnded, StepEvents, TokenEvent
from baton.core.output_log import OutputLog, reconcile
from baton.core.request import SequenceId

OLD, TRACKED, LATE = SequenceId("old"), SequenceId("tracked"), SequenceId("late")


def logged(*sequences: SequenceId, ended: bool = False) -> OutputLog:
    log = OutputLog()
    for sequence in sequences:
        ends = (SequenceEnded(sequence, "length"),) if ended else ()
        log.record(StepEvents(tokens=(TokenEvent(sequence, 0, (5, 6, 7)),), ended=ends))
    return log


def test_tokens_are_sent_again_from_the_index_that_the_coordinator_expects() -> None:
    found = reconcile([TrackedSequence(TRACKED, 1)], {TRACKED}, {TRACKED}, logged(TRACKED))
    assert [(e.sequence, e.first_index, e.tokens) for e in found.resend.tokens] == [(TRACKED, 1, (6, 7))]
    assert found.unknown == () and found.keep == {TRACKED}


def test_sequence_that_is_not_tracked_is_ended_unless_it_arrived_after_the_join() -> None:
    found = reconcile([], {OLD}, {OLD, LATE}, logged(OLD, LATE))
    assert found.keep == {LATE}
    assert [(e.sequence, e.first_index) for e in found.resend.tokens] == [(LATE, 0)]


def test_tracked_sequence_that_is_not_here_is_reported_unless_its_end_is_logged_or_it_is_in_transit() -> None:
    tracked = [TrackedSequence(TRACKED, 0)]
    (lost,) = reconcile(tracked, set(), set(), OutputLog()).unknown
    assert (lost.sequence, lost.code) == (TRACKED, ErrorCode.UNKNOWN_SEQUENCE)
    done = reconcile(tracked, {TRACKED}, set(), logged(TRACKED, ended=True))
    assert done.unknown == () and [e.sequence for e in done.resend.ended] == [TRACKED]
    assert reconcile([TrackedSequence(TRACKED, 0, here=False)], set(), set(), OutputLog()).unknown == ()
