"""Opens ports, checks whether one is free, since gRPC does not report why opening one fails, and tells the launcher
which were opened.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from baton.core.errors import StartupError
from baton.core.names import host_port

if TYPE_CHECKING:
    import grpc.aio


BACKLOG = 1_024
_FIXED_PORTS = range(20_000, 32_768)


def bind(host: str, port: int, flag: str, port_name: str, *, take_over: bool = False) -> socket.socket:
    """Returns a listening TCP socket, so that a second server on the port fails now and not later. With `take_over` the
    port may be that of a socket that was passed to `share`, by a process of this user.

    Raises:
        StartupError: the port cannot be opened; as that of `check_free`.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise _unusable(error, host, port, flag, port_name) from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if take_over:
            share(sock)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise _unusable(error, host, port, flag, port_name) from None
    sock.setblocking(False)
    return sock


def share(sock: socket.socket) -> None:
    """Allows other sockets of this user to listen on its port from now on: those of a successor."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


SHARED_PORTS = ("grpc.so_reuseport", 1)
"""The option of a gRPC server whose ports a successor may open too: `open_port` must `check` them."""


def open_port(
    server: grpc.aio.Server,
    host: str,
    port: int,
    port_name: str,
    flag: str,
    credentials: grpc.ServerCredentials | None = None,
    *,
    check: bool = True,
) -> int:
    """Makes `server` listen (port 0: on a free one) and returns the port. Without `check` it may be one that the server
    shares with another; with it gRPC, which would write a line of its own to stderr, is not given a port in use.

    Raises:
        StartupError: the port cannot be opened; names the port (`port_name`), the cause, and the flag to
            choose another.
    """
    if check:
        check_free(host, port, flag, port_name)
    try:
        # gRPC succeeds if it binds any address of a name: `localhost` could be ::1 only.
        address = host_port(str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]), port)
        if bound := (
            server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
        ):
            return int(bound)
    except (RuntimeError, OSError):
        pass
    check_free(host, port, flag, port_name)
    raise StartupError(f"{port_name} port {port} on {host} cannot be used: gRPC reported no reason")


def choose_port(host: str) -> int:
    """Returns a port that is free now, for a process that starts later. It is below the ports that the kernel gives to
    connections and to sockets that ask for any port.

    Raises:
        StartupError: there is none.
    """
    for port in random.sample(_FIXED_PORTS, 100):
        with contextlib.suppress(StartupError):
            check_free(host, port, "")
            return port
    raise StartupError(f"no free port on {host}")


def check_free(host: str, port: int, flag: str, port_name: str = "") -> None:
    """Raises StartupError unless the port can be opened now; `flag` is the flag that chooses another (and its
    process), `port_name` what the port is for."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        raise _unusable(error, host, port, flag, port_name) from None


def _unusable(error: OSError, host: str, port: int, flag: str, port_name: str) -> StartupError:
    named = f"{port_name} port {port} on {host}".strip()
    if error.errno == errno.EADDRINUSE:
        return StartupError(f"{named} is in use; choose another with {flag}")
    reason = error.strerror or str(error)
    if error.errno == errno.EADDRNOTAVAIL:
        host_flag = "--control-host" if flag.startswith(("--control", "--admin")) else "--host"
        host_flag = {"--listen": flag, "--batches-port": "--batches-host"}.get(flag, host_flag)
        reason += f"; {host_flag} must be an address of this machine"
    return StartupError(f"{named} ({flag}) cannot be used: {reason}")


def write_ready_file(path: str, addresses: Mapping[str, str]) -> None:
    """Writes the file atomically, for its readers; does nothing without a path. Raises StartupError."""
    if not path:
        return
    temporary = Path(path).with_suffix(".tmp")
    try:
        temporary.write_text(json.dumps(addresses))
        os.replace(temporary, path)
    except OSError as error:
        raise StartupError(f"--ready-file {path}: {error.strerror or error}") from None
