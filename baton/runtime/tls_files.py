"""Reads certificates and keys from PEM files: those of a cluster's directory, and single ones."""

from __future__ import annotations

from pathlib import Path

from baton.core.errors import StartupError
from baton.runtime.tls import DOMAIN, FLAG, ClusterTls
from baton.runtime.token_file import read_regular

CA = "ca.pem"
_MAX_BYTES = 1 << 16


def read_cluster_tls(directory: str, role: str, flag: str = FLAG) -> ClusterTls | None:
    """Returns what a process of `role` needs from a directory; None without one. Messages begin with `flag`.

    Raises:
        StartupError: a file is missing or no PEM file, or the key is world-readable or world-writable; or the
            certificate is not valid now, is for another role or use, or does not belong to its key or to the authority.
    """
    if not directory:
        return None
    from baton.runtime import certificates  # slow to import, and rarely needed on one machine

    path = Path(directory).expanduser()
    ca_path, own = path / CA, path / f"{role}.pem"
    authority, certificate = read_pem(ca_path, flag), read_pem(own, flag)
    key = read_pem(path / f"{role}-key.pem", flag, secret=True)
    chain = certificates.load_certificates(certificate, own, flag)
    certificates.check_time(chain[0], own, flag)
    certificates.check_key(chain[0], key, own, flag)
    certificates.check_authority(chain, certificates.load_certificates(authority, ca_path, flag), own, flag)
    certificates.check_usages(chain[0], certificates.USAGES[role], own, flag)
    if role + DOMAIN not in (names := certificates.dns_names(chain[0])):
        raise StartupError(f"{flag} {own}: the certificate is for {', '.join(names) or 'no name'}, not {role}{DOMAIN}")
    return ClusterTls(role, authority, certificate, key)


def read_pem(path: Path, flag: str, *, secret: bool = False) -> bytes:
    """Returns the content of a PEM file of at most 64 KiB; a `secret` file may not be world-readable or world-writable.

    Raises:
        StartupError: the file is missing, no PEM or too long, or `secret` and open to everybody; messages name `flag`.
    """
    data = read_regular(str(path), flag, _MAX_BYTES + 1, secret=secret)
    if b"-----BEGIN " not in data or len(data) > _MAX_BYTES:
        raise StartupError(f"{flag} {path}: not a PEM file")
    return data
