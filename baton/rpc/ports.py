"""Ports to listen on: whether one is free, and opening a gRPC server's. Where that fails gRPC does not say why."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

from baton.core.errors import StartupError
from baton.core.names import host_port

if TYPE_CHECKING:
    import grpc.aio


def open_port(
    server: grpc.aio.Server,
    host: str,
    port: int,
    what: str,
    flag: str,
    credentials: grpc.ServerCredentials | None = None,
) -> int:
    """Makes `server` listen (port 0: on a free one) and returns the port.

    Raises:
        StartupError: nobody can listen there; says which port of whom it is (`what`), why, and the flag for another.
    """
    try:
        # Of a name with two addresses gRPC would be content with either one: `localhost` could be ::1 alone.
        address = host_port(str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]), port)
        if bound := (
            server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
        ):
            return int(bound)
    except (RuntimeError, OSError):
        pass
    check_free(host, port, flag, what)
    raise StartupError(f"{what} port {port} on {host} cannot be used: gRPC does not say why")


def check_free(host: str, port: int, whose: str, what: str = "") -> None:
    """Raises StartupError unless somebody may listen there now; `whose` says which flag, of whom, names another, `what`
    which port it is."""
    named = f"{what} port {port} on {host}".strip()
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartupError(f"{named} is in use; choose another with {whose}") from None
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRNOTAVAIL:
            host_flag = "--control-host" if whose.startswith(("--control", "--admin")) else "--host"
            reason += f"; {host_flag} has to be one of this machine's"
        raise StartupError(f"{named} ({whose}) cannot be used: {reason}") from None
