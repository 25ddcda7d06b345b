"""Runs ranges of seeds and checks that they did what they are for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from sim.faults import KINDS
from sim.seeds import Mode, run_seed

CHUNK = 100
LONG = 10_000
SHORT: dict[Mode, range] = {"safety": range(501, 1001), "liveness": range(1, 501)}
"""The seeds of `make test`, 1,000 in all: with both of those below 1,001 that have shown a bug of the product."""
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


def chunks(mode: Mode) -> Any:
    """The decorator of a test of all seeds, by the first of each CHUNK."""
    firsts = range(1, LONG + 1, CHUNK)
    marks = {first: [] if first in SHORT[mode] else [pytest.mark.long] for first in firsts}
    return pytest.mark.parametrize("first", [pytest.param(first, marks=marks[first]) for first in firsts])


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
