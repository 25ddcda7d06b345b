"""Where the doctors of a cluster and their probes exchange data: small JSON values by name, over HTTP.

The doctor on the coordinator's node hosts the board at the coordinator's control address, which is free until the
cluster starts. A client with another topology is refused and cannot write. The board is not torch's store because the
calls of that store have no timeout of their own (decision 0053).
"""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from baton.core.errors import StartupError
from baton.core.names import host_port
from launch.cluster_api import request_json

_PLAN_HEADER = "x-baton-plan"
_MAX_BYTES = 1 << 20
_CALL_TIMEOUT_S = 5.0
_POLL_S = 0.05


class Board:
    """The values and their HTTP server; the process that hosts the board may read and write `values` at any time.

    Raises StartupError when the address cannot be bound.
    """

    def __init__(self, host: str, port: int, digest: str) -> None:
        self.values: dict[str, Any] = {}
        self.mismatched_hosts: set[str] = set()
        board = self

        class Handler(BaseHTTPRequestHandler):
            timeout = _CALL_TIMEOUT_S

            def do_GET(self) -> None:
                name = self.path.lstrip("/")
                if self._same_plan():
                    self._reply(200 if name in board.values else 404, board.values.get(name))

            def do_PUT(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(size) if 0 <= size <= _MAX_BYTES else b""
                if self._same_plan():
                    board.values[self.path.lstrip("/")] = json.loads(body)
                    self._reply(200, None)

            def _same_plan(self) -> bool:
                if self.headers.get(_PLAN_HEADER) == digest:
                    return True
                board.mismatched_hosts.add(self.client_address[0])
                self._reply(409, None)
                return False

            def _reply(self, status: int, value: Any) -> None:
                body = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that closed its connection in the middle of a request

        try:
            self._server = Server((host, port), Handler)
        except OSError as error:
            raise StartupError(f"the doctor cannot listen on {host}:{port}: {error.strerror or error}") from None
        self.address = (host, int(self._server.server_address[1]))
        threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class BoardClient:
    """The client of a board on another host or in another process. Calls raise OSError when they get no reply,
    PermissionError when the board belongs to another topology."""

    def __init__(self, host: str, port: int, digest: str) -> None:
        self._base = f"http://{host_port(host, port)}"
        self._headers = {_PLAN_HEADER: digest}

    def put(self, name: str, value: object) -> None:
        self._accepted(*request_json("PUT", f"{self._base}/{name}", _CALL_TIMEOUT_S, value, self._headers))

    def get(self, name: str) -> Any:
        """Returns the value, or None while there is none."""
        return self._accepted(*request_json("GET", f"{self._base}/{name}", _CALL_TIMEOUT_S, headers=self._headers))

    def wait(self, name: str, timeout_s: float) -> Any:
        """Polls until there is a value; returns None after `timeout_s`. A call that fails meanwhile is retried."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                value = self.get(name)
            except OSError:
                value = None
            if value is not None or time.monotonic() >= deadline:
                return value
            time.sleep(_POLL_S)

    @staticmethod
    def _accepted(status: int, value: Any) -> Any:
        if status == 409:
            raise PermissionError("the coordinator's node has a different topology file")
        return value if status == 200 else None
