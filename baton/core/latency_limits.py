"""The latency limits by which the coordinator counts requests, so that goodput can be computed afterwards for
any of them. They are usual promises to users, in seconds: to the first token, and for each further one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from baton.core.errors import InvalidRequest

TTFT_S = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
TPOT_S = (0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)


def upper_bound(limits: Sequence[float], seconds: float) -> str:
    """Returns the lowest of `limits` that is not below `seconds`, as a label; `+Inf` above all."""
    index = bisect_left(limits, seconds)
    return f"{limits[index]:g}" if index < len(limits) else "+Inf"


def counted_limit(limits: Sequence[float], seconds: float) -> float:
    """Returns the highest of `limits` that is not above `seconds`; 0.0 for 0: no limit.

    Raises:
        InvalidRequest: `seconds` is below all of them.
    """
    index = bisect_right(limits, seconds)
    if seconds and not index:
        raise InvalidRequest(f"a limit of {seconds:g} s is below {limits[0]:g} s, the lowest that is counted")
    return limits[index - 1] if index else 0.0
