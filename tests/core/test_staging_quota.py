"""Who gets staging memory, and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import HandoffError, InvariantError
from baton.core.staging_quota import StagingQuota


def test_a_large_piece_is_not_overtaken() -> None:
    quota = StagingQuota(100)
    assert quota.take("a", 60) and not quota.take("large", 90) and not quota.take("small", 10)
    assert quota.give(60) == ("large", "small") and quota.taken_bytes == 100


def test_who_leaves_lets_the_next_pass() -> None:
    quota = StagingQuota(100)
    assert quota.take("a", 60) and not quota.take("large", 90) and not quota.take("small", 10)
    assert quota.leave("large") == ("small",) and quota.leave("large") == ()


def test_more_than_there_will_ever_be_is_refused_and_what_was_not_taken_is_not_given() -> None:
    quota = StagingQuota(100)
    with pytest.raises(HandoffError, match="101 bytes of KV do not fit into 100"):
        quota.take("a", 101)
    with pytest.raises(InvariantError):
        quota.give(1)


@given(st.integers(1, 50), st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=60))
def test_the_bound_holds_and_everybody_is_served_in_the_end(limit: int, requests: list[tuple[int, bool]]) -> None:
    quota, holding, sizes, served = StagingQuota(limit), [], {}, set()  # type: ignore[var-annotated]

    def granted(who: tuple[object, ...]) -> None:
        assert not served.intersection(who)
        served.update(who)
        holding.extend(who)
        assert quota.taken_bytes == sum(sizes[w] for w in holding) <= limit

    for index, (size, give_first) in enumerate(requests):
        if give_first and holding:
            granted(quota.give(sizes[holding.pop(0)]))
        if size <= limit:
            sizes[index] = size
            if quota.take(index, size):
                granted((index,))
    while holding:
        granted(quota.give(sizes[holding.pop(0)]))
    assert served == set(sizes) and quota.taken_bytes == 0
