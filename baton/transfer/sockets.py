"""Finds and shuts down TCP connections that torch does not expose: those of a Gloo pair, and those to a store.

Gloo offers no call that frees a blocked wait (measured: neither `abort` nor `shutdown` does). Ending its connection
does, within milliseconds, at both ends. Each rank publishes its listening address as a `sockaddr` in the store, which
distinguishes the pair's connection from all others of the process. A TCPStore call waits without limit while its server
does not reply; there, too, only ending the connection helps: the one on which the calling thread waits.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import stat
import struct
from collections.abc import Callable, Iterator

# At any offset: a sockaddr_in (family, port, address, zeros) or a sockaddr_in6 (family, port, flow, address).
_SOCKADDR = re.compile(rb"(?=\x02\x00(..)(.{4})\x00{8}|\x0a\x00(..)\x00{4}(.{16}))", re.DOTALL)
_SO_ATTACH_FILTER = 26  # missing in Python's socket module

Address = tuple[str, int]


def listener_address(published: bytes) -> Address | None:
    """Returns the listening address of a Gloo rank from what it published in the store: opaque bytes with one sockaddr
    inside. Returns None for another Gloo format; its sockets are then not found."""
    for match in _SOCKADDR.finditer(published):
        port, host = match[1] or match[3], match[2] or match[4]
        if any(port):
            return socket.inet_ntop(socket.AF_INET if match[1] else socket.AF_INET6, host), int.from_bytes(port, "big")
    return None


def _address(name: tuple[str, int] | tuple[str, int, int, int]) -> Address:
    """Returns the address of a socket name: as IPv4 for the IPv4-mapped IPv6 that torch dials with, without a scope."""
    return name[0].removeprefix("::ffff:").partition("%")[0], name[1]


def hang_up(dialled: Address | None, accepted: Address | None = None) -> None:
    """Shuts down the connections dialled to the one address or accepted at the other. Does not block or raise."""
    _to_each(
        lambda sock: _address(sock.getpeername()) == dialled or _address(sock.getsockname()) == accepted, _shut_down
    )


def unblock_thread(port: int, thread: int) -> None:
    """Shuts down the connection to `port` of a peer on which a thread of this process (its native id) waits in a system
    call, as the kernel reports. Does not block or raise."""
    try:
        number = _awaited(thread)
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return
        # Check again on a duplicate: while the thread waits on the socket, its number cannot have been reused.
        with socket.socket(fileno=os.dup(number)) as held:
            if held.getpeername()[1] == port and os.path.sameopenfile(_awaited(thread), held.fileno()):
                held.shutdown(socket.SHUT_RDWR)
    except (OSError, ValueError, OverflowError, IndexError):
        pass  # the thread does not (or no longer) wait on such a socket


def _awaited(thread: int) -> int:
    """Returns the first argument of a thread's current system call: the descriptor, if it sends or receives."""
    with open(f"/proc/self/task/{thread}/syscall", encoding="ascii") as call:
        return int(call.read().split()[1], 16)


def drop_new_connections(listener: Address | None) -> None:
    """Makes the kernel drop all packets to the listener, so that no further connection is accepted.

    Closing it or shutting it down would end the process, as running out of descriptors would: Gloo accepts every
    connection and treats an error in accepting as fatal (measured). Does not raise.
    """

    def is_listener(sock: socket.socket) -> bool:
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return bool(listens) and _address(sock.getsockname()) == listener

    _to_each(is_listener, _drop_packets)


def _sockets() -> Iterator[socket.socket]:
    """Yields all TCP sockets of this process for inspection: their owners keep them and may close them meanwhile."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            sock = socket.socket(fileno=int(name))
        except OSError:
            continue  # closed meanwhile
        try:
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                yield sock
        finally:
            sock.detach()


def _to_each(selects: Callable[[socket.socket], bool], act: Callable[[socket.socket], None]) -> None:
    """Calls `act` on each socket that `selects` accepts. Does not raise."""
    for sock in _sockets():
        try:
            if selects(sock):
                # Check again on a duplicate: its number cannot be reused, and closing it ends no connection.
                with sock.dup() as held:
                    if selects(held):
                        act(held)
        except OSError:
            continue  # closed meanwhile, or not connected


def _shut_down(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_RDWR)


def _drop_packets(listener: socket.socket) -> None:
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF_RET: keep 0 bytes of each packet
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(nothing)))
