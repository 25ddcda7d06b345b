"""Finding and shutting down the TCP connection under a Gloo pair.

Gloo offers nothing that frees a blocked wait (measured: neither `abort` nor `shutdown` does). Its connection's end
does, within milliseconds, at both ends. Each rank publishes the address it listens on as a `sockaddr` in the store,
which tells the pair's connection from all others of the process.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from dataclasses import dataclass

_IPV4 = re.compile(rb"\x02\x00(..)(....)\x00{8}", re.DOTALL)  # sockaddr_in: family, port, address, padding


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
        count = 0
        known = self.mine and self.theirs and os.path.isdir("/proc/self/fd")
        for name in os.listdir("/proc/self/fd") if known else ():
            try:
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                # A duplicate: the shutdown reaches the connection, the close only the duplicate.
                with socket.socket(fileno=os.dup(int(name))) as sock:
                    if self._is_mine(sock):
                        sock.shutdown(socket.SHUT_RDWR)
                        count += 1
            except OSError:
                continue  # closed meanwhile, or not connected
        return count

    def _is_mine(self, sock: socket.socket) -> bool:
        if sock.family != socket.AF_INET or sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        # Either I accepted it on my port or I dialled theirs; the peer's end, if in this process, has it reversed.
        return bool(sock.getsockname() == self.mine or sock.getpeername() == self.theirs)


def _listener(published: bytes) -> Address | None:
    for match in _IPV4.finditer(published):
        port = int.from_bytes(match[1], "big")
        if port:
            return socket.inet_ntoa(match[2]), port
    return None
