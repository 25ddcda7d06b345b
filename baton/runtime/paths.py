"""Paths that a user or an operator gives, and reading the files there."""

from __future__ import annotations

import errno
import os
import select
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
PIPE_S = 30.0
"""For a pipe's writer to write something, or to end."""


def read_text(path: str | Path) -> str:
    """Returns the text, in UTF-8, of a file that an operator names, which may be a pipe. More than MAX_TEXT_BYTES are
    not read: a device has no end.

    Raises:
        OSError: it cannot be read, is longer, or is a pipe whose writer is not there or falls silent.
        UnicodeDecodeError: it is not UTF-8.
    """
    data = bytearray()
    with open_written(path) as file:
        while part := os.read(file.fileno(), 1 << 20):
            data += part
            if len(data) > MAX_TEXT_BYTES:
                raise OSError(errno.EFBIG, f"has more than {MAX_TEXT_BYTES >> 20} MiB", str(path))
            _await_writer(file.fileno(), path)
    return data.decode("utf-8")


def open_written(path: str | Path) -> BinaryIO:
    """Opens a file for reading; a pipe once something has been written to it, or its writer has ended. Raises OSError,
    also if that takes longer than PIPE_S."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _await_writer(fd, path)
        os.set_blocking(fd, True)
        return os.fdopen(fd, "rb")
    except OSError:
        os.close(fd)
        raise


def _await_writer(fd: int, path: str | Path) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if not poll.poll(PIPE_S * 1000):
        raise OSError(errno.ETIMEDOUT, f"nothing was written to it for {PIPE_S:g} s", str(path))


def write_text(path: str | Path, text: str) -> None:
    """Writes a file that an operator names, in UTF-8. Raises OSError, also for a named pipe that nobody reads: opening
    it would wait for a reader."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "nothing reads this pipe", str(path)) from None
        raise
    os.set_blocking(fd, True)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)


def read_regular(path: str | Path) -> bytes:
    """Returns the content of a regular file. Raises OSError."""
    with open_regular(path) as file:
        return file.read()
