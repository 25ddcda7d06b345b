"""Listening ports, and the reason why one cannot be used."""

from __future__ import annotations

import socket

import grpc.aio
import pytest

from baton.core.commands import Role
from baton.core.errors import StartupError
from baton.core.names import host_port
from baton.core.ranks import Ranks
from baton.runtime import worker_main
from baton.runtime.config import WorkerConfig
from baton.runtime.ports import check_free, open_port


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
async def test_server_listens_on_the_given_host(host: str) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    server = grpc.aio.server()
    port = open_port(server, host, 0, "link", "--link-port")
    await server.start()
    with socket.create_connection((host, port), timeout=2.0):
        pass
    await server.stop(None)


async def test_server_on_a_name_with_two_addresses_binds_the_first_one() -> None:
    """gRPC also resolves `localhost` to ::1, and would succeed with either address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"link port {port} on localhost is in use"):
            open_port(grpc.aio.server(), "localhost", port, "link", "--link-port")


async def test_port_in_use_and_foreign_address_are_different_errors(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = f"link port {port} on 127.0.0.1 is in use; choose another with --link-port"
        with pytest.raises(StartupError, match=message):
            open_port(grpc.aio.server(), "127.0.0.1", port, "link", "--link-port")
        with pytest.raises(StartupError, match=f"^port {port} on 127.0.0.1 is in use; choose another with --port$"):
            check_free("127.0.0.1", port, "--port")
    foreign = r"on 192\.0\.2\.1 \({}\) cannot be used: Cannot assign requested address; --host must be an address of"
    with pytest.raises(StartupError, match="link port .* " + foreign.format("--link-port")):
        open_port(grpc.aio.server(), "192.0.2.1", port, "link", "--link-port")
    with pytest.raises(StartupError, match=r"^port \d+ " + foreign.format("--port")):
        check_free("192.0.2.1", port, "--port")
    for flag, host_flag in (("--control-port", "--control-host"), ("--listen", "--listen")):
        with pytest.raises(StartupError, match=rf"{host_flag} must be an address of this machine$"):
            check_free("192.0.2.1", port, flag)
    assert capfd.readouterr().err == ""  # gRPC would write a line of its own beside the error


def test_ipv6_addresses_are_bracketed() -> None:
    assert (host_port("::1", 80), host_port("10.0.0.1", 80), host_port("a", 0)) == ("[::1]:80", "10.0.0.1:80", "a:0")


@pytest.mark.parametrize(("role", "option"), [("decode", "link"), ("decode", "store"), ("prefill", "health")])
async def test_a_worker_names_a_port_in_use_before_it_loads_its_model(role: Role, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = WorkerConfig(model="/nonexistent", **{f"{option}_port": port})
        with pytest.raises(StartupError, match=f"port {port} on 127.0.0.1 is in use; choose another with --{option}"):
            await worker_main._serve(role, config, Ranks.from_environment({}), lambda: pytest.fail)
