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
    cores = _parse(text)
    if isinstance(cores, str):
        raise StartupError(f"{where} {cores}")
    return cores


def cores_error(text: str) -> str | None:
    """Returns why `parse_cores` would refuse a text, in one line that follows its option's name; None if it parses."""
    cores = _parse(text)
    return cores if isinstance(cores, str) else None


def _parse(text: str) -> tuple[int, ...] | str:
    """Returns the cores, or what is wrong with the text."""
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(first + last) > 8:
            return f"must look like 0-3,8, not {text!r:.60}"
        cores += range(int(first), int(last or first) + 1)
    if not cores or len(set(cores)) != len(cores):
        return f"names no core, or a core twice: {text!r:.60}"
    return tuple(cores)
