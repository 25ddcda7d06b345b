"""A cluster's own certificate authority and the certificates that it signs: `baton certs`. For development, and for
clusters on a private network; an existing authority can issue the same files instead."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from baton.core.errors import StartupError
from baton.runtime.certificates import check_key, check_time, dns_names, is_authority, load_certificates
from baton.runtime.tls import CA, DOMAIN, ROLES, read_cluster_tls, read_pem

CA_KEY = "ca-key.pem"
SERVER = "server"
DEFAULT_HOSTS = ("localhost", "127.0.0.1", "::1")
_CA_DAYS = 3650
_AUTHORITY = "Baton cluster authority"
_Key = ec.EllipticCurvePrivateKey
_COMMAND = "baton certs:"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_NAME = re.compile(rf"(?=.{{1,253}}$)(\*\.)?{_LABEL}(\.{_LABEL})*")
_BACKDATED = datetime.timedelta(minutes=5)  # clocks of hosts differ


def make_certificates(
    directory: Path, hosts: Sequence[str], days: int, now: datetime.datetime | None = None
) -> list[Path]:
    """Creates what is missing in `directory`: the authority, a certificate and key for each role, and `server.pem` for
    `hosts` (default: loopback), valid for `days` from `now` on. Returns the files that were created.

    Raises:
        StartupError: a host is neither a name nor an address; the directory cannot be written; or the existing files do
            not belong together, have expired, or are for other hosts.
    """
    for host in hosts:
        if not _is_address(host) and not _NAME.fullmatch(host):
            raise StartupError(f"--host {host!r} is neither a name nor an address")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return list(_make(directory, hosts, days, now or datetime.datetime.now(datetime.UTC)))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise StartupError(f"{directory}: certificates cannot be made: {reason}") from None


def _make(directory: Path, hosts: Sequence[str], days: int, now: datetime.datetime) -> Iterator[Path]:
    def sign(
        name: str, key: _Key, issuer: x509.Name, until: datetime.datetime, *extensions: x509.ExtensionType
    ) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _BACKDATED)
            .not_valid_after(until)
        )
        for extension in extensions:
            builder = builder.add_extension(extension, isinstance(extension, x509.BasicConstraints | x509.KeyUsage))
        return builder.sign(signer, hashes.SHA256())

    ca_path, ca_key_path = directory / CA, directory / CA_KEY
    if ca_path.exists() != ca_key_path.exists():
        raise StartupError(f"{directory}: only one of {CA} and {CA_KEY} exists; signing needs both")
    if ca_path.exists():
        authority = load_certificates(read_pem(ca_path, _COMMAND), ca_path, _COMMAND)[0]
        check_time(authority, ca_path, _COMMAND)
        if not is_authority(authority):
            raise StartupError(f"{ca_path}: not a CA certificate (see its basic constraints)")
        ca_key = check_key(authority, read_pem(ca_key_path, _COMMAND, secret=True), ca_path, _COMMAND)
        if not isinstance(ca_key, _Key):
            raise StartupError(f"{ca_key_path}: not a key that `baton certs` has made")
        signer: _Key = ca_key
    else:
        signer = ec.generate_private_key(ec.SECP256R1())
        authority = sign(
            _AUTHORITY,
            signer,
            _name(_AUTHORITY),
            now + datetime.timedelta(_CA_DAYS),
            x509.BasicConstraints(ca=True, path_length=0),
            x509.KeyUsage(False, False, False, False, False, True, True, False, False),  # signs certificates, CRLs
            x509.SubjectKeyIdentifier.from_public_key(signer.public_key()),
        )
        yield _write_key(ca_key_path, signer)
        yield _write(ca_path, authority)
    names = {role: [role + DOMAIN] for role in ROLES} | {SERVER: list(hosts or DEFAULT_HOSTS)}
    for name, of in names.items():
        path, key_path = directory / f"{name}.pem", directory / f"{name}-key.pem"
        if path.exists() and key_path.exists():
            _check_present(directory, name, hosts)
            continue
        key = ec.generate_private_key(ec.SECP256R1())
        yield _write_key(key_path, key)
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, *([] if name == SERVER else [ExtendedKeyUsageOID.CLIENT_AUTH])]
        certificate = sign(
            f"baton {name}",
            key,
            authority.subject,
            min(now + datetime.timedelta(days), authority.not_valid_after_utc),
            x509.SubjectAlternativeName([_general_name(host) for host in of]),
            x509.BasicConstraints(ca=False, path_length=None),
            x509.ExtendedKeyUsage(usages),
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
        )
        yield _write(path, certificate)


def _check_present(directory: Path, name: str, hosts: Sequence[str]) -> None:
    """Checks files that are kept: an empty file would otherwise be detected only when a worker starts."""
    if name != SERVER:
        read_cluster_tls(str(directory), name, _COMMAND)
        return
    path = directory / f"{SERVER}.pem"
    certificate = load_certificates(read_pem(path, _COMMAND), path, _COMMAND)[0]
    check_time(certificate, path, _COMMAND)
    check_key(certificate, read_pem(directory / f"{SERVER}-key.pem", _COMMAND, secret=True), path, _COMMAND)
    there = dns_names(certificate)
    if hosts and {_general_name(host.lower()) for host in hosts} != {_general_name(host.lower()) for host in there}:
        raise StartupError(f"{path} is for {', '.join(there)}; remove it to create one for other hosts")


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _general_name(host: str) -> x509.GeneralName:
    return x509.IPAddress(ipaddress.ip_address(host)) if _is_address(host) else x509.DNSName(host)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _write_key(path: Path, key: _Key) -> Path:
    data = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    return path


def _write(path: Path, certificate: x509.Certificate) -> Path:
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return path
