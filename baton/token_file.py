"""Where the cluster token comes from: a file that others cannot read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from baton.core.cluster_token import FLAG
from baton.core.errors import StartupError

MIN_CHARS = 16
_MAX_BYTES = 4096


def read_token(path: str) -> str:
    """The token in a file, without the white space around it; empty for no path.

    Raises:
        StartupError: the file is missing, open to everybody, or holds no token.
    """
    if not path:
        return ""
    try:
        with Path(path).expanduser().open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(_MAX_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        raise StartupError(f"{FLAG} {path}: {error.strerror or error}") from None
    if status.st_mode & (stat.S_IROTH | stat.S_IWOTH):
        raise StartupError(
            f"{FLAG} {path}: everybody may read or write it (mode {status.st_mode & 0o777:o}); chmod 600"
        )
    token = data.strip()
    if not MIN_CHARS <= len(token) <= _MAX_BYTES or not token.isascii() or b"\n" in token:
        raise StartupError(f"{FLAG} {path}: it must hold one line of at least {MIN_CHARS} ASCII characters")
    return token.decode()
