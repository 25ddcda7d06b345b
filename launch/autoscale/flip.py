"""Where the number of workers is fixed: which one changes its role. Pure."""

from __future__ import annotations

from typing import NamedTuple

from baton.core.commands import Role
from launch.autoscale.law import ClusterSample
from sim.scale.planner import Size

FLIP_WINDOW_S = 10.0
"""For which a rate counts: a needless flip is undone in a second, so it may follow the load sooner than a start. On a
mix that turns every 40 s, 5 s and 30 s give 5 % less goodput (benchmarks/results/flip.md)."""


class Flip(NamedTuple):
    worker: str
    role: Role


def split(total: int, need: Size) -> Size:
    """Divides `total` workers (at least 2) between the roles so that the one that lacks more lacks least; `need` is how
    many each should have. Without a need for either, half each."""
    prefill, decode = max(need.prefill, 1), max(need.decode, 1)
    best = min(range(1, total), key=lambda p: (max(prefill / p, decode / (total - p)), abs(2 * p - total), p))
    return Size(best, total - best)


def next_flip(sample: ClusterSample, need: Size, total: int) -> Flip | None:
    """Returns the worker that should change its role, and the role; None if the split is right, or while not all of
    `total` workers are ready: one changes at a time. The one with the fewest sequences changes, the last by name among
    equals."""
    if len(sample.workers) < max(total, 2):
        return None
    target = split(total, need)
    role: Role
    if target.prefill > sample.ready("prefill"):
        role = "prefill"
    elif target.decode > sample.ready("decode"):
        role = "decode"
    else:
        return None
    candidates = sorted((w for w in sample.workers if w.role != role), key=lambda w: w.name, reverse=True)
    return Flip(min(candidates, key=lambda w: w.rows).name, role) if len(candidates) > 1 else None
