"""A stream may break anywhere: the events received, plus those sent again, are the whole history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.commands import TrackedSequence
from baton.core.errors import InvariantError
from baton.core.events import MAX_PART_BYTES, HandedOver, Parked, StepEvents, TokenEvent, in_parts
from baton.core.output_log import OutputLog
from baton.core.request import SequenceId, TokenLogprob
from baton.runtime.codec import to_message
from baton.runtime.streams import MAX_MESSAGE_BYTES
from tests.support.builders import step_events

A, B = SequenceId("a"), SequenceId("b")
sizes = st.lists(st.integers(1, 3), min_size=1, max_size=8)


def log_of(first_index: int, pieces: list[int], limit: int = 4096) -> tuple[OutputLog, list[StepEvents]]:
    """A log that recorded `pieces` tokens of A at a time, each equal to its index, and A's end; and the events."""
    log, history, index = OutputLog(limit), [], first_index
    for number, piece in enumerate(pieces):
        tokens = range(index, index + piece)
        history.append(step_events(A, index, *tokens, ended="stop" if number == len(pieces) - 1 else ""))
        log.record(history[-1])
        index += piece
    return log, history


@given(first=st.integers(0, 5), pieces=sizes, skip=st.integers(0, 30))
def test_resend_from_any_index_is_the_suffix(first: int, pieces: list[int], skip: int) -> None:
    log, _ = log_of(first, pieces)
    events = log.since([TrackedSequence(A, skip)])
    replayed = [token for event in events.tokens for token in event.tokens]
    assert replayed == list(range(max(first, skip), first + sum(pieces)))
    assert all(event.first_index == max(first, skip) for event in events.tokens)
    assert [e.reason for e in events.ended] == ["stop"]


@given(first=st.integers(0, 5), pieces=sizes, broken_after=st.integers(0, 8))
def test_stream_broken_anywhere_plus_resend_is_the_whole_history(
    first: int, pieces: list[int], broken_after: int
) -> None:
    log, history = log_of(first, pieces)
    received = {
        e.first_index + i: t for step in history[:broken_after] for e in step.tokens for i, t in enumerate(e.tokens)
    }
    again = log.since([TrackedSequence(A, first + len(received))])
    rest = {e.first_index + i: t for e in again.tokens for i, t in enumerate(e.tokens)}
    assert not received.keys() & rest.keys()
    assert received | rest == {index: index for index in range(first, first + sum(pieces))}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), max_size=10))
def test_repeats_change_nothing_and_gaps_are_refused(repeats: list[tuple[int, int]]) -> None:
    log, _ = log_of(0, [3])
    length = 3
    for start, count in repeats:
        if start > length:
            with pytest.raises(InvariantError, match="not contiguous"):
                log.record(step_events(A, start, *range(start, start + count)))
            continue
        log.record(step_events(A, start, *range(start, start + count)))
        length = max(length, start + count)
    assert log.since([TrackedSequence(A, 0)]).tokens == (TokenEvent(A, 0, tuple(range(length))),)


def test_tokens_before_the_first_are_refused() -> None:
    log, _ = log_of(5, [2])
    with pytest.raises(InvariantError, match="not contiguous"):
        log.record(step_events(A, 4, 4))


def test_resumed_sequence_that_parks_before_its_first_token_keeps_its_indices() -> None:
    log = OutputLog()
    log.record(StepEvents(parked=(Parked(A, "no_free_blocks"),)))
    log.record(step_events(A, 7, 70))
    events = log.since([TrackedSequence(A, 7)])
    assert events.tokens == (TokenEvent(A, 7, (70,)),)
    assert [p.sequence for p in events.parked] == [A]


def test_hand_over_and_end_replace_the_parking() -> None:
    log = OutputLog()
    log.record(StepEvents(parked=(Parked(A, "full"), Parked(B, "full"))))
    log.record(StepEvents(handed_over=(HandedOver(A, "d0", 64),)))
    log.record(step_events(B, 0, ended="error"))
    events = log.since([TrackedSequence(A, 0), TrackedSequence(B, 0)])
    assert events.parked == ()
    assert (len(events.handed_over), len(events.ended)) == (1, 1)


def test_unknown_and_released_sequences_have_nothing_to_resend() -> None:
    log, _ = log_of(0, [2])
    log.release([A, B])
    assert log.since([TrackedSequence(A, 0), TrackedSequence(B, 0)]) == StepEvents()


def test_a_sequence_is_done_once_its_end_or_its_hand_over_is_recorded() -> None:
    log = OutputLog()
    log.record(step_events(A, 0, 1))
    log.record(StepEvents(parked=(Parked(B, "full"),)))
    assert not log.done(A) and not log.done(B) and not log.done(SequenceId("unknown"))
    log.record(step_events(A, 1, ended="error"))
    log.record(StepEvents(handed_over=(HandedOver(B, "d0", 64),)))
    assert log.done(A) and log.done(B)
    log.release([A])
    assert not log.done(A)


