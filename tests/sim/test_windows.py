"""Safety under faults with a model whose layers all have a window: blocks behind it are given back, none too early."""

from __future__ import annotations

from collections import Counter

from sim.seeds import run_seed

SEEDS = range(1, 61)
WINDOW = 6
"""Positions; blocks have 4 or 8, prompts up to 34, outputs up to 40."""


def test_safety_with_a_window() -> None:
    failed: list[str] = []
    counts: Counter[str] = Counter()
    for seed in SEEDS:
        result = run_seed(seed, "safety", window=WINDOW)
        counts.update(result.counts)
        if result.error:
            failed.append(f"python -m sim --seed {seed} --mode safety --window {WINDOW} --trace: {result.error}")
    assert not failed, "\n".join(failed)
    assert counts["blocks given back"] > 100 and counts["kills"] and counts["rescheduled"], counts
