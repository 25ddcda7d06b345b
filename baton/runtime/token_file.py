"""Reads secrets from files that other users cannot access: the cluster token, API keys, TLS keys."""

from __future__ import annotations

import os
import stat

from baton.core.errors import StartupError
from baton.runtime.cluster_token import FLAG
from baton.runtime.paths import expanded, open_regular

MIN_CHARS = 16
_MAX_BYTES = 4096


def read_token(path: str) -> str:
    """Returns the token in a file, without surrounding white space; empty for no path.

    Raises:
        StartupError: the file is missing, world-readable or world-writable, or holds no token.
    """
    if not path:
        return ""
    token = read_start(path, FLAG, _MAX_BYTES + 1, secret=True).strip()
    if not MIN_CHARS <= len(token) <= _MAX_BYTES or not token.isascii() or b"\n" in token:
        raise StartupError(f"{FLAG} {path}: it must contain one line of at least {MIN_CHARS} ASCII characters")
    return token.decode()


def read_start(path: str, flag: str, limit: int, *, secret: bool) -> bytes:
    """Returns the first `limit` bytes of a regular file. `flag` names the option in messages.

    Raises:
        StartupError: the file cannot be read, or is `secret` and world-readable or world-writable.
    """
    try:
        with open_regular(expanded(path)) as file:
            status, data = os.fstat(file.fileno()), file.read(limit)
    except OSError as error:
        raise StartupError(f"{flag} {path}: {error.strerror or error}") from None
    if secret and status.st_mode & (stat.S_IROTH | stat.S_IWOTH):
        mode = f"{status.st_mode & 0o777:o}"
        raise StartupError(f"{flag} {path}: it is world-readable or world-writable (mode {mode}); chmod 600")
    return data
