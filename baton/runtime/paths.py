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


MAX_TEXT_BYTES = 64 << 20
"""Of a file of settings or results."""


def read_text(path: str | Path) -> str:
    """Returns the text, in UTF-8, of a file that an operator names, which may be a pipe. More than MAX_TEXT_BYTES are
    not read: a device has no end.

    Raises:
        OSError: it cannot be read, or is longer.
        UnicodeDecodeError: it is not UTF-8.
    """
    with open(path, "rb") as file:
        data = file.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise OSError(errno.EFBIG, f"has more than {MAX_TEXT_BYTES >> 20} MiB", str(path))
    return data.decode("utf-8")


def read_regular(path: str | Path) -> bytes:
    """Returns the content of a regular file. Raises OSError."""
    with open_regular(path) as file:
        return file.read()
