"""Safety under faults without an end: right tokens, one end for each request, nothing left (sim/seeds.py)."""

from __future__ import annotations

from tests.sim.seed_runs import check_seeds, chunks


@chunks("safety")
def test_safety(first: int) -> None:
    check_seeds(first, "safety")
