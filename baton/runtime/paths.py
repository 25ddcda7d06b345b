"""Paths that a user or an operator gives, and reading the files there."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

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


def open_regular(path: str | Path) -> BinaryIO:
    """Opens a regular file for reading. Other kinds are refused: a pipe would be waited for, a device has no end. What
    was opened is checked, so that no other file can take its place in between. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(fd, "rb")


def read_regular(path: str | Path) -> bytes:
    """Returns the content of a regular file. Raises OSError."""
    with open_regular(path) as file:
        return file.read()
