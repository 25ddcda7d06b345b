"""How long streams are silent when the pool is too small, in virtual time; and which sequence is boosted."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.sequence import Finished, Sequence, State
from decode.anti_starvation import (
    BOOST_TOKENS,
    RECOMPUTE_SHARE,
    THROTTLED_INTERVAL_S,
    TOKEN_GAP_S,
    AntiStarvation,
    num_unthrottled,
    throttled,
)
from decode.speculation.step_cost import StepModel
from tests.support.builders import make_request
from tests.support.decode_pool import COSTS, FAST, Stream, drive, half_pool


@pytest.mark.parametrize(("count", "most_s", "most_recomputed"), [(8, 5.6, 1_600), (16, 6.7, 2_600), (32, 9.9, 3_300)])
def test_no_stream_is_silent_for_two_seconds_in_half_the_pool(count: int, most_s: float, most_recomputed: int) -> None:
    streams = [Stream()] * count
    found = drive(streams, half_pool(streams))
    assert set(found.tokens.values()) == {256}
    assert found.preemptions > 0 and 0 < found.recomputed < most_recomputed
    assert found.longest_silence_s < 2.0
    assert found.end_s < most_s


@pytest.mark.parametrize("count", [8, 16, 32, 64])
def test_no_stream_is_silent_for_two_seconds_with_fast_steps(count: int) -> None:
    streams = [Stream()] * count
    found = drive(streams, half_pool(streams), costs=FAST)
    assert found.preemptions > 0 and found.longest_silence_s < 2.0
    assert found.recompute_share < 0.2


@pytest.mark.parametrize("count", [8, 16, 32])
@pytest.mark.parametrize("seed", range(3))
def test_no_stream_is_silent_for_two_seconds_with_random_output_lengths(count: int, seed: int) -> None:
    generator = random.Random(seed)
    streams = [Stream(64, generator.randint(32, 480)) for _ in range(count)]
    found = drive(streams, half_pool(streams))
    assert found.preemptions > 0 and found.longest_silence_s < 2.0


def test_long_outputs_lengthen_silences_but_not_the_recompute_share() -> None:
    """Sixteen streams of a thousand tokens: for each waiting stream to emit a token every 2 s, some 7,000 tokens would
    have to be recomputed at 0.38 ms each in that time, which is more than 2 s."""
    streams = [Stream(64, 1000)] * 16
    found = drive(streams, half_pool(streams))
    assert 2.0 < found.longest_silence_s < 7.0
    assert found.recompute_share < 0.3


def test_first_sequence_never_waits_for_blocks() -> None:
    streams = [Stream()] * 16
    found = drive(streams, half_pool(streams))
    ended = list(found.ended_at)
    assert found.throttled_steps > 0, "some must have rested"
    assert ended.index("s0") < 4 and found.silence_s["s0"] < found.longest_silence_s


def test_higher_priority_is_not_throttled_or_starved_while_a_lower_one_holds_blocks() -> None:
    streams = [Stream(priority=index % 2) for index in range(16)]
    found = drive(streams, half_pool(streams))
    assert found.preemptions > 0 and found.throttled_steps > 0
    high = [found.silence_s[f"s{index}"] for index in range(0, 16, 2)]
    assert max(high) < 2 * THROTTLED_INTERVAL_S
    assert found.longest_silence_s < 2.5


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 300), st.integers(2, 400)), min_size=2, max_size=12),
    part=st.floats(0.2, 0.9),
    costs=st.sampled_from([COSTS, FAST, ((1, 0.01), (512, 0.012))]),
)
def test_all_streams_end_and_wait_at_most_one_round_of_boosts_in_any_pool(
    shapes: list[tuple[int, int]], part: float, costs: tuple[tuple[int, float], ...]
) -> None:
    streams = [Stream(prompt, output) for prompt, output in shapes]
    prompts = sum(Stream(s.prompt, 0).blocks for s in streams) + len(streams)  # fewer would not admit all
    blocks = max(round(part * sum(s.blocks for s in streams)), max(s.blocks for s in streams), prompts)
    found = drive(streams, blocks, costs=costs)
    token_s = StepModel(costs, budget_s=0.05).recompute_token_s()
    round_s = sum((s.prompt + s.output) * token_s / RECOMPUTE_SHARE for s in streams)
    assert list(found.tokens.values()).count(0) == 0 and len(found.ended_at) == len(streams)
    assert found.longest_silence_s < TOKEN_GAP_S + THROTTLED_INTERVAL_S + 0.7 * round_s


def waiting(name: str, tokens: int, last_token_at: float, priority: int = 0) -> Sequence:
    request = make_request(name, tokens, 100, priority=priority)
    return Sequence(request, State.PREEMPTED, 0.0, int(name[1:]), last_token_at=last_token_at)


def boosted(sequences: list[Sequence]) -> list[str]:
    return [sequence.id.request_id for sequence in sequences if sequence.boosted]


def test_boost_starts_as_late_as_the_silence_limit_allows() -> None:
    """At 10 ms a token and a share of 0.3, a boost of a sequence of 9 tokens takes 0.3 s."""
    turns, sequences = AntiStarvation(), [waiting("s1", 9, 0.1), waiting("s2", 9, 0.0), waiting("s3", 9, 0.05)]
    turns.update(sequences, 0.6, 0.01)
    assert boosted(sequences) == []
    turns.update(sequences, 0.71, 0.01)
    assert boosted(sequences) == ["s2"], "who has been silent longest; the third would be heard at 1.5 s"
    turns.update(sequences, 5.0, 0.01)
    assert boosted(sequences) == ["s2"], "one at a time"


def test_boost_ends_after_some_tokens_and_the_next_starts_when_the_share_allows() -> None:
    turns, sequences = AntiStarvation(), [waiting("s1", 9, 0.0), waiting("s2", 9, 0.1)]
    turns.update(sequences, 2.0, 0.01)
    first = sequences[0]
    first.output.extend([7] * (BOOST_TOKENS - 1))
    turns.update(sequences[1:], 2.1, 0.01)
    assert boosted(sequences) == ["s1"]
    first.output.append(7)
    turns.update(sequences[1:], 2.2, 0.01)
    assert boosted(sequences) == []
    turns.update(sequences[1:], 2.31, 0.01)
    assert boosted(sequences) == ["s2"]


def test_ended_sequence_releases_its_boost_and_each_priority_has_its_own() -> None:
    turns, sequences = (
        AntiStarvation(),
        [waiting("s1", 9, 0.0, priority=1), waiting("s2", 9, 1.9), waiting("s3", 9, 1.9)],
    )
    turns.update(sequences, 2.0, 0.01)
    assert boosted(sequences) == ["s1"]
    turns.update(sequences, 4.0, 0.01)
    assert boosted(sequences) == ["s1", "s2"]
    sequences[1].on(Finished())
    turns.update([sequences[0], sequences[2]], 6.0, 0.01)
    assert boosted(sequences) == ["s1", "s3"]


def test_unthrottled_count_follows_the_recompute_cost_but_is_at_least_a_quarter() -> None:
    sequences = [waiting(f"s{index}", 100, 0.0) for index in range(32)]
    assert num_unthrottled(sequences, 1e-3) == 8
    assert num_unthrottled(sequences, RECOMPUTE_SHARE * TOKEN_GAP_S / 100 / 20.5) == 20
    assert num_unthrottled(sequences[:1], 1.0) == 1


def test_sequence_with_a_recent_token_is_throttled_unless_boosted_or_of_higher_priority() -> None:
    sequences = [waiting(f"s{index}", 8, 0.0, priority=int(index > 1)) for index in range(6)]
    for sequence in sequences:
        sequence.num_computed = 7
    sequences[3].boosted = True
    sequences[4].num_computed = 3
    running = sorted(sequences, key=lambda sequence: sequence.rank)
    assert {found.request_id for found in throttled(running, 1, THROTTLED_INTERVAL_S / 2)} == {"s2", "s5"}
    assert throttled(running, 1, THROTTLED_INTERVAL_S) == set() and throttled(running, 6, 0.0) == set()
