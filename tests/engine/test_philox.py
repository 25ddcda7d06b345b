"""Philox-4x32-10 against the known answers that its authors publish with Random123."""

from __future__ import annotations

import numpy as np
import pytest

from baton.engine.sampler import philox4x32

KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_matches_the_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], answer: tuple[int, ...]
) -> None:
    words = philox4x32((np.array([counter[0]] * 3, dtype=np.uint64), *counter[1:]), key)
    assert words.tolist() == [list(answer)] * 3


def test_a_counter_does_not_depend_on_its_neighbours() -> None:
    counters = np.arange(1000, dtype=np.uint64)
    together = philox4x32((counters, 5, 6, 7), (8, 9))
    for some in (counters[17:18], counters[::-7], counters[300:423]):
        assert np.array_equal(philox4x32((some, 5, 6, 7), (8, 9)), together[some.astype(np.int64)])
