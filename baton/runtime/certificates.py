"""Checks certificates before they are used: their period of validity, key and authority."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID

from baton.core.errors import StartupError

_SERVER, _CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
_NAMES = {_SERVER: "serverAuth", _CLIENT: "clientAuth"}
USAGES = {"coordinator": (_SERVER,), "prefill": (_CLIENT,), "decode": (_SERVER, _CLIENT), "operator": (_CLIENT,)}
"""What a role uses its certificate for: workers dial the coordinator, prefill workers dial decode workers."""


def load_certificates(data: bytes, path: Path, flag: str) -> list[x509.Certificate]:
    """Returns all certificates of a PEM file, at least one, in file order (a chain begins with its leaf).

    Raises:
        StartupError: there is none, or one that cannot be read; messages name `flag` and `path` here and below.
    """
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError:
        raise StartupError(f"{flag} {path}: the file contains no readable certificate") from None


def check_time(certificate: x509.Certificate, path: Path, flag: str) -> None:
    """Raises StartupError if the certificate is not valid yet, or has expired."""
    now = datetime.datetime.now(datetime.UTC)
    since, until = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > until:
        raise StartupError(f"{flag} {path}: the certificate expired on {until:%Y-%m-%d %H:%M} UTC; renew it")
    if now < since:
        raise StartupError(
            f"{flag} {path}: the certificate is not valid before {since:%Y-%m-%d %H:%M} UTC; check the system clock"
        )


def check_key(certificate: x509.Certificate, key: bytes, path: Path, flag: str) -> PrivateKeyTypes:
    """Returns the key in `key`, a PEM file's content.

    Raises:
        StartupError: it cannot be read, or does not belong to the certificate.
    """
    try:
        private_key = serialization.load_pem_private_key(key, None)
    except (ValueError, TypeError):  # TypeError: it has a password
        raise StartupError(f"{flag} {path}: its private key is unreadable or has a password") from None
    if private_key.public_key() != certificate.public_key():
        raise StartupError(f"{flag} {path}: the certificate does not match its private key")
    return private_key


def check_authority(
    chain: Sequence[x509.Certificate], authority: Sequence[x509.Certificate], path: Path, flag: str
) -> None:
    """Checks that one of `authority` has signed the first certificate of `chain`, directly or through the others.

    Raises:
        StartupError: none has, or a certificate that signed is not valid now.
    """
    signed: x509.Certificate | None = chain[0]
    for _ in chain:
        if signed is None:
            break
        if (root := _issuer(signed, authority)) is not None:
            check_time(root, path.with_name("ca.pem"), flag)
            return
        if (signed := _issuer(signed, chain[1:])) is not None:
            check_time(signed, path, flag)
    raise StartupError(f"{flag} {path}: the certificate is not signed by this directory's authority (ca.pem)")


def check_usages(certificate: x509.Certificate, needed: Iterable[x509.ObjectIdentifier], path: Path, flag: str) -> None:
    """Raises StartupError if the certificate lists its extended key usages and one that is `needed` is missing."""
    try:
        usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return
    for usage in needed:
        if usage not in usages:
            raise StartupError(f"{flag} {path}: its extended key usage lacks {_NAMES[usage]}, which its role needs")


def dns_names(certificate: x509.Certificate) -> list[str]:
    """Returns the names and addresses that the certificate is for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return [*names.get_values_for_type(x509.DNSName), *addresses]


def is_authority(certificate: x509.Certificate) -> bool:
    """Returns whether the certificate may sign others."""
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def _issuer(certificate: x509.Certificate, among: Iterable[x509.Certificate]) -> x509.Certificate | None:
    for candidate in among:
        try:
            certificate.verify_directly_issued_by(candidate)
        except (ValueError, TypeError, InvalidSignature):
            continue
        if is_authority(candidate):
            return candidate
    return None
