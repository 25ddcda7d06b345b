"""Paths that a user or an operator gives."""

from __future__ import annotations

from pathlib import Path

from baton.core.errors import StartupError


def expanded(path: str | Path) -> Path:
    """Returns a path with the home directory for a leading `~` or `~USER`. Raises StartupError, which names the path,
    if there is none."""
    if "\0" in str(path):
        raise StartupError(f"{str(path)!r:.200}: a path has no NUL")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise StartupError(f"{path}: {str(path).partition('/')[0]} is no user with a home directory here") from None
