"""A fake coordinator: ports, ready-file, GET /workers, drain on SIGTERM. Workers join over HTTP.

The file that FAKE_DEMAND names, if it exists, is the part `coordinator` of GET /workers. FAKE_COORDINATOR selects a
failure: `refuse` (startup error), `hang` (never drains), `crash-once` (dies a second after two workers joined), `late`
(with --take-over it opens no ports). Otherwise it fails with --take-over: it cannot share its ports.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from baton.runtime.process import die_with_parent, record_error


def alive(row: dict[str, Any]) -> bool:
    return all(Path(f"/proc/{pid}").exists() for pid in row["pids"])


def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", action="append", type=int)
    parser.add_argument("--ready-file", type=Path)
    options, _ = parser.parse_known_args()
    mode = os.environ.get("FAKE_COORDINATOR", "")
    if mode == "refuse":
        record_error("the fake coordinator refuses")
        sys.exit(3)
    if mode == "late" and "--take-over" in sys.argv:
        time.sleep(60)
    workers: dict[str, dict[str, Any]] = {}
    draining = threading.Event()
    informed: set[str] = set()  # workers that have been answered to drain

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/workers":
                rows = [row | ({} if alive(row) else {"state": "lost"}) for row in workers.values()]
                demand = Path(os.environ.get("FAKE_DEMAND", "/nowhere"))
                self.reply(
                    {"workers": rows} | ({"coordinator": json.loads(demand.read_text())} if demand.exists() else {})
                )
            else:
                drains = draining.is_set()
                self.reply({"drain": drains, "run": os.getpid()})
                if drains:
                    informed.add(self.path.partition("?")[2])

        def do_POST(self) -> None:
            worker = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            workers[worker["id"]] = worker
            self.reply({"run": os.getpid()})

        def reply(self, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", options.port[-1]), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stops: list[int] = []  # not an Event: `set` in a handler can deadlock on the lock that `wait` holds
    signal.signal(signal.SIGTERM, lambda number, _: stops.append(number))
    address = f"127.0.0.1:{server.server_address[1]}"
    partial = options.ready_file.with_suffix(".tmp")
    partial.write_text(json.dumps({"http": address, "grpc": address, "control": address}))
    partial.replace(options.ready_file)
    marker = options.ready_file.with_name("crashed")
    if mode == "crash-once" and not marker.exists():
        marker.touch()
        give_up = time.monotonic() + 30
        while len(workers) < 2 and time.monotonic() < give_up:
            time.sleep(0.05)
        time.sleep(1.0)
        print("the fake coordinator crashes", flush=True)
        os._exit(1)
    give_up = time.monotonic() + 60
    while not stops and time.monotonic() < give_up:
        time.sleep(0.02)
    draining.set()
    if mode == "hang":
        time.sleep(60)
    give_up = time.monotonic() + 10
    while {name for name, row in workers.items() if alive(row)} - informed and time.monotonic() < give_up:
        time.sleep(0.02)
    time.sleep(0.1)  # the last answer may still be on its way


if __name__ == "__main__":
    main()
