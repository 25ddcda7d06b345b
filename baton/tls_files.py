"""Certificates and keys as PEM files: those of a cluster's directory, and any two."""

from __future__ import annotations

from pathlib import Path

from baton.core.errors import StartupError
from baton.rpc.tls import FLAG, ClusterTls
from baton.token_file import read_secret

CA = "ca.pem"
_MAX_BYTES = 1 << 16


def read_cluster_tls(directory: str, role: str) -> ClusterTls | None:
    """What a process of `role` finds in a directory; None for no directory.

    Raises:
        StartupError: a file is missing, empty, or a key that everybody may read.
    """
    if not directory:
        return None
    path = Path(directory).expanduser()
    return ClusterTls(
        role, _read(path / CA), _read(path / f"{role}.pem"), read_pem(path / f"{role}-key.pem", FLAG, secret=True)
    )


def _read(path: Path) -> bytes:
    return read_pem(path, FLAG)


def read_pem(path: Path, flag: str, *, secret: bool = False) -> bytes:
    """The content of a PEM file; a `secret` one may not be open to everybody.

    Raises:
        StartupError: it is missing or holds no PEM; the message names `flag`.
    """
    try:
        data = read_secret(str(path), flag, _MAX_BYTES) if secret else path.read_bytes()
    except OSError as error:
        raise StartupError(f"{flag} {path}: {error.strerror or error}") from None
    if b"-----BEGIN " not in data:
        raise StartupError(f"{flag} {path}: it is no PEM file")
    return data
