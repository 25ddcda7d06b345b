"""Safety under faults without an end: right tokens, one end for each request, nothing left (sim/seeds.py)."""

from __future__ import annotations

import pytest

from tests.sim.seed_runs import CHUNKS, check_seeds


@pytest.mark.parametrize("first", CHUNKS)
def test_safety(first: int) -> None:
    check_seeds(first, "safety")
