"""Which network interface has an address: NCCL accepts interfaces, not addresses."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Iterator
from ipaddress import ip_address

_IPV4_AT, _IPV6_AT = 4, 8  # of the address in sockaddr_in and sockaddr_in6


class _IfAddrs(ctypes.Structure):
    """`struct ifaddrs` of getifaddrs(3), as far as it is read."""


_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def interface_of(host: str) -> str:
    """Returns the name of the interface that has the address `host` (a numeric address or a name); empty for one that
    stands for all interfaces, or that none has. A loopback address belongs to the loopback interface, whichever of
    127.0.0.0/8 it is."""
    try:
        target = ip_address(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, ValueError):
        return ""
    if target.is_unspecified:
        return ""
    for name, address in interface_addresses():
        candidate = ip_address(address)
        if candidate == target or (target.is_loopback and candidate.is_loopback):
            return name
    return ""


def interface_addresses() -> Iterator[tuple[str, str]]:
    """Yields (interface, address) for each IPv4 and IPv6 address of this machine. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "getifaddrs failed")
    try:
        entry = first
        while entry:
            here = entry.contents
            if here.address:
                family = ctypes.c_ushort.from_address(here.address).value
                if family in (socket.AF_INET, socket.AF_INET6):
                    at, size = (_IPV4_AT, 4) if family == socket.AF_INET else (_IPV6_AT, 16)
                    raw = ctypes.string_at(here.address + at, size)
                    yield here.name.decode(), socket.inet_ntop(family, raw)
            entry = here.next
    finally:
        libc.freeifaddrs(first)
