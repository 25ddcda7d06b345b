"""Opens the parts of the batches process, runs them until it is stopped, and closes them.

At SIGTERM or SIGINT no further line is sent; those that run end and are stored, within the drain timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
from collections.abc import Generator

import uvicorn

from batches.public_api import PublicApi
from batches.routes import BatchRoutes
from batches.runner import BatchRunner
from batches.store import FLAG, BatchStore
from baton.core.errors import StartupError
from baton.core.names import host_port
from baton.runtime.batches_access import access_key
from baton.runtime.cluster_token import check_listening
from baton.runtime.config import BatchesConfig
from baton.runtime.paths import expanded
from baton.runtime.ports import bind, write_ready_file
from baton.runtime.process import NICE
from baton.runtime.token_file import read_token

log = logging.getLogger("baton.batches")
GRACE_S = 2
SEND_BUFFER_BYTES = 64 * 1024


class _Server(uvicorn.Server):
    """Handles no signals: they belong to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def run_batches(config: BatchesConfig) -> None:
    """Runs the process until SIGTERM or SIGINT.

    Raises:
        StartupError: it cannot start, or a part of it has failed.
    """
    token = read_token(config.cluster_token_file)
    check_listening("--batches-host", config.batches_host, token)
    if not config.data_dir:
        raise StartupError(f"{FLAG} is needed: the directory for files and batches")
    key = access_key(token)
    tls = _trusting(config.tls_cert_file) if config.tls_cert_file else None
    sock = listen(config.batches_host, config.batches_port)
    store = BatchStore(config.data_dir, round(config.max_data_mib * (1 << 20)))
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # a malformed form concerns only its sender
    api = PublicApi(config.coordinator_url, key, config.request_timeout_s, tls)
    runner = BatchRunner(store, api.ask, strict_fields=config.strict_fields)
    max_file_bytes = round(config.max_file_mib * (1 << 20))
    routes = BatchRoutes(store, runner, key, max_file_bytes=max_file_bytes, strict_fields=config.strict_fields)
    server = make_server(routes)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    parts = [
        asyncio.create_task(server.serve([sock]), name="HTTP server"),
        asyncio.create_task(runner.run(), name="batches"),
    ]
    for task in parts:
        task.add_done_callback(lambda _: stop.set())
    try:
        address = host_port(config.batches_host, sock.getsockname()[1])
        log.info("serving files and batches: %s, for the coordinator at %s", address, config.coordinator_url)
        write_ready_file(config.ready_file, {"http": address})
        os.nice(NICE)  # streams of clients go first when CPU time is scarce
        await stop.wait()
        await runner.drain(config.drain_timeout_s)
        server.should_exit = True
        await asyncio.wait(parts[:1], timeout=GRACE_S + 1.0)
    finally:
        for task in parts:
            task.cancel()
        await asyncio.gather(*parts, return_exceptions=True)
        await api.close()
        runner.close()
    failed = [t for t in parts if not t.cancelled() and t.exception() is not None]
    if failed:
        raise StartupError(f"{failed[0].get_name()} failed: {failed[0].exception()}")


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket whose connections buffer little for a client that reads slowly. Raises StartupError."""
    sock = bind(host, port, "--batches-port", "batches")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return sock


def make_server(routes: BatchRoutes) -> uvicorn.Server:
    return _Server(
        uvicorn.Config(
            routes.app(),
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
        )
    )


def _trusting(cert_file: str) -> ssl.SSLContext:
    """Returns a context that accepts this certificate and no other, whatever the name of the server. Raises
    StartupError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(expanded(cert_file))
    except (OSError, ssl.SSLError) as error:
        raise StartupError(f"--tls-cert-file {cert_file}: {error}") from None
    return context
