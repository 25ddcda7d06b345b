"""Liveness once all faults have ended: every request ends in bounded time, without a deadline (sim/seeds.py)."""

from __future__ import annotations

from tests.sim.seed_runs import check_seeds, chunks


@chunks("liveness")
def test_liveness(first: int) -> None:
    check_seeds(first, "liveness")
