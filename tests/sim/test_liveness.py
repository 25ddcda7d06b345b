"""Liveness once all faults have ended: every request ends in bounded time, without a deadline (sim/seeds.py)."""

from __future__ import annotations

import pytest

from tests.sim.seed_runs import CHUNKS, check_seeds


@pytest.mark.parametrize("first", CHUNKS)
def test_liveness(first: int) -> None:
    check_seeds(first, "liveness")
