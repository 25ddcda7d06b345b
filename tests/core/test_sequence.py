"""When a sequence ends, what its tokens are, and which state transitions are legal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.events import TokenEvent
from baton.core.request import SamplingParams, SequenceId, TokenLogprob, finish_reason
from baton.core.sequence import TABLE, Sequence, State
from baton.core.step import StepPlan
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
def test_tokens_are_the_prompt_followed_by_the_output(
    prompt: list[int], output: list[int], cut: tuple[int, int]
) -> None:
    sequence = Sequence(make_request(prompt=prompt, output=output), State.WAITING, 0.0)
    start, end = sorted(cut)
    assert sequence.tokens(start, end) == tuple((prompt + output)[start:end])
    assert sequence.num_tokens == len(prompt + output)


def test_sequence_does_not_write_into_its_request() -> None:
    request = make_request(output=(5,))
    Sequence(request, State.RUNNING, 0.0).append(6)
    assert request.output == (5,)


def test_every_state_can_finish_and_prefill_and_decode_states_never_mix() -> None:
    after = {state: {s for (before, _), t in TABLE.items() if before is state for s in t.states} for state in State}
    assert all(State.FINISHED in states for state, states in after.items() if state is not State.FINISHED)
    assert not after[State.FINISHED]
    assert State.WAITING not in set().union(*after.values()), "it is the first state, in both tiers"
    prefill = {State.PREFILLING, State.PREFILLED}
    decode = {State.RECEIVING, State.READY, State.RUNNING, State.PREEMPTED}
    assert prefill | decode | {State.WAITING, State.FINISHED} == set(State)
    for mine, others in ((prefill, decode), (decode, prefill)):
        assert not set().union(*(after[state] for state in mine)) & others


def test_every_attempt_of_every_choice_has_its_own_sequence_id() -> None:
    names = {make_request("r", choice=c, attempt=a).sequence_id for c in (0, 1) for a in (1, 2)}
    assert len(names) == 4
    assert str(SequenceId("r", 1, 2)) == "r/1#2"


def make_sequence(**params: object) -> Sequence:
    request = replace(make_request(prompt=(1, 2, 3), eos=(EOS,)), sampling=SamplingParams(**params))  # type: ignore[arg-type]
    return Sequence(request, State.RUNNING, 0.0, block_ids=(4, 5))


def test_a_row_carries_its_tokens_blocks_and_sampling_counts() -> None:
    sequence = make_sequence(temperature=0.5)
    sequence.append(7)
    row = sequence.row(3, 4, num_sampled=3, drafts=(8, 9))
    assert (row.tokens, row.num_sampled, row.output_index, row.block_ids) == ((7, 8, 9), 3, 1, (4, 5))
    assert row.history is None and row.scored == ()


@pytest.mark.parametrize("params", [{"presence_penalty": 1.0}, {"repetition_penalty": 1.1}, {"bad_words": ((1,),)}])
def test_a_row_carries_the_tokens_before_it_where_sampling_depends_on_them(params: dict[str, object]) -> None:
    sequence = make_sequence(**params)
    sequence.append(7)
    row = sequence.row(3, 4, num_sampled=1)
    assert row.history is not None and row.history.output == (7,)
    assert row.history.prompt is sequence.request.prompt
    assert sequence.row(0, 3, num_sampled=0).history is None
    assert StepPlan(1, (row,)).to_compute().rows[0].history is None


def test_end_token_ids_are_included_only_until_min_tokens_is_reached() -> None:
    sequence = make_sequence(min_tokens=1, stop_token_ids=(9,))
    first = sequence.row(2, 3, num_sampled=1).history
    assert first is not None and first.end_token_ids == (EOS, 9)
    sequence.append(7)
    assert sequence.row(3, 4, num_sampled=1).history is None


def test_a_chunk_is_scored_against_the_prompt_tokens_that_follow_it() -> None:
    sequence = make_sequence(prompt_logprobs=0)
    assert sequence.row(0, 2, num_sampled=0, score=True).scored == (2, 3)
    assert sequence.row(2, 3, num_sampled=1, score=True).scored == ()
    assert sequence.row(0, 2, num_sampled=0).scored == ()


def test_a_stop_token_ends_like_eos_but_not_before_min_tokens() -> None:
    request = replace(make_request(), sampling=SamplingParams(stop_token_ids=(9,), min_tokens=2))
    assert [finish_reason(request, n, 9) for n in (1, 2, 3)] == [None, None, "stop"]
    assert [finish_reason(request, n, EOS) for n in (2, 3)] == [None, "stop"]


def test_log_probabilities_are_reported_with_their_tokens() -> None:
    sequence = make_sequence(logprobs=0)
    first, second = TokenLogprob(7, -0.5, 1), TokenLogprob(8, -1.0, 2)
    sequence.append(7, first)
    sequence.append(8, second)
    sequence.next_emit_index = 1
    assert sequence.next_tokens_event() == TokenEvent(sequence.id, 1, (8,), (second,))
    assert sequence.next_emit_index == 2
