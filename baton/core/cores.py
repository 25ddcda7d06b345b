"""Numbers of processor cores as text, such as `0-3,8`. Pure."""

from __future__ import annotations

from itertools import groupby

from baton.core.errors import StartupError


def ranges(cores: tuple[int, ...]) -> str:
    """Formats cores as `0-3,8`; empty without cores."""
    parts: list[str] = []
    for _, run in groupby(enumerate(cores), lambda placed: placed[1] - placed[0]):  # constant for consecutive cores
        in_a_row = [core for _, core in run]
        parts.append(str(in_a_row[0]) if len(in_a_row) == 1 else f"{in_a_row[0]}-{in_a_row[-1]}")
    return ",".join(parts)


def parse_cores(text: str, where: str) -> tuple[int, ...]:
    """Parses `0-3,8`.

    Raises:
        StartupError: the text has another form; `where` names its origin.
    """
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(first + last) > 8:
            raise StartupError(f"{where} must look like 0-3,8, not {text!r:.60}")
        cores += range(int(first), int(last or first) + 1)
    if not cores or len(set(cores)) != len(cores):
        raise StartupError(f"{where}: {text!r:.60} names no core, or a core twice")
    return tuple(cores)
