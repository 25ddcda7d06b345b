"""Runs ranges of seeds and checks that they did what they are for."""

from __future__ import annotations

from collections import Counter

import pytest

from sim.faults import KINDS
from sim.seeds import Mode, run_seed

CHUNK = 100
SHORT, LONG = 1000, 10_000
CHUNKS = [
    pytest.param(first, marks=[] if first <= SHORT else [pytest.mark.long]) for first in range(1, LONG + 1, CHUNK)
]
HAPPENS = (
    "messages lost",
    "streams broken",
    "dials failed",
    "rescheduled",
    "reassigned",
    "stale events",
    "preemptions",
    "flip",
    "flips done",
)


def check_seeds(first: int, mode: Mode) -> None:
    """Runs CHUNK seeds; none may fail. Every kind of fault must occur, and what follows from them."""
    failed: list[str] = []
    counts: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        result = run_seed(seed, mode)
        counts.update(result.counts)
        ended.update(result.ended)
        if result.error:
            failed.append(f"python -m sim --seed {seed} --mode {mode} --trace: {result.error}")
    assert not failed, "\n".join(failed)
    missing = [name for name in (*KINDS, *HAPPENS) if not counts[name]]
    assert not missing, f"never happened: {missing}"
    assert ended["length"] + ended["stop"] > 3 * CHUNK and ended["runs"] == 0, ended
