"""TLS between the processes of a cluster: both ends present a certificate, and its role decides what they may do.

A directory holds the certificate of the cluster's own authority and one certificate for each role:

    ca.pem   coordinator.pem   prefill.pem   decode.pem   operator.pem   and ROLE-key.pem beside each

A certificate names its role as the DNS name `ROLE.baton`. A client expects that name from the server, whatever the
address is; a server requires a certificate of the authority from the client and reads the role from it. A process needs
only the key of its own role. `baton certs` makes such a directory; any other authority works, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from baton.core.errors import JoinRefused, StartupError
from baton.runtime.paths import expanded
from baton.runtime.token_file import read_start

FLAG = "--cluster-tls-dir"
ROLES = ("coordinator", "prefill", "decode", "operator")
DOMAIN = ".baton"
_NAMES = "x509_subject_alternative_name"


@dataclass(frozen=True, slots=True)
class ClusterTls:
    """The certificate and key of a process of one role, and the authority that it trusts; all PEM."""

    role: str
    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)

    def server(self) -> grpc.ServerCredentials:
        pair = [(self.key, self.certificate)]
        return grpc.ssl_server_credentials(pair, root_certificates=self.authority, require_client_auth=True)

    def channel(self, peer_role: str) -> tuple[grpc.ChannelCredentials, list[tuple[str, str]]]:
        """Returns credentials and options of a channel to a process of `peer_role`."""
        credentials = grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)
        return credentials, [("grpc.ssl_target_name_override", peer_role + DOMAIN)]


def peer_role(context: Any) -> str:
    """Returns the role in the client's certificate; empty without one. `context` is a servicer's."""
    names = context.auth_context().get(_NAMES, ())
    domains = [name.decode("ascii", "replace") for name in names]
    roles = [role for role in ROLES if role + DOMAIN in domains]
    return roles[0] if len(roles) == 1 else ""


def check_role(tls: ClusterTls | None, role: str, expected: tuple[str, ...], who: str) -> None:
    """Checks, with TLS, that the role of a peer's certificate is one of those `expected`.

    Raises:
        JoinRefused: it is not; `role` is the field.
    """
    if tls is not None and role not in expected:
        shown = f"is of role {role!r}" if role else "names no role"
        raise JoinRefused(f"{who} refused: role: its certificate {shown}, not {' or '.join(expected)}", param="role")


def explained(details: str) -> str:
    """Returns gRPC's text for a connection that failed, with the flag if TLS may be the cause."""
    signs = ("SSL", "TLS", "certificate", "CERTIFICATE", "handshake", "erification", "Socket closed", "reset by peer")
    return f"{details} (is {FLAG} the same at both ends?)" if any(sign in details for sign in signs) else details


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

    path = expanded(directory)
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
    data = read_start(str(path), flag, _MAX_BYTES + 1, secret=secret)
    if b"-----BEGIN " not in data or len(data) > _MAX_BYTES:
        raise StartupError(f"{flag} {path}: not a PEM file")
    return data
