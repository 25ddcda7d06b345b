"""Valid names and addresses of the members and nodes of a cluster: both become part of scripts, log lines and keys, and
names also of paths. Also valid addresses to dial, and valid model names."""

from __future__ import annotations

import ipaddress
import re

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_MODEL_NAME_CHARS = 256
_LABELS = r"(?!.*([^.]{64}|\.\.))"  # resolvers reject labels that are empty or longer
_ADDRESS = re.compile(_LABELS + r"[A-Za-z0-9:][A-Za-z0-9._:%-]{0,252}|\[[A-Fa-f0-9:][A-Za-z0-9.:%_-]{1,60}\]")


def name_error(name: str) -> str | None:
    """Returns what is wrong with a name, in one line of ASCII; None if it is valid."""
    return None if _NAME.fullmatch(name) else f"{_shown(name)} is not 1 to 128 characters of A-Z a-z 0-9 . _ -"


def address_error(address: str) -> str | None:
    """Returns what is wrong with a host name or an IP address, in one line of ASCII; None if it is valid. The address
    is not looked up."""
    return None if _ADDRESS.fullmatch(address) else f"{_shown(address)} is not a host name or IP address"


def host_port(host: str, port: int | str) -> str:
    """Returns `10.0.0.1:80` or `[::1]:80`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def unbracketed(host: str) -> str:
    """Returns `::1` for `[::1]`, and any other host as it is."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def host_port_error(text: str) -> str | None:
    """Returns what is wrong with an address to dial, in one line of ASCII that follows its option's name; None if it is
    valid. An IPv6 address is in brackets. gRPC accepts any text: it wraps ports and dials invalid addresses forever."""
    host, _, port = text.rpartition(":")
    if _PORT.fullmatch(port) is not None and int(port) <= 65535 and (_HOST.fullmatch(host) or _is_ipv6(host)):
        return None
    return f"must be HOST:PORT with a port from 1 to 65535, not {_shown(text)}"


def model_name_error(name: str) -> str | None:
    """Returns what is wrong with the name that clients use for a model, in one line of ASCII that follows its option's
    name; None if it is valid. The name appears in responses, log lines and tables, so it may not contain line breaks,
    other control characters or bytes that are not text."""
    if 0 < len(name) <= _MODEL_NAME_CHARS and name.isprintable():
        return None
    return f"must be 1 to {_MODEL_NAME_CHARS} printable characters, not {_shown(name)}"


def _is_ipv6(host: str) -> bool:
    if not host.startswith("[") or _ADDRESS.fullmatch(host) is None:
        return False
    try:
        ipaddress.IPv6Address(host[1:-1])
    except ValueError:
        return False
    return True


def _shown(text: str) -> str:
    return ascii(text[:40])
