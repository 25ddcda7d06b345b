"""Finding and shutting down TCP connections that torch does not show: under a Gloo pair, and to a store.

Gloo offers nothing that frees a blocked wait (measured: neither `abort` nor `shutdown` does). Its connection's end
does, within milliseconds, at both ends. Each rank publishes the address it listens on as a `sockaddr` in the store,
which tells the pair's connection from all others of the process. A call of a TCPStore waits without limit while its
server says nothing; there, too, only the connection's end helps.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_IPV4 = re.compile(rb"\x02\x00(..)(....)\x00{8}", re.DOTALL)  # sockaddr_in: family, port, address, padding
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_SO_ATTACH_FILTER = 26  # which Python's socket module does not name

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Connections:
    """`mine` and `theirs` are what the two ranks listen on. None (IPv6, or another Gloo) finds nothing: an abort then
    takes effect at the operation's timeout."""

    mine: Address | None
    theirs: Address | None

    @classmethod
    def from_rendezvous(cls, mine: bytes, theirs: bytes) -> Connections:
        """What each rank put in the store: opaque but for the one sockaddr inside."""
        return cls(_listener(mine), _listener(theirs))

    def shut_down(self) -> int:
        """Shuts down this rank's end of the pair; returns how many connections that was. Does not block or raise."""
        return _to_each(self._is_mine, _shut_down) if self.mine and self.theirs else 0

    def stop_listening(self) -> int:
        """Once the pair stands: nobody else is let in. The kernel drops what comes to the listener.

        To close it or to shut it down would end the process, as running out of descriptors would: Gloo takes whoever
        comes, and an error of that as fatal (measured). Returns how many listeners that was, 0 or 1. Does not raise.
        """
        return _to_each(self._is_my_listener, _deafen) if self.mine else 0

    def _is_my_listener(self, sock: socket.socket) -> bool:
        listens = sock.family == socket.AF_INET and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return bool(listens and sock.getsockname() == self.mine)

    def _is_mine(self, sock: socket.socket) -> bool:
        if sock.family != socket.AF_INET or sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        # Either I accepted it on my port or I dialled theirs; the peer's end, if in this process, has it reversed.
        return bool(sock.getsockname() == self.mine or sock.getpeername() == self.theirs)


def peer_of(sock: socket.socket) -> Address:
    """Whom a socket is connected to, the same for IPv4 and for IPv4 in IPv6, which torch dials with. Raises OSError."""
    host, port = sock.getpeername()[:2]
    return host.removeprefix("::ffff:"), port


def hang_up(address: Address) -> int:
    """Shuts down what this process has dialled at `address`; returns how many connections that was. Does not block or
    raise."""
    return _to_each(lambda sock: sock.family in _INTERNET and peer_of(sock) == address, _shut_down)


def _sockets() -> Iterator[socket.socket]:
    """All sockets of this process, to look at: they stay their owners', who may close them meanwhile."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            sock = socket.socket(fileno=int(name))
        except OSError:
            continue  # closed meanwhile
        try:
            yield sock
        finally:
            sock.detach()


def _to_each(wanted: Callable[[socket.socket], bool], act: Callable[[socket.socket], None]) -> int:
    """Acts on those that are wanted; returns how many it was. Does not raise."""
    count = 0
    for sock in _sockets():
        try:
            if wanted(sock):
                # A duplicate, looked at again: its number is nobody else's, and its close reaches no connection.
                with sock.dup() as held:
                    if wanted(held):
                        act(held)
                        count += 1
        except OSError:
            continue  # closed meanwhile, or not connected
    return count


def _shut_down(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_RDWR)


def _deafen(listener: socket.socket) -> None:
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF_RET: keep 0 bytes of each packet
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(nothing)))


def _listener(published: bytes) -> Address | None:
    for match in _IPV4.finditer(published):
        port = int.from_bytes(match[1], "big")
        if port:
            return socket.inet_ntoa(match[2]), port
    return None
