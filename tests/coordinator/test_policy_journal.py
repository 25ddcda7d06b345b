"""The journal: each token once, in order, whatever the streams do."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import InvariantError, ProtocolError
from baton.core.events import TokenEvent
from baton.core.request import GenerateRequest, SamplingParams, TokenLogprob
from coordinator.policy.choice import MAX_AHEAD_TOKENS, Choice, Notify
from tests.coordinator.test_policy_requests import Drive
from tests.support.builders import EOS, make_request


def make_choice(request: GenerateRequest) -> Choice:
    return Choice(request, 1, 0.0, 100.0)


def accept(choice: Choice, first: int, *tokens: int, **more: object) -> str:
    return choice.accept(TokenEvent(choice.sequence, first, tokens, **more))  # type: ignore[arg-type]


Message = tuple[int, int, tuple[int, ...]]


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[list[int], str, list[Message]]:
    """Draws the output of a choice, its end, and messages with all of it: split, repeated, shuffled, some stale."""
    ends_with_eos = draw(st.booleans())
    tokens = draw(st.lists(st.integers(1, 50), min_size=0 if ends_with_eos else 1, max_size=12))
    tokens += [EOS] * ends_with_eos
    cuts = sorted({0, len(tokens), *draw(st.lists(st.integers(0, len(tokens)), max_size=4))})
    parts: list[Message] = [(2, a, tuple(tokens[a:b])) for a, b in pairwise(cuts)]
    for _ in range(draw(st.integers(0, 4))):  # overlapping repeats
        a = draw(st.integers(0, len(tokens) - 1))
        parts.append((2, a, tuple(tokens[a : draw(st.integers(a + 1, len(tokens)))])))
    stale = st.tuples(st.sampled_from([1, 3]), st.integers(0, 12), st.lists(st.integers(51, 99)).map(tuple))
    parts += draw(st.lists(stale, max_size=3))
    return tokens, "stop" if ends_with_eos else "length", draw(st.permutations(parts))


@given(deliveries())
def test_any_delivery_gives_every_token_once_in_order_and_one_end(case: tuple[list[int], str, list[Message]]) -> None:
    tokens, end, messages = case
    d = Drive("p0", "d0")
    d.submit("earlier")
    choice = d.submit(max_tokens=len(tokens) + 1, eos_token_ids=(EOS,))
    sequence = choice.sequence
    assert sequence.attempt == 2
    d.tokens("p0", sequence, 0, 5)
    for attempt, first, part in messages:
        known, finish, stale = list(choice.tokens), choice.finish, d.requests.stale_events
        d.take(Notify)
        d.tokens("d0", sequence._replace(attempt=attempt), first + 1, *part)
        assert choice.tokens[: len(known)] == known == [5, *tokens][: len(known)]
        assert finish in (None, choice.finish)
        if d.take(Notify):
            assert len(choice.tokens) > len(known)
        else:
            assert (choice.tokens, choice.finish) == (known, finish)
            assert d.requests.stale_events > stale or attempt == 2
    assert (choice.tokens, choice.finish) == ([5, *tokens], end)


def test_conflicting_repeat_of_a_token_raises_protocol_error() -> None:
    choice = make_choice(make_request())
    accept(choice, 0, 5, 6)
    with pytest.raises(ProtocolError, match="output 1 was 6 and is 7"):
        accept(choice, 1, 7)


def test_conflicting_repeat_of_a_token_after_a_gap_raises_protocol_error() -> None:
    choice = make_choice(make_request())
    assert accept(choice, 3, 5) == "ahead"
    with pytest.raises(ProtocolError):
        accept(choice, 3, 6)


def test_negative_index_is_refused_and_adds_no_tokens() -> None:
    choice = make_choice(make_request())
    accept(choice, 0, 5, 6)
    with pytest.raises(ProtocolError, match="index -1"):
        accept(choice, -1, 6)
    assert choice.tokens == [5, 6]


def test_tokens_after_the_end_are_dropped() -> None:
    choice = make_choice(make_request(max_tokens=3))
    assert accept(choice, 0, 5, EOS, 7, 8) == "appended"
    assert (choice.tokens, choice.finish) == ([5, EOS], "stop")
    for index in range(2 * MAX_AHEAD_TOKENS):
        assert accept(choice, 2 + index, 9) == "repeat"
    assert choice.tokens == [5, EOS]


def test_token_after_a_gaps_are_bounded() -> None:
    with pytest.raises(ProtocolError, match="await index 0"):
        accept(make_choice(make_request(max_tokens=1 << 20)), 1, *range(1, MAX_AHEAD_TOKENS + 2))


def test_new_attempt_drops_token_after_a_gaps_and_keeps_journaled_tokens() -> None:
    choice = make_choice(make_request())
    accept(choice, 0, 5)
    assert accept(choice, 2, 7) == "ahead"
    choice.begin_attempt(2)
    assert choice.sequence.attempt == 2
    assert accept(choice, 0, 5, 6) == "appended"
    assert choice.tokens == [5, 6]
    with pytest.raises(InvariantError):
        choice.begin_attempt(2)


def test_output_of_earlier_attempts_counts() -> None:
    choice = make_choice(make_request(max_tokens=3, output=(5, 6), attempt=2))
    assert choice.next_index == 2
    assert accept(choice, 1, 6, 7) == "appended"
    assert (choice.tokens, choice.finish) == ([5, 6, 7], "length")


def test_rescheduled_request_continues_at_the_next_index() -> None:
    choice = make_choice(make_request(max_tokens=4, eos=()))
    accept(choice, 0, 5, 6)
    accept(choice, 3, 8)
    choice.resume(4, 1.0)
    assert (choice.request.output, choice.attempt, choice.next_index) == ((5, 6), 4, 2)
    assert accept(choice, 3, 9) == "ahead"  # the old attempt's token at index 3 does not count
    assert accept(choice, 2, 7) == "appended"
    assert (choice.tokens, choice.finish) == ([5, 6, 7, 9], "length")
    with pytest.raises(InvariantError):
        choice.resume(4, 1.0)


def test_log_probabilities_are_kept_with_their_tokens_in_any_order() -> None:
    request = replace(make_request(prompt=(1, 2), max_tokens=8), sampling=SamplingParams(logprobs=0, prompt_logprobs=0))
    choice = make_choice(request)
    scores = [TokenLogprob(token, -float(token), 1) for token in (5, 6, 7)]
    assert accept(choice, 1, 6, 7, logprobs=tuple(scores[1:])) == "ahead"
    assert choice.prompt_logprobs is None
    accept(choice, 0, 5, logprobs=(scores[0],), prompt_logprobs=(TokenLogprob(2, -2.0, 1),))
    assert choice.tokens == [5, 6, 7] and choice.logprobs == scores
    assert choice.prompt_logprobs == (TokenLogprob(2, -2.0, 1),)
    accept(choice, 1, 6, 7, logprobs=tuple(scores[1:]))
    assert choice.logprobs == scores


def test_tokens_without_the_requested_log_probabilities_are_refused() -> None:
    asked = make_choice(replace(make_request(), sampling=SamplingParams(logprobs=0)))
    with pytest.raises(ProtocolError, match="0 log-probabilities received with 1 tokens"):
        accept(asked, 0, 5)
    with pytest.raises(ProtocolError, match="1 log-probabilities"):
        accept(make_choice(make_request()), 0, 5, logprobs=(TokenLogprob(5, -1.0, 1),))