@pytest.mark.parametrize("end", ["ended", "handed_over"])
def test_log_is_bounded_when_nothing_is_ever_released(end: str) -> None:
    log = OutputLog(limit=3)
    for number in range(50):
        sequence = SequenceId(str(number))
        over = (HandedOver(sequence, "d0", 1),) if end == "handed_over" else ()
        log.record(step_events(sequence, 0, 1, ended="stop" if end == "ended" else ""))
        log.record(StepEvents(handed_over=over))
        assert len(log) <= 3
    assert len(log.since([TrackedSequence(SequenceId("49"), 0)]).tokens) == 1


def test_unfinished_sequence_is_kept_while_finished_ones_are_dropped() -> None:
    log = OutputLog(limit=2)
    log.record(step_events(A, 0, 1))
    for number in range(5):
        log.record(step_events(SequenceId(str(number)), 0, 1, ended="stop"))
    log.record(step_events(A, 1, 2))
    assert log.since([TrackedSequence(A, 0)]).tokens == (TokenEvent(A, 0, (1, 2)),)


def test_log_of_unfinished_sequences_is_bounded_too() -> None:
    log = OutputLog(limit=2)
    for number in range(5):
        log.record(step_events(SequenceId(str(number)), 0, 1))
    assert len(log) == 2


def test_log_probabilities_are_resent_with_their_tokens() -> None:
    log = OutputLog()
    scores = [TokenLogprob(token, -float(token), 1) for token in (1, 2, 3)]
    log.record(StepEvents(tokens=(TokenEvent(A, 0, (1, 2), tuple(scores[:2]), (scores[0],)),)))
    log.record(StepEvents(tokens=(TokenEvent(A, 2, (3,), (scores[2],)),)))
    assert log.since([TrackedSequence(A, 1)]).tokens == (TokenEvent(A, 1, (2, 3), tuple(scores[1:]), (scores[0],)),)


def test_number_of_cached_tokens_is_resent_with_the_first_token() -> None:
    log = OutputLog()
    log.record(StepEvents(tokens=(TokenEvent(A, 0, (5,), cached_tokens=32),)))
    log.record(StepEvents(tokens=(TokenEvent(A, 1, (6,)),)))
    assert log.since([TrackedSequence(A, 0)]).tokens == (TokenEvent(A, 0, (5, 6), cached_tokens=32),)


def test_a_vector_is_sent_again() -> None:
    log, event = OutputLog(), TokenEvent(A, 0, (), cached_tokens=2, pooled=b"abcd")
    log.record(StepEvents(tokens=(event,)))
    assert log.since([TrackedSequence(A, 0)]).tokens == (event,)


def test_many_vectors_are_sent_in_several_messages() -> None:
    """The ends of sequences come with the last one."""
    vector = b"x" * (MAX_PART_BYTES // 3 - 512)
    tokens = tuple(TokenEvent(SequenceId(str(number)), 0, (), pooled=vector) for number in range(7))
    ended = step_events(A, 0, ended="stop").ended
    parts = list(in_parts(StepEvents(5, tokens, ended)))
    assert [len(part.tokens) for part in parts] == [3, 3, 1]
    assert sum((part.tokens for part in parts), ()) == tokens
    assert [part.ended for part in parts] == [(), (), ended] and parts[-1].step_id == 5
    plain = step_events(A, 0, 1, 2)
    assert [*in_parts(plain)] == [plain]


def test_what_is_resent_to_a_coordinator_fits_into_its_messages() -> None:
    """Log-probabilities of prompts, which a prefill worker keeps until the sequence has ended, and long outputs."""
    log, sequences = OutputLog(), [SequenceId(str(number)) for number in range(8)]
    scored = TokenLogprob(100_000, -1.5, 3, tuple(range(100_000, 100_020)), (-1.5,) * 20)
    for sequence in sequences:
        log.record(StepEvents(tokens=(TokenEvent(sequence, 0, (100_000,) * 500, prompt_logprobs=(scored,) * 14_000),)))
    sent = log.since([TrackedSequence(sequence, 0) for sequence in sequences])
    parts = [*in_parts(sent)]
    assert sum((part.tokens for part in parts), ()) == sent.tokens
    lengths = [len(to_message(part).SerializeToString()) for part in parts]
    assert max(lengths) <= MAX_MESSAGE_BYTES / 2 < sum(lengths)
    for part, length in zip(parts, lengths, strict=True):
        assert length <= sum(token.max_bytes for token in part.tokens)
