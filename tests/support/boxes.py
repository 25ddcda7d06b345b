"""Finds the box of a failure in the output of a launcher."""

from __future__ import annotations

from collections.abc import Sequence

from launch.failure import _BOTTOM, _TOP


def find_box(lines: Sequence[str]) -> list[str]:
    """Returns the last complete box in a log; empty if there is none."""
    ends = [index for index, line in enumerate(lines) if line.startswith(_BOTTOM)]
    starts = [index for index, line in enumerate(lines) if line.startswith(_TOP) and ends and index < ends[-1]]
    return list(lines[starts[-1] : ends[-1] + 1]) if starts else []
