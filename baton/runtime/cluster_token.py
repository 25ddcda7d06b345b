"""The cluster token: a secret that a process listening off loopback requires from every process that dials it.

It is sent in the first message of a session or link and in drain requests, and never in arguments, logs or errors.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress

from baton.core.errors import JoinRefused, StartupError

FLAG = "--cluster-token-file"


def check_token(expected: str, presented: str, who: str) -> None:
    """Compares the tokens in constant time. Without an expected token any token is accepted.

    Raises:
        JoinRefused: `presented` is empty or differs from `expected`.
    """
    digests = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in (expected, presented)]
    if expected and not hmac.compare_digest(*digests):
        reason = "is not this cluster's" if presented else "is missing"
        raise JoinRefused(f"{who} refused: token: it {reason}; set {FLAG} to the cluster's file", param="token")


def check_listening(flag: str, host: str, token: str) -> None:
    """Requires a token if the cluster's own traffic is served off loopback.

    Raises:
        StartupError: there is no token; the message names both flags.
    """
    if not token and not on_loopback(host):
        raise StartupError(f"{flag} {host} is not a loopback address: a cluster token is required, set {FLAG}")


def on_loopback(host: str) -> bool:
    """Returns whether a listening address is only reachable from this machine. Of names, only localhost counts."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host.lower() == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
