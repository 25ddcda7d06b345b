from __future__ import annotations

import io
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from launch.cluster_api import WorkerView
from launch.ps import print_workers, since

WORKER: dict[str, Any] = {
    "id": "prefill-0",
    "role": "prefill",
    "tensor_parallel": 2,
    "host": "10.0.0.2",
    "state": "ready",
    "since_s": 250.4,
    "incarnation": 3,
    "blocks_free": 40,
    "blocks_total": 64,
    "running": 5,
    "waiting": 1,
    "pids": [11, 12],
}


def test_one_line_for_each_worker() -> None:
    out = io.StringIO()
    print_workers([WorkerView("prefill-0", "prefill", "ready", (11, 12), WORKER)], Console(file=out, width=100))
    head, line = out.getvalue().splitlines()
    assert " ".join(head.split()) == "worker role tp host state incarnation blocks free running waiting since"
    assert line.split() == ["prefill-0", "prefill", "2", "10.0.0.2", "ready", "3", "40/64", "5", "1", "4m10s"]


def test_nothing_is_cut_in_a_narrow_terminal() -> None:
    out = io.StringIO()
    worker = {**WORKER, "incarnation": 1795214507000000000}
    print_workers([WorkerView("prefill-0", "prefill", "ready", (11, 12), worker)], Console(file=out, width=60))
    _, line = out.getvalue().splitlines()
    assert line.split()[5:7] == ["1795214507000000000", "40/64"]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59, "59s"), (3600, "1h0m"), (90061, "1d1h"), (None, "?")])
def test_since(seconds: object, text: str) -> None:
    assert since(seconds) == text


@pytest.fixture
def url() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"workers": [WORKER]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_json_is_all_that_the_coordinator_says(url: str) -> None:
    from launch.cli import baton

    shown = CliRunner().invoke(baton, ["ps", url, "--json"])
    assert json.loads(shown.output) == {"workers": [WORKER]}
