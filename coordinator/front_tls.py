"""The certificate of HTTP and public gRPC, if they use TLS."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

import grpc

from baton.core.errors import StartupError
from baton.runtime.paths import expanded
from baton.runtime.tls import read_pem
from coordinator.options import CERT_FLAG, KEY_FLAG, check_pair


@dataclass(frozen=True, slots=True)
class FrontTls:
    context: ssl.SSLContext
    credentials: grpc.ServerCredentials


def read_front_tls(cert_file: str, key_file: str) -> FrontTls | None:
    """Reads certificate and key; returns None if neither is given.

    Raises:
        StartupError: one of the two is missing, cannot be read, or they do not match; or the certificate is not valid
            now or is for another use.
    """
    check_pair(cert_file, key_file)
    if not cert_file:
        return None
    from baton.runtime import certificates

    path = expanded(cert_file)
    certificate = read_pem(path, CERT_FLAG)
    own = certificates.load_certificates(certificate, path, CERT_FLAG)[0]
    certificates.check_time(own, path, CERT_FLAG)
    certificates.check_usages(own, certificates.USAGES["coordinator"], path, CERT_FLAG)
    key = read_pem(expanded(key_file), KEY_FLAG, secret=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(path, expanded(key_file), password=_none)
    except (ssl.SSLError, ValueError) as error:
        raise StartupError(f"{CERT_FLAG} {cert_file} and {KEY_FLAG} {key_file} do not match: {error}") from None
    return FrontTls(context, grpc.ssl_server_credentials([(key, certificate)]))


def _none() -> str:
    """Refuses a key with a password instead of prompting for it."""
    raise ValueError("the key has a password")
