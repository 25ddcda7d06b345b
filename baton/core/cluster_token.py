"""The cluster token: what whoever listens off loopback asks of whoever dials it.

It goes into the first message of a session or link, and appears nowhere else: in no argument, log line or error.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress

from baton.core.errors import JoinRefused, StartupError

FLAG = "--cluster-token-file"


def check_token(expected: str, presented: str, who: str) -> None:
    """Compares in a time that says nothing about either. Without an expected token any will do.

    Raises:
        JoinRefused: `token` is missing or another one.
    """
    digests = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in (expected, presented)]
    if expected and not hmac.compare_digest(*digests):
        what = "is not this cluster's" if presented else "is missing"
        raise JoinRefused(f"{who} refused: token: it {what}; name the cluster's file with {FLAG}", param="token")


def check_listening(flag: str, host: str, token: str) -> None:
    """Nobody listens to the cluster's own traffic off loopback without a token.

    Raises:
        StartupError: names both flags.
    """
    if not token and not on_loopback(host):
        raise StartupError(f"{flag} {host} is not a loopback address: a cluster token is required, set {FLAG}")


def on_loopback(host: str) -> bool:
    """Whether a listening address is reached from this machine only. A name other than localhost may be anything."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host.lower() == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
