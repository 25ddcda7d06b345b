"""When a sequence ends, what its tokens are, and which moves it may make."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import InvariantError
from baton.core.request import SequenceId, finish_reason
from baton.core.sequence import LEGAL_MOVES, Sequence, State
from tests.support.builders import EOS, make_request

tokens = st.lists(st.integers(0, 50), max_size=6)


@pytest.mark.parametrize(
    ("output_len", "last", "reason"),
    [
        (1, 5, None),
        (7, 5, None),
        (8, 5, "length"),
        (9, 5, "length"),
        (1, EOS, "stop"),
        (8, EOS, "stop"),
        (3, 2, "stop"),
    ],
)
def test_sequence_stops_at_any_eos_and_at_its_length(output_len: int, last: int, reason: str | None) -> None:
    assert finish_reason(make_request(max_tokens=8, eos=(EOS, 2)), output_len, last) == reason


def test_eos_is_an_ordinary_token_when_it_is_ignored() -> None:
    assert finish_reason(make_request(eos=()), 1, EOS) is None


def test_output_of_earlier_attempts_counts_towards_the_length() -> None:
    sequence = Sequence(make_request(max_tokens=3, output=(5, 6)), State.RUNNING, 0.0)
    assert sequence.append(7) == "length"
    assert sequence.output == [5, 6, 7]


@given(prompt=tokens, output=tokens, cut=st.tuples(st.integers(0, 12), st.integers(0, 12)))
def test_tokens_run_on_from_prompt_to_output(prompt: list[int], output: list[int], cut: tuple[int, int]) -> None:
    sequence = Sequence(make_request(prompt=prompt, output=output), State.WAITING, 0.0)
    start, end = sorted(cut)
    assert sequence.tokens(start, end) == tuple((prompt + output)[start:end])
    assert sequence.num_tokens == len(prompt + output)


def test_sequence_does_not_write_into_its_request() -> None:
    request = make_request(output=(5,))
    Sequence(request, State.RUNNING, 0.0).append(6)
    assert request.output == (5,)


@pytest.mark.parametrize(("before", "after"), list(itertools.product(State, State)))
def test_only_the_moves_in_the_table_are_made(before: State, after: State) -> None:
    sequence = Sequence(make_request(), before, 0.0)
    if after in LEGAL_MOVES[before]:
        sequence.move(after)
        assert sequence.state is after
    else:
        with pytest.raises(InvariantError, match=f"from {before.value} to {after.value}"):
            sequence.move(after)
        assert sequence.state is before


def test_every_state_can_end_and_the_two_lives_never_mix() -> None:
    assert set(LEGAL_MOVES) == set(State)
    assert all(State.FINISHED in moves for state, moves in LEGAL_MOVES.items() if state is not State.FINISHED)
    assert not LEGAL_MOVES[State.FINISHED]
    prefill, decode = {State.WAITING, State.PREFILLING, State.PARKED}, {State.RECEIVING, State.READY, State.RUNNING}
    for mine, others in ((prefill, decode), (decode, prefill)):
        assert not set().union(*(LEGAL_MOVES[state] for state in mine)) & others


def test_every_try_of_every_choice_has_its_own_name() -> None:
    names = {make_request("r", choice=c, attempt=a).sequence_id for c in (0, 1) for a in (1, 2)}
    assert len(names) == 4
    assert str(SequenceId("r", 1, 2)) == "r/1#2"
