"""Where the number of workers is fixed: which one changes its role. Pure.

What counts is how many workers each role keeps busy now (`Sizing.busy`), not the sizes that the law would choose: those
are rounded up for waits that more workers would shorten, and held for some time after the load has fallen, which costs
the other role a worker here. A flip is undone in a second, so it follows the present."""

from __future__ import annotations

import math
from typing import NamedTuple

from baton.core.commands import Role
from launch.autoscale.law import TOLERANCE, ClusterSample

FLIP_WINDOW_S = 1.0
"""For which a rate counts at least, the time between two decisions: so it is that of the last MIN_REQUESTS."""


class Flip(NamedTuple):
    worker: str
    role: Role


def lack(prefill: int, decode: int, busy: tuple[float, float]) -> float:
    """Returns how many times as much the role that lacks more has to do as it can, with so many workers each."""
    return max(busy[0] / prefill, busy[1] / decode) if prefill and decode else math.inf


def split(prefill: int, decode: int, busy: tuple[float, float]) -> int:
    """Returns how many of so many workers (at least 2) should be prefill workers: as many as now while each role can do
    what it has to, or if no other number leaves the role that lacks more with less, by TOLERANCE."""
    total, now = prefill + decode, lack(prefill, decode, busy)
    best = min(range(1, total), key=lambda p: (lack(p, total - p, busy), abs(p - prefill)))
    return best if now > 1.0 and lack(best, total - best, busy) < now * (1 - TOLERANCE) else prefill


def next_flip(sample: ClusterSample, busy: tuple[float, float], total: int) -> Flip | None:
    """Returns the worker that should change its role, and the role; None if the split is right, or while not all of
    `total` workers are ready: one changes at a time. The one with the fewest sequences changes, the last by name among
    equals."""
    if len(sample.workers) < max(total, 2):
        return None
    prefill = sample.ready("prefill")
    target = split(prefill, sample.ready("decode"), busy)
    if target == prefill:
        return None
    role: Role = "prefill" if target > prefill else "decode"
    candidates = sorted((w for w in sample.workers if w.role != role), key=lambda w: w.name, reverse=True)
    return Flip(min(candidates, key=lambda w: w.rows).name, role)
