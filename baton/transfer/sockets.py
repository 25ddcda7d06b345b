"""Finding and shutting down TCP connections that torch does not show: under a Gloo pair, and to a store.

Gloo offers nothing that frees a blocked wait (measured: neither `abort` nor `shutdown` does). Its connection's end
does, within milliseconds, at both ends. Each rank publishes the address it listens on as a `sockaddr` in the store,
which tells the pair's connection from all others of the process. A call of a TCPStore waits without limit while its
server says nothing; there, too, only the connection's end helps. It is the one that the caller waits for.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import stat
import struct
from collections.abc import Callable, Iterator

_IPV4 = re.compile(rb"\x02\x00(..)(....)\x00{8}", re.DOTALL)  # sockaddr_in: family, port, address, padding
_SO_ATTACH_FILTER = 26  # which Python's socket module does not name

Address = tuple[str, int]


def listener_address(published: bytes) -> Address | None:
    """Where a rank of Gloo listens, by what it put in the store: opaque but for the one sockaddr inside. None for IPv6,
    or another Gloo; then nothing of it is found."""
    for match in _IPV4.finditer(published):
        port = int.from_bytes(match[1], "big")
        if port:
            return socket.inet_ntoa(match[2]), port
    return None


def peer_of(sock: socket.socket) -> Address:
    """Whom a socket is connected to, the same for IPv4 and for IPv4 in IPv6, which torch dials with. Raises OSError."""
    host, port = sock.getpeername()[:2]
    return host.removeprefix("::ffff:"), port


def hang_up(dialled: Address | None, accepted: Address | None = None) -> None:
    """Shuts down what this process has dialled at the one address or accepted at the other. Does not block or raise."""
    _to_each(lambda sock: peer_of(sock) == dialled or sock.getsockname() == accepted, _shut_down)


def free_from(port: int, thread: int) -> None:
    """Shuts down the connection to `port` of a peer that a thread of this process (its native id) waits for in a system
    call. The kernel says what a thread waits for. Does not block or raise."""
    try:
        number = _awaited(thread)
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return
        # A duplicate, looked at again: as long as the thread waits for it, nobody else can have got its number.
        with socket.socket(fileno=os.dup(number)) as held:
            if held.getpeername()[1] == port and os.path.sameopenfile(_awaited(thread), held.fileno()):
                held.shutdown(socket.SHUT_RDWR)
    except (OSError, ValueError, OverflowError, IndexError):
        pass  # it waits for nothing of the kind, or does not any more


def _awaited(thread: int) -> int:
    """The first argument of the system call that a thread is in: the descriptor, where it sends or receives."""
    with open(f"/proc/self/task/{thread}/syscall", encoding="ascii") as call:
        return int(call.read().split()[1], 16)


def deafen(listener: Address | None) -> None:
    """Nobody is let in any more: the kernel drops what comes to the listener.

    To close it or to shut it down would end the process, as running out of descriptors would: Gloo takes whoever
    comes, and an error of that as fatal (measured). Does not raise.
    """

    def wanted(sock: socket.socket) -> bool:
        return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) and sock.getsockname() == listener

    _to_each(wanted, _drop_packets)


def _sockets() -> Iterator[socket.socket]:
    """All TCP sockets of this process, to look at: they stay their owners', who may close them meanwhile."""
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


def _to_each(wanted: Callable[[socket.socket], bool], act: Callable[[socket.socket], None]) -> None:
    """Acts on those that are wanted. Does not raise."""
    for sock in _sockets():
        try:
            if wanted(sock):
                # A duplicate, looked at again: its number is nobody else's, and its close reaches no connection.
                with sock.dup() as held:
                    if wanted(held):
                        act(held)
        except OSError:
            continue  # closed meanwhile, or not connected


def _shut_down(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_RDWR)


def _drop_packets(listener: socket.socket) -> None:
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF_RET: keep 0 bytes of each packet
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(nothing)))
